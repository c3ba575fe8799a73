"""Quantization by a scheme: blocks, statistics, scales, elements."""
