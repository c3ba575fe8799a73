"""Linear layers whose three matrix products run in low precision: recipes, operands, forward and both gradients."""
