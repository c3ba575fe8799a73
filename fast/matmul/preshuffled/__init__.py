"""Preshuffled weights: codes in the order of the tensor core's registers, and their products with few rows."""
