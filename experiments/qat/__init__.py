"""Experiment `qat`: what quantization-aware training recovers."""
