"""Optimizers in low precision: how their states and parameters are stored, and one step of each, bit for bit."""
