"""HQQ of blocks along rows, all steps in one launch: `reference.calibration.hqq` with stop="block".

A program holds some blocks in registers as float64 until the last of them has ended, so a weight is read once, whatever the
number of steps. Sums are the reference's trees, and compilation without contraction rounds every operation. |e|^(p - 1) is
2^((p - 1) log2|e|), whose last bit may differ from a power's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fast.kernels.bits import rounded
from fast.kernels.rules.statistics import tree_sum
from fast.launch.launcher import UNFUSED, interpreted
from reference.calibration.inputs import LARGEST

#: Elements of a block at most: of longer ones the upper levels of a sum, which a thread adds alone, take its registers.
LONGEST = 256
#: Elements of a program, and of a warp of it.
TILE, WARP = 512, 128
#: A float64 of magnitude below 2^51 plus and minus this is rounded to the nearest even integer.
INTEGERS = tl.constexpr(1.5 * 2.0**52)
LARGEST_FLOAT = tl.constexpr(LARGEST)


@triton.jit
def hqq_kernel(
    w, scale, zero, result, count,
    SIZE: tl.constexpr, P: tl.constexpr, STEPS: tl.constexpr, POWER: tl.constexpr, BETA: tl.constexpr,
    TOP: tl.constexpr, MIDDLE: tl.constexpr, STORAGE: tl.constexpr,
):  # fmt: skip
    """P blocks of w (count, SIZE) with scales and zero points (count,) float32; result: zero points, as STORAGE holds them.
    POWER: p - 1."""
    row = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    exists = row < count
    inside = exists[:, None]
    x = tl.load(w + row[:, None] * SIZE + tl.arange(0, SIZE)[None, :], mask=inside, other=0).to(tl.float64)
    s = tl.load(scale + row, mask=exists, other=1).to(tl.float64)
    middle = tl.full((), MIDDLE, tl.float64)
    z = middle - tl.load(zero + row, mask=exists, other=0).to(tl.float64) / s
    best, least, active = z, tl.full((P,), float("inf"), tl.float64), exists
    step, going = 0, 1
    while (step < STEPS) & (going > 0):
        error, following = _step(x, s, z, SIZE, POWER, BETA, TOP)
        active = active & (error < least)
        best, least = tl.where(active, z, best), tl.where(active, error, least)
        z = middle - _as_stored((middle - following) * s, STORAGE).to(tl.float64) / s
        step += 1
        going = tl.max(active.to(tl.int32), 0)
    tl.store(result + row, _as_stored((middle - best) * s, STORAGE), mask=exists)


@triton.jit
def _step(x, s, z, SIZE: tl.constexpr, POWER: tl.constexpr, BETA: tl.constexpr, TOP: tl.constexpr):
    """(mean |error| of each block, the next zero points)."""
    zero = tl.full((), 0.0, tl.float64)
    top, beta, length = (
        tl.full((), TOP, tl.float64),
        tl.full((), BETA, tl.float64),
        tl.full((), SIZE, tl.float64),
    )
    whole = tl.full((), INTEGERS, tl.float64)
    by = s[:, None]
    q = tl.minimum(tl.maximum(((x / by + z[:, None]) + whole) - whole, zero), top)
    error = x - (q - z[:, None]) * by
    size = tl.abs(error)
    if POWER == 0:
        left = size - tl.full((), 1.0, tl.float64) / beta
    else:
        left = size - tl.exp2(tl.full((), POWER, tl.float64) * tl.log2(size)) / beta
    left = tl.maximum(left, zero)
    shrunk = tl.where(error < 0, -left, left)
    following = _sums(q - (x - shrunk) / by) / length
    return _sums(size) / length, following


@triton.jit
def _sums(x):
    """Sums of the rows of (P, SIZE), (P,): pairs in a thread or between lanes; `split` would go through shared memory."""
    return tl.reshape(tree_sum(x), (x.shape[0],))


@triton.jit
def _as_stored(value, STORAGE: tl.constexpr):
    """float64 rounded to float32 and to the storage, as float32; finite stays finite."""
    most = tl.full((), LARGEST_FLOAT, tl.float64)
    # A NaN, as a scale of 0 leaves one, is none of the operands of a maximum.
    bounded = tl.where(value == value, tl.minimum(tl.maximum(value, -most), most), value)
    short = bounded.to(tl.float32)
    return rounded(short, STORAGE)


def covers(rows: torch.Tensor, steps: int) -> bool:
    """Whether the kernel takes blocks (n, length) of this length and dtype."""
    length = rows.shape[1]
    power = length & (length - 1) == 0
    return steps > 0 and power and length <= LONGEST and rows.dtype != torch.float64


def zero_points(
    rows: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    storage: str,
    middle: float,
    top: int,
    steps: int,
    p: float,
    beta: float,
) -> torch.Tensor:
    """Zero points (n,) of blocks (n, length) as values in float32, each as its storage holds it.

    scale, zero: float32 (n,), decoded. storage: "float32", "bfloat16" or "float16". middle: the code that a zero point is the
    value of. top: the largest code.
    """
    count, length = rows.shape
    together = max(TILE // length, 1)
    warps = min(max(together * length // WARP, 1), 16)
    result = torch.empty(count, dtype=torch.float32, device=rows.device)
    options = {} if interpreted() else {"num_warps": warps, **UNFUSED}
    pointers = rows.contiguous(), scale.contiguous(), zero.contiguous(), result
    numbers = steps, float(p - 1), float(beta), float(top), float(middle), storage
    with torch.cuda.device(rows.get_device()):
        hqq_kernel[(triton.cdiv(count, together),)](*pointers, count, length, together, *numbers, **options)
    return result


__all__ = ["covers", "zero_points"]
