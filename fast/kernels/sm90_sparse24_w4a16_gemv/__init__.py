"""Few rows by a weight of 4-bit integers in 2:4 storage, in CUDA C++ for Hopper: warps that each stream a part of K."""
