"""ONNX: quantized linear layers as operators, and the export of whole models."""
