"""Products with a 2:4 weight on Hopper: a kernel in CUDA C++ that NVRTC compiles at first use."""
