"""Models that experiments measure: one Llama, its training from scratch, and its quantized copies."""
