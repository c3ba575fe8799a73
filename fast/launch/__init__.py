"""From a call to launches, of Triton and of CUDA C++: compiled kernels, the cache of calls, products as programs."""
