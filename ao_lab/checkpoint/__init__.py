"""Checkpoints: folders of quantized weights, those of other libraries included."""
