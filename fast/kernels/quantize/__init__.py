"""The block kernel: choose scales, quantize, fake-quantize, dequantize, and their gradients."""
