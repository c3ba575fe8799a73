"""What sources in CUDA C++ for Hopper have in common: headers, and the one that is generated."""
