"""Kernels of `fast.attention`."""
