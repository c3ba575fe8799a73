"""Products of many rows of int8 codes on Hopper: a kernel in CUDA C++ that NVRTC compiles at first use."""
