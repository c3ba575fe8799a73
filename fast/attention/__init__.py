"""Attention over stored keys and values, and writing them."""
