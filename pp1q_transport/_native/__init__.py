"""Native kernels and their plain-Python oracle. Call `kernels` through the modules above; it checks bounds only."""
