"""What 2:4 sparsity costs: a vision transformer on real digits, and a language model, over paired seeds."""
