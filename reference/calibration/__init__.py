"""Calibration: quantizing with data. Second moments of inputs, GPTQ, searched scales, and which scheme each layer gets."""
