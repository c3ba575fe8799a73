"""Products of inputs that are quantized on the way and plain weights, one launch on a GPU."""
