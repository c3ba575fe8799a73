"""The kernel of `decode_attention`: a program for each query head."""

import triton
import triton.language as tl


@triton.jit
def _rotated(x, cosine, sine, d, WIDTH: tl.constexpr):
    """A head at x after the rotation of its pairs (i, i + half), rounded to its dtype, then float32."""
    v = tl.load(x + d).to(tl.float32)
    other = tl.load(x + (d + WIDTH // 2) % WIDTH).to(tl.float32)
    turned = tl.where(d < WIDTH // 2, -other, other) * tl.load(sine + d).to(tl.float32)
    made = v * tl.load(cosine + d).to(tl.float32) + turned
    return made.to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def _added(top, total, made, scores, values):
    """The running softmax (largest score, sum of its exponentials, weighted values) with more keys."""
    new_top = tl.maximum(top, tl.max(scores, 0))
    chances = tl.exp(scores - new_top)
    shrink = tl.exp(top - new_top)
    made = made * shrink + tl.sum(chances[:, None] * values.to(tl.float32), 0)
    return new_top, total * shrink + tl.sum(chances, 0), made


@triton.jit
def attention_kernel(
    qkv, cosine, sine, position, keys, values, y, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, LENGTH: tl.constexpr, STEP: tl.constexpr,
    LATE: tl.constexpr,
):  # fmt: skip
    """WIDTH numbers of y. scale: of scores; LENGTH: of the cache; STEP: keys at once; LATE: launched while the last programs of
    the kernel in front of it run, so that what the cache holds is on its way when they end; the kernel behind likewise."""
    head = tl.program_id(0)
    of = head // (HEADS // KV_HEADS)
    d, n = tl.arange(0, WIDTH), tl.arange(0, STEP)
    # Kernels further in front have ended: the cache and the position are those of the last step.
    last = tl.load(position).to(tl.int32)
    keys += of.to(tl.int64) * LENGTH * WIDTH
    values += of.to(tl.int64) * LENGTH * WIDTH
    place, there = n[:, None] * WIDTH + d[None, :], n[:, None] < last
    k = tl.load(keys + place, mask=there, other=0.0)
    v = tl.load(values + place, mask=there, other=0.0)
    if LATE:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    q = _rotated(qkv + head * WIDTH, cosine, sine, d, WIDTH) * scale
    own_key = _rotated(qkv + (HEADS + of) * WIDTH, cosine, sine, d, WIDTH)
    own_value = tl.load(qkv + (HEADS + KV_HEADS + of) * WIDTH + d)
    if head % (HEADS // KV_HEADS) == 0:
        # Beyond the cache lies another head's.
        tl.store(keys + last * WIDTH + d, own_key.to(keys.dtype.element_ty), mask=last < LENGTH)
        tl.store(values + last * WIDTH + d, own_value, mask=last < LENGTH)
    top, total, made = tl.sum(q * own_key, 0), 1.0, own_value.to(tl.float32)
    scores = tl.where(n < last, tl.sum(q[None, :] * k.to(tl.float32), 1), float("-inf"))
    top, total, made = _added(top, total, made, scores, v)
    for start in range(STEP, LENGTH, STEP):
        there = n[:, None] < last - start
        k = tl.load(keys + start * WIDTH + place, mask=there, other=0.0)
        v = tl.load(values + start * WIDTH + place, mask=there, other=0.0)
        scores = tl.where(n < last - start, tl.sum(q[None, :] * k.to(tl.float32), 1), float("-inf"))
        top, total, made = _added(top, total, made, scores, v)
    tl.store(y + head * WIDTH + d, (made / total).to(y.dtype.element_ty))
