"""Rows of 16-bit floats times a stored weight of packed integers of 2 to 6 bits, for Hopper."""
