"""The rules of `reference.quantize` as device functions."""
