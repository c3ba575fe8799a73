"""Which kernel multiplies with a `QuantizedTensor`."""
