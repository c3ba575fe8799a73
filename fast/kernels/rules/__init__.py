"""The rules of `reference.quantize` as device functions. They use the instruction sequences of `sm90`, not the other way."""
