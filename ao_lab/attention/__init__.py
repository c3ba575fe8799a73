"""Attention in 8 bits: for a transformers model, or in the place of torch's own function."""
