"""Products of many 16-bit rows with a preshuffled weight on Hopper: a kernel in CUDA C++ that NVRTC compiles at first use."""
