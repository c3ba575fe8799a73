"""Tuning: measures which functions compute the products of a model's layers, on this device, and saves the choices."""
