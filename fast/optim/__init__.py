"""Steps of low-precision optimizers for torch tensors: the bits of `reference.optim`, many parameters at once."""
