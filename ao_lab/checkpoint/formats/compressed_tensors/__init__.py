"""Reader of compressed-tensors checkpoints."""
