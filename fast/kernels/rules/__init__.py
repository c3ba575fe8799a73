"""The rules of `reference.quantize` as device functions. They use instruction sequences of `sm90`, never the other way round."""
