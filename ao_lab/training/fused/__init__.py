"""Layers between the linear ones of a block, RMSNorm, SwiGLU and rotary embedding, as one kernel forward and one backward."""
