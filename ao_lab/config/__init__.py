"""Configurations of `quantize_`, and the recipes that they stand for."""
