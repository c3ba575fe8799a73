"""Layers whose result is quantized: RMSNorm and SwiGLU."""
