"""2:4 sparsity for torch tensors."""
