"""Training in low precision: linear layers whose three matrix products run on quantized operands."""
