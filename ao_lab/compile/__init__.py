"""Passes over what `torch.compile` makes of a quantized model."""
