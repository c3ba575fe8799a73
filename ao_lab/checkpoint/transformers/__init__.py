"""ao_lab as a quantization backend of transformers."""
