"""Random layers of unsigned integers, as other libraries' checkpoints hold them, and the codes of what was read."""

import numpy as np
import torch

import reference


def random_layer(bits, inputs, outputs, group, seed, lowest=0):
    """Unsigned codes, zero points and float16 scales (positive, negative, subnormal, infinite, NaN)."""
    rng = np.random.default_rng(seed)
    groups = 1 if group == -1 else -(-inputs // group)
    codes = rng.integers(0, 1 << bits, (outputs, inputs))
    zeros = rng.integers(lowest, 1 << bits, (outputs, groups))
    scales = torch.from_numpy(rng.integers(0, 1 << 16, (outputs, groups)).astype(np.uint16)).view(
        torch.float16
    )
    return codes, zeros, scales


def stored_codes(weight):
    """Unsigned codes of a stored weight of integers, as its file had them."""
    fmt = weight.scheme.format
    signed = reference.unpack(weight.codes.numpy(), fmt, tuple(weight.shape)).astype(int)
    return (signed + (1 << (fmt.bits - 1))) % (1 << fmt.bits)
