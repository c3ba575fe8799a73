"""Kernels of `linear_sparse_int4`: a weight of 4-bit integers, half of which 2:4 storage keeps."""
