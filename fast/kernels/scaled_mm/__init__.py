"""Products of two matrices of 8-bit floats with one scale for each tensor or each row, for shapes that cuBLAS is slow at."""
