"""Files of other programs: what ao_lab quantizes, in GGUF and ONNX."""
