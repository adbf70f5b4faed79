# Compiled for its speed alone: no C types.
