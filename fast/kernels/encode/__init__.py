"""Elementwise encoding and packing."""
