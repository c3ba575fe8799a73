"""Blocks mixed by a randomized Hadamard transform, rounded by random words drawn in place, as values or codes."""
