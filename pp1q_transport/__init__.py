"""The transport of an exact proposal distribution q from a draft model to its verifier."""
