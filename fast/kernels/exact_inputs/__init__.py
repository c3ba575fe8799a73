"""Inputs of products, rounded to a scheme and written as 16-bit floats in which what is multiplied is exact."""
