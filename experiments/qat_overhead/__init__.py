"""Experiment `qat_overhead`: time and memory of quantization-aware training."""
