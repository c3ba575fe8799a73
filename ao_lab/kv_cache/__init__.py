"""Keys and values in low precision for transformers' `generate()`: recipes, cache, attention."""
