"""Checkpoints that plain transformers and vLLM read: compressed-tensors."""
