"""2:4 masks and compressed storage: one read of the tensor, and everything in registers."""
