"""RMSNorm and SwiGLU, with quantization fused."""
