"""The dense weight of 4-bit integers in 2:4 storage, as `reference.dequantize` makes it: for many rows, and for gradients.

One pass, bound by what it writes, 2 bytes an element against 0.4 that it reads. A thread makes two groups, 8 columns, at a
time: 16 bytes beside those of its neighbours, so that a warp writes 512 bytes in a row. A program takes STEPS times TILE of
them, and reads all of its own before it writes the first.
"""

import triton
import triton.language as tl

from fast.kernels.sparsity.groups import bytes_by
from fast.kernels.tile.fast_codes import finished

#: Warps of a program; what they make at once, of two groups each, and how often.
WARPS, TILE, STEPS = 4, 128, 4
#: Columns of two groups.
COLUMNS = 8


@triton.jit
def dense_kernel(
    codes, metadata, scale, zero, w, count, PAIRS: tl.constexpr, STORAGE: tl.constexpr, DTYPE: tl.constexpr,
    TILE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """w, of 16-bit floats, of `count` pairs of groups; PAIRS: those of a scale; STORAGE: of scales, bfloat16 perhaps as
    patterns; zero: None where there are no zero points."""
    if STORAGE == "bfloat16":
        scale = scale.to(tl.pointer_type(tl.bfloat16), bitcast=True)
    first = tl.program_id(0).to(tl.int64) * (TILE * STEPS)
    read = ()
    for step in tl.static_range(STEPS):
        pair = first + step * TILE + tl.arange(0, TILE)
        inside = pair < count
        group = tl.arange(0, 2)[None, :]
        kept = tl.load(codes + (pair[:, None] * 2 + group), mask=inside[:, None], other=0)
        indices = tl.load(metadata + pair, mask=inside, other=0)
        s = tl.load(scale + pair // PAIRS, mask=inside, other=0.0)
        z = 0
        if zero is not None:
            z = tl.load(zero + pair // PAIRS, mask=inside, other=0)
        read = read + (kept, indices, s, z)  # noqa: RUF005
    for step in tl.static_range(STEPS):
        pair = first + step * TILE + tl.arange(0, TILE)
        kept, s = read[4 * step].to(tl.int32), read[4 * step + 2].to(tl.float32)[:, None]
        even, odd = kept << 28 >> 28, kept << 24 >> 28
        if zero is not None:
            z = read[4 * step + 3].to(tl.int32)[:, None]
            even, odd = even - z, odd - z
        both = _scaled(even, s, DTYPE) | _scaled(odd, s, DTYPE) << 16
        # What was not kept is 0 times its scale: perhaps -0 or NaN.
        none = _scaled(even * 0, s, DTYPE)
        selector = _selector(read[4 * step + 1].to(tl.int32)[:, None] >> 4 * tl.arange(0, 2)[None, :])
        low, high = bytes_by(both, none, selector), bytes_by(both, none, selector >> 16)
        # Of 8 bytes, the four elements of a group: two of those are one store.
        elements = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
        at = pair[:, None] * 2 + tl.arange(0, 2)[None, :]
        tl.store(w.to(tl.pointer_type(tl.int64), bitcast=True) + at, elements, mask=(pair < count)[:, None])


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
