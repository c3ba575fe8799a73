"""Post-training quantization of models: `quantize_`, `explain`, sizes."""
