"""Quantizers for torch tensors, fake quantization with autograd among them."""
