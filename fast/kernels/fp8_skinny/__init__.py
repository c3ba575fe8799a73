"""Few rows in bfloat16, quantized to e4m3 on the way, by a plain weight of e4m3, in CUDA C++ for Hopper: one launch."""
