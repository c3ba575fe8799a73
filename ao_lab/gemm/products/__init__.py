"""Ways to compute a product that `ao_lab.gemm.select` chooses from: what each takes, and how it is called."""
