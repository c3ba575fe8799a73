"""The butterfly of `reference.training.hadamard` on float32 values in registers: every addition in the declared order."""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import SIGN, bits_of, float_of
from fast.kernels.sm90.bf16x2 import rounded_once


@triton.jit
def mixed_tuple(v, LENGTH: tl.constexpr, SIGNS: tl.constexpr, FACTOR: tl.constexpr):
    """A tuple of LENGTH tensors, the elements of blocks one by one: sums and differences, times FACTOR.

    SIGNS: bit i where element i is negated first.
    """
    made = ()
    for i in tl.static_range(LENGTH):
        made += (negated(v[i], (SIGNS >> i) & 1),)
    for stage in tl.static_range(16):
        if (1 << stage) < LENGTH:
            made = _stage(made, LENGTH, stage)
    out = ()
    for i in tl.static_range(LENGTH):
        out += (made[i] * FACTOR,)
    return out


@triton.jit
def _stage(v, LENGTH: tl.constexpr, STAGE: tl.constexpr):
    """Elements 2**STAGE apart by their sum and difference."""
    made = ()
    for i in tl.static_range(LENGTH):
        if (i >> STAGE) & 1:
            made += (v[i - (1 << STAGE)] - v[i],)
        else:
            made += (v[i] + v[i + (1 << STAGE)],)
    return made


@triton.jit
def side_by_side(v, LENGTH: tl.constexpr, P: tl.constexpr):
    """LENGTH tensors (P,) of a tuple as one (P, LENGTH): nothing leaves its thread, and the compiler sees one tensor."""
    for level in tl.static_range(8):
        if (1 << level) < LENGTH:
            v = _joined(v, LENGTH >> (level + 1), 2 << level, P)
    return v[0]


@triton.jit
def _joined(v, HALF: tl.constexpr, WIDTH: tl.constexpr, P: tl.constexpr):
    """Tensors i and i + HALF side by side, (P, WIDTH)."""
    made = ()
    for i in tl.static_range(HALF):
        made += (tl.reshape(tl.join(v[i], v[i + HALF]), (P, WIDTH)),)
    return made


@triton.jit
def one_by_one(tile, LENGTH: tl.constexpr, P: tl.constexpr):
    """The tuple of a tile of `side_by_side`."""
    v = (tile,)
    for level in tl.static_range(8):
        if (2 << level) <= LENGTH:
            v = _split(v, 1 << level, LENGTH >> (level + 1), P)
    return v


@triton.jit
def _split(v, COUNT: tl.constexpr, WIDTH: tl.constexpr, P: tl.constexpr):
    """Tensors (P, 2 WIDTH) as those of even columns, and then those of odd ones; (P,) for a WIDTH of 1."""
    low, high = (), ()
    for i in tl.static_range(COUNT):
        if WIDTH > 1:
            even, odd = tl.split(tl.reshape(v[i], (P, WIDTH, 2)))
        else:
            even, odd = tl.split(v[i])
        low += (even,)
        high += (odd,)
    return low + high


@triton.jit
def mixed_words(v, WORDS: tl.constexpr, SIGNS: tl.constexpr, FACTOR: tl.constexpr):
    """Four tensors (P, WORDS): element 4 w + j of a block is v[j][:, w]. Stages beyond the first two cross lanes."""
    w = tl.arange(0, WORDS)[None, :]
    made = ()
    for j in tl.static_range(4):
        made += (float_of(bits_of(v[j]) ^ _sign_of(w, j, SIGNS, WORDS)),)
    made = _stage(_stage(made, 4, 0), 4, 1)
    for stage in tl.static_range(14):
        if (1 << stage) < WORDS:
            made = _across(made, w, stage)
    out = ()
    for j in tl.static_range(4):
        out += (made[j] * FACTOR,)
    return out


@triton.jit
def _across(v, w, STAGE: tl.constexpr):
    """Sums and differences with the word 2**STAGE away: of the right one p - v, which is p + (-v)."""
    partner = tl.broadcast_to(w ^ (1 << STAGE), v[0].shape)
    flip = ((w >> STAGE) & 1) << 31
    made = ()
    for j in tl.static_range(4):
        made += (tl.gather(v[j], partner, 1) + float_of(bits_of(v[j]) ^ flip),)
    return made


@triton.jit
def _sign_of(w, J: tl.constexpr, SIGNS: tl.constexpr, WORDS: tl.constexpr):
    """The sign bit of elements 4 w + J, int32 (1, WORDS)."""
    made = w * 0
    for i in tl.static_range(WORDS):
        if (SIGNS >> (4 * i + J)) & 1:
            made = made | tl.where(w == i, SIGN, 0)
    return made


@triton.jit
def negated(v, YES: tl.constexpr):
    """-v by its sign bit."""
    if YES:
        return float_of(bits_of(v) ^ SIGN)
    else:
        return v


@triton.jit
def in_dtype(v, COUNT: tl.constexpr, DTYPE: tl.constexpr, HAS_PTX: tl.constexpr):
    """A tuple of float32 tensors rounded to the input's dtype."""
    made = ()
    for i in tl.static_range(COUNT):
        if DTYPE == "float32":
            made += (v[i],)
        else:
            made += (rounded_once(v[i], DTYPE, HAS_PTX),)
    return made
