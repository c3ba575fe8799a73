"""The cases of experiment `kernels`."""
