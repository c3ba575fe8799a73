"""Ways to compute a product that `ao_lab.gemm.select` chooses from."""
