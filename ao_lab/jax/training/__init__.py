"""Low-precision training in JAX: `dot_general` by the recipes of `reference.training`."""
