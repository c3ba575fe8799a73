"""`encode`, `decode`, `pack` and `unpack` for torch tensors."""
