"""RMSNorm and SwiGLU for torch tensors, quantized or not."""
