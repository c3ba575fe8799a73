"""What kernels in CUDA C++ for Hopper have in common: headers, which their sources include, their compiler and launches."""
