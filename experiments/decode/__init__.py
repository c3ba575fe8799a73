"""Experiment `decode`: generation with quantized Llama-3.1-8B shapes."""
