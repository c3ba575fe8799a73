"""Rows quantized under scales that are given: codes, and a scale for each row that shows a NaN in it."""
