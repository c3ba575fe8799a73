"""Layers that train by a recipe under transforms: torch.func, forward-mode gradients, torch.jit.trace."""
