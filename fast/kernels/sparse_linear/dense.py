"""The dense weight of 4-bit integers in 2:4 storage, as `reference.dequantize` makes it: for many rows, and for gradients.

A program writes TILE octets of groups, 32 columns each, which have one scale. One pass; bound by what it writes, 2 bytes an
element against 0.4 that it reads.
"""

import triton
import triton.language as tl

from fast.kernels.sparsity.groups import bytes_by
from fast.kernels.tile.fast_values import finished

WARPS, TILE, GROUPS = 4, 128, 8


@triton.jit
def dense_kernel(
    codes, metadata, scale, w, count, OCTETS: tl.constexpr, STORAGE: tl.constexpr, DTYPE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """w, of 16-bit floats, of `count` octets; OCTETS: those of a scale; STORAGE: of scales, bfloat16 perhaps as patterns."""
    if STORAGE == "bfloat16":
        scale = scale.to(tl.pointer_type(tl.bfloat16), bitcast=True)
    octet = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = octet < count
    group = tl.arange(0, 8)[None, :]
    kept = tl.load(codes + (octet[:, None] * 8 + group), mask=inside[:, None], other=0).to(tl.int32)
    word = tl.load(metadata.to(tl.pointer_type(tl.int32), bitcast=True) + octet, mask=inside, other=0)
    s = tl.load(scale + octet // OCTETS, mask=inside, other=0.0).to(tl.float32)[:, None]
    low, high = _scaled(kept << 28 >> 28, s, DTYPE), _scaled(kept << 24 >> 28, s, DTYPE)
    # What was not kept is code 0 times its scale: perhaps -0 or NaN.
    zero = _scaled(kept * 0, s, DTYPE)
    pair, selector = low | high << 16, _selector(word[:, None] >> 4 * group)
    first, second = bytes_by(pair, zero, selector), bytes_by(pair, zero, selector >> 16)
    at = (octet[:, None] * 8 + group)[:, :, None] * 2 + tl.arange(0, 2)[None, None, :]
    words = w.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store(words + at, tl.join(first, second), mask=inside[:, None, None])


@triton.jit
def _scaled(code, s, DTYPE: tl.constexpr):
    """Codes times scales as patterns in the low halves of words."""
    return finished(code.to(tl.float32) * s, s, DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _selector(nibble):
    """Which two bytes of (pair, zero) each of four elements is, a digit each. Of one index twice the second element stays, as
    in `reference.decompress`."""
    first, second = (nibble & 3) << 3, (nibble << 1) & 24
    low = 0x54545454 ^ (0x44 << first)
    return (low & ~(255 << second)) | (0x32 << second)
