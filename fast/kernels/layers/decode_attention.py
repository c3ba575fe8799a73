"""The kernel of `fast.layers.decode_attention`: one program per query head, online softmax over the cache."""

from __future__ import annotations

import triton
import triton.language as tl


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
