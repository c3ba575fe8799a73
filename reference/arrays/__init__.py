"""One set of rules for three array libraries: what NumPy, JAX and torch arrays share, and exact float32 arithmetic on bits."""
