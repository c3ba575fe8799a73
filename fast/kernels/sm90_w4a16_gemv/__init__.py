"""Few rows by a preshuffled weight in CUDA C++ for Hopper: the weight as a stream of bulk copies."""
