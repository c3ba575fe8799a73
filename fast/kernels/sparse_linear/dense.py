"""The dense weight of 4-bit integers in 2:4 storage, as `reference.dequantize` makes it: for many rows, and for gradients.

A program writes TILE groups of four columns. One pass; bound by what it writes, 2 bytes an element against 0.4 that it reads.
"""

import triton
import triton.language as tl

from fast.kernels.tile.fast_values import finished

WARPS, TILE = 4, 1024


@triton.jit
def dense_kernel(
    codes, metadata, scale, w, count, GROUPS_OF_BLOCK: tl.constexpr, STORAGE: tl.constexpr, DTYPE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """w of `count` groups; GROUPS_OF_BLOCK: those of a scale; STORAGE: of scales, bfloat16 perhaps as patterns."""
    if STORAGE == "bfloat16":
        scale = scale.to(tl.pointer_type(tl.bfloat16), bitcast=True)
    first = tl.program_id(0).to(tl.int64) * TILE
    left = count - first
    group = tl.arange(0, TILE)
    inside = group < left
    kept = tl.load(codes + first + group, mask=inside, other=0).to(tl.int32)
    pair = tl.load(metadata + first // 2 + group // 2, mask=inside, other=0).to(tl.int32) >> (group % 2 * 4)
    s = tl.load(scale + (first + group) // GROUPS_OF_BLOCK, mask=inside, other=0.0).to(tl.float32)
    low, high = (kept << 28 >> 28).to(tl.float32), (kept << 24 >> 28).to(tl.float32)
    place = tl.arange(0, 4)[None, :]
    # Of one index twice the second element stays, as in `reference.decompress`.
    code = tl.where((pair & 3)[:, None] == place, low[:, None], 0.0)
    code = tl.where((pair >> 2 & 3)[:, None] == place, high[:, None], code)
    at = (first + group)[:, None] * 4 + place
    tl.store(w + at, finished(code * s[:, None], s[:, None], DTYPE), mask=inside[:, None])
