"""Quantized arrays as other libraries hold them."""
