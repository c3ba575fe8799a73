"""Schemes: how a tensor is stored, as records; ours and those of other projects."""
