"""Headers that sources in CUDA C++ for Hopper have in common."""
