"""Reader of torchao checkpoints."""
