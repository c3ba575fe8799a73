"""Attention over stored keys and values."""
