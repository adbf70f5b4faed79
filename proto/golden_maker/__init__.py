"""Makes the golden vectors. Imports nothing of the transport: it is the other side of the comparison."""
