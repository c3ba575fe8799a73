"""Two products of one input by weights of 4-bit integers in 2:4 storage, for torch tensors."""
