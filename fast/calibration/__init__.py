"""Calibration for torch tensors: quantizing with data."""
