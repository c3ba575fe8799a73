"""What Numba compiles for CPU tensors: loops over codes, and the vector instructions they are made of."""
