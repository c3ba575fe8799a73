"""What transforms of functions (`torch.vmap`, `torch.func`) ask of quantized weights beyond their operations."""
