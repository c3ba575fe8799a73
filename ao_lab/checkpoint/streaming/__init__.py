"""Checkpoints quantized tensor by tensor while they are read."""
