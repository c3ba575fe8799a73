"""Blocks mixed by a randomized Hadamard transform, rounded by random words drawn in place, as values or codes."""

#: Whether the kernels are chosen by themselves: not before tests/gpu/training/validate_mixed.py has agreed on a GPU, which no
#: emulation replaces, and has seen them run sooner than torch's operations.
CHOSEN = False
