"""The page of experiment `sparsity`."""
