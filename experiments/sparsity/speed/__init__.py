"""What 2:4 sparsity gains: times of a GPU at the shapes of published tables."""
