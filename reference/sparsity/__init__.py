"""N:M sparsity: masks and compressed storage."""
