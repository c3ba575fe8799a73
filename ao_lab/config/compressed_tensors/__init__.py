"""What readers of compressed-tensors compute, as rules on recipes: arguments, formats, activations, layouts."""
