"""Products of several rows of int8 codes, scales and zero points in the epilogue."""
