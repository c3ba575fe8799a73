"""`rotary` and attention of one token for CUDA tensors.

`rotary`: all heads of a position in one program, which reads the position's tables once.
x is read where it lies; the result's memory is (B, T, H, D), as the products before and, in backward, after it have it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fast.kernels.sm90.bf16x2 import floats, narrowed, rounded_once
from fast.launch.launcher import FLOAT_NAMES, INT32, Call, CompiledLaunch, interpreted, power_above

# Elements of a thread, and of a program at most: more heads take several.
PER_THREAD, ELEMENTS = 16, 8192
# Instructions that take elements in pairs want two in each lane.
PAIRS = 64


@triton.jit
def rotary_kernel(
    x, cosine, sine, y, batch_stride, head_stride, stride, cosine_batch, cosine_stride, sine_batch, sine_stride, length,
    heads, width, tiles,
    INVERSE: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    HAS_PTX: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one position. Strides: of x, then of batches and positions of the tables."""
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    row = program // tiles
    batch, at = row // length, row % length
    head = (program % tiles) * HEADS + tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, HALF)[None, :]
    half = width // 2
    inside = (head < heads) & (i < half)
    source = x + batch * batch_stride + at * stride + head * head_stride + i
    first = floats(tl.load(source, mask=inside, other=0), HAS_PTX)
    second = floats(tl.load(source + half, mask=inside, other=0), HAS_PTX)
    c, s = cosine + batch * cosine_batch + at * cosine_stride, sine + batch * sine_batch + at * sine_stride
    c1, c2 = _table(c, i, half, first, HAS_PTX), _table(c + half, i, half, first, HAS_PTX)
    s1, s2 = _table(s, i, half, first, HAS_PTX), _table(s + half, i, half, first, HAS_PTX)
    if INVERSE:
        left, right = second * s2, -(first * s1)
    else:
        left, right = -(second * s1), first * s2
    target = y + (row * heads + head) * width + i
    made = rounded_once(first * c1, DTYPE, HAS_PTX) + rounded_once(left, DTYPE, HAS_PTX)
    tl.store(target, narrowed(made, DTYPE, HAS_PTX), mask=inside)
    made = rounded_once(second * c2, DTYPE, HAS_PTX) + rounded_once(right, DTYPE, HAS_PTX)
    tl.store(target + half, narrowed(made, DTYPE, HAS_PTX), mask=inside)


@triton.jit
def _table(table, i, half, like, HAS_PTX: tl.constexpr):
    """Half a row of a table for every head."""
    row = tl.load(table + tl.broadcast_to(i, like.shape), mask=tl.broadcast_to(i < half, like.shape), other=0)
    return floats(row, HAS_PTX)


