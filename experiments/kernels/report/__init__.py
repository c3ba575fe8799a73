"""The page of experiment `kernels`."""
