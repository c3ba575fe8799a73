"""`probe_`, `Probe`: what low precision costs each layer of a model, on its own data."""