def rotary(
    x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, inverse: bool, key: Any = None
) -> torch.Tensor | None:
    """`fast.layers.attention.rotary` by a kernel, or None where the reference has to answer."""
    if not _covers(x, cosine, sine):
        return None
    batch, heads, length, width = x.shape
    call = Call({"x": x, "cosine": cosine, "sine": sine}, strided=True)
    call.allocate("y", (batch, length, heads, width), x.dtype)
    half = power_above(width // 2)
    taken = min(power_above(heads), max(1, ELEMENTS // (2 * half)))
    tiles = -(-heads // taken)
    wide = sum(abs(s) * n for s, n in zip(x.stride(), x.shape, strict=True)) + x.numel() > INT32
    has_ptx = not interpreted() and taken * half >= PAIRS
    integers = (*_places(x), *_places(cosine), *_places(sine), length, heads, width, tiles)
    tail = (*integers, inverse, FLOAT_NAMES[x.dtype], wide, taken, half, has_ptx)
    warps = max(1, min(8, 2 * taken * half // (32 * PER_THREAD)))
    launch = CompiledLaunch(rotary_kernel, batch * length * tiles, tail, warps)
    call.launch(launch, ("x", "cosine", "sine", "y"))
    y: torch.Tensor = call.result("y", key, convert=lambda made: made.transpose(1, 2))
    return y


def _places(t: torch.Tensor) -> tuple[int, ...]:
    """Strides of batches, heads and positions; of a table without those of heads, 0 where all batches share it."""
    if t.dim() == 4:
        return t.stride()[:3]
    return (t.stride(0) if t.dim() == 3 and t.shape[0] > 1 else 0, t.stride(-2))


def _covers(x: torch.Tensor, cosine: Any, sine: Any) -> bool:
    """Whether the arguments are right, not empty, and rows lie without gaps; what is wrong the reference says."""
    if x.dtype not in FLOAT_NAMES or x.dim() != 4 or not x.numel() or x.shape[-1] % 2:
        return False
    batch, _, length, width = x.shape
    shapes = ((length, width), (1, length, width), (batch, length, width))
    alike = all(
        (t.dtype, t.device) == (x.dtype, x.device) and tuple(t.shape) in shapes for t in (cosine, sine)
    )
    return alike and all(t.stride(-1) == 1 for t in (x, cosine, sine))


# The kernel of `fast.layers.attention`: one program per query head, online softmax over the cache.


@triton.jit
def _rotate(x, cosine, sine, d, WIDTH: tl.constexpr):
    """A head at x after the rotation of its pairs (i, i + half), rounded to its dtype, then float32."""
    v = tl.load(x + d).to(tl.float32)
    other = tl.load(x + (d + WIDTH // 2) % WIDTH).to(tl.float32)
    swapped = tl.where(d < WIDTH // 2, -other, other) * tl.load(sine + d).to(tl.float32)
    rotated = v * tl.load(cosine + d).to(tl.float32) + swapped
    return rotated.to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def _accumulate(top, total, y, scores, values):
    """The running softmax (largest score, sum of its exponentials, weighted values) with more keys."""
    new_top = tl.maximum(top, tl.max(scores, 0))
    weights = tl.exp(scores - new_top)
    shrink = tl.exp(top - new_top)
    y = y * shrink + tl.sum(weights[:, None] * values.to(tl.float32), 0)
    return new_top, total * shrink + tl.sum(weights, 0), y


@triton.jit
def attention_kernel(
    qkv, cosine, sine, position, keys, values, y, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, LENGTH: tl.constexpr, STEP: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """One query head: WIDTH elements of y. scale: factor of scores; LENGTH: positions of the cache; STEP: keys at once;
    USE_PDL: programmatic dependent launch: the kernel starts while the one before it ends and loads the cache meanwhile."""
    head = tl.program_id(0)
    kv_head = head // (HEADS // KV_HEADS)
    d, n = tl.arange(0, WIDTH), tl.arange(0, STEP)
    # Kernels before the previous one have ended: the cache and the position are those of the last step.
    last = tl.load(position).to(tl.int32)
    keys += kv_head.to(tl.int64) * LENGTH * WIDTH
    values += kv_head.to(tl.int64) * LENGTH * WIDTH
    offsets, valid = n[:, None] * WIDTH + d[None, :], n[:, None] < last
    k = tl.load(keys + offsets, mask=valid, other=0.0)
    v = tl.load(values + offsets, mask=valid, other=0.0)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    q = _rotate(qkv + head * WIDTH, cosine, sine, d, WIDTH) * scale
    own_key = _rotate(qkv + (HEADS + kv_head) * WIDTH, cosine, sine, d, WIDTH)
    own_value = tl.load(qkv + (HEADS + KV_HEADS + kv_head) * WIDTH + d)
    if head % (HEADS // KV_HEADS) == 0:
        # Past the end of the cache another head's memory begins.
        tl.store(keys + last * WIDTH + d, own_key.to(keys.dtype.element_ty), mask=last < LENGTH)
        tl.store(values + last * WIDTH + d, own_value, mask=last < LENGTH)
    top, total, weighted = tl.sum(q * own_key, 0), 1.0, own_value.to(tl.float32)
    scores = tl.where(n < last, tl.sum(q[None, :] * k.to(tl.float32), 1), float("-inf"))
    top, total, weighted = _accumulate(top, total, weighted, scores, v)
    for start in range(STEP, LENGTH, STEP):
        valid = n[:, None] < last - start
        k = tl.load(keys + start * WIDTH + offsets, mask=valid, other=0.0)
        v = tl.load(values + start * WIDTH + offsets, mask=valid, other=0.0)
        scores = tl.where(n < last - start, tl.sum(q[None, :] * k.to(tl.float32), 1), float("-inf"))
        top, total, weighted = _accumulate(top, total, weighted, scores, v)
    tl.store(y + head * WIDTH + d, (weighted / total).to(y.dtype.element_ty))
