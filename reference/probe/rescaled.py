"""Whether outputs differ from those of a right kernel as another convention of scales makes them differ, not as wrong sums do.

A kernel may store its scales in bfloat16, or map the largest magnitude onto 127.5 where the specification has 127. Let e be
the rounding error of an operand in the outputs, and s the difference of the kernel's outputs from the right ones. Three things
tell s:

* **Known conventions**: an operand quantized under its scales rounded to bfloat16 or float16, or for 127.5 or 128 where the
  specification has 127, has s, or most of it.
* **Scales that are rounded after the quantized values were found**: s is a small multiple of each block's part of the sum, the
  same for all outputs of a row of x, or of w. Least squares find it.
* **Values rounded anew under another scale**: the error is e + s then, and as large as e was, so that <s, e> is -|s|^2 / 2.
  Sums that are wrong have nothing to do with e: <s, e> is about 0.

A convention is one rule for all scales of an operand. So what it leaves unexplained may be no other in one output, token or
channel than in the rest, and factors have to move nearly all tokens, or channels: one of another scale is a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import sqrt
from typing import Any

import numpy as np

from reference.formats.encode import decode, encode
from reference.probe.each_output import BEYOND, ties
from reference.probe.estimates import F64
from reference.probe.faults import Case, value
from reference.quantize.quantize import quantize
from reference.quantize.scales import choose_scales
from reference.quantize.stored import Quantized, Scales
from reference.schemes.schemes import Scheme

#: What scales are rounded to.
DTYPES = ("bfloat16", "float16")
#: What others map the largest magnitude onto where the specification has 127.
TARGETS = (127.5, 128)
#: Another scale is off by a rounding to bfloat16 at most, where the quantized values are those of the specification.
ROUNDING = 2.0**-8
#: Which share of the difference a convention of scales has to explain, in standard errors of chance at least so many.
SHARE, CHANCE = 0.5, 4.0
#: Blocks of a row of w (x) that are fitted, for each of which there are so many tokens (outputs) at least.
FITTED = 4
#: So many times what is usual in its token and channel an output is another's; the largest of a million normal numbers is 8
#: medians, and sums have heavier tails where few values are large.
APART = 24.0
#: The cosine from which on a token's difference is a multiple of its outputs; that of rounding errors is about 1 / sqrt(N).
ALONG = 0.9
#: The share of scales that another storage moves by more than so much of the most: one in eight of rounded ones moves less.
MOVED, LITTLE = 0.75, 1 / 16
#: Tokens and outputs that are looked at.
MOST = 256


def rescaled(case: Case, y: F64, rows: Any, bound: F64) -> bool:
    """Whether at least half of the difference of outputs y (M, N), those of the tokens `rows` of a case, from the right ones is
    that of other scales, and no output, token or channel has another difference than the rest. bound (M, N): what outputs may
    differ by in any convention."""
    some = np.flatnonzero(rows)[:MOST]
    right = case.right[some, :MOST]
    size = np.linalg.norm(right, axis=1, keepdims=True)
    size[size == 0] = 1
    s, least = ((one[:MOST, :MOST]) / size for one in (y[:MOST, :MOST] - right, bound))
    whole = float((s**2).sum())
    if not whole:
        return False
    left, of_ties = _without_known(case, y[:MOST, :MOST], some)
    least = least + BEYOND * of_ties / size
    rest = _without_factors(case, left / size, some, size)
    share = 1 - float((rest**2).sum()) / whole
    for e, terms in _rounding(case, some, size):
        share += _anew(rest, e, terms, whole)
    return share > SHARE and not (_apart(rest, least) or _in_proportion(left / size, right / size, least))


def _apart(rest: F64, least: F64) -> bool:
    """Whether what a convention leaves of an output is far more than that of its token and channel: a convention holds for all
    outputs of a token or channel alike, so that one that leaves most as they are explains none of the others."""
    off = np.abs(rest)
    of_token, of_channel = (np.median(off, axis, keepdims=True) for axis in (1, 0))
    usual = of_token * of_channel / (float(np.median(off)) or 1.0)
    return bool((off > np.maximum(APART * usual, least)).any())


def _in_proportion(rest: F64, right: F64, least: F64) -> bool:
    """Whether a token's or channel's outputs are all the right ones times a factor that no scale in bfloat16 makes, truncated
    ones included."""
    for s, y, bound in ((rest, right, least), (rest.T, right.T, least.T)):
        both, own, size = ((one * two).sum(1) for one, two in ((s, y), (s, s), (y, y)))
        along = np.abs(both) > ALONG * np.sqrt(own * size)
        if (along & (np.abs(both) > 2 * ROUNDING * size) & (np.abs(s) > bound).any(1)).any():
            return True
    return False


def _without_known(case: Case, y: F64, some: Any) -> tuple[F64, F64]:
    """Outputs without those of the convention of w's scales, then of x's, that leaves least, or of the specification's own; and
    what values at ties under these scales may add."""
    a, b = case.a[some], case.b[:MOST]
    of_a, of_b = np.zeros_like(a), np.zeros_like(b)
    for other, ties_of in _under_others(case.w[:MOST], case.weight_scheme):
        if np.linalg.norm(y - a @ other.T) < np.linalg.norm(y - a @ b.T):
            b, of_b = other, ties_of()
    for other, ties_of in () if case.scheme is None else _under_others(case.x[some], case.scheme):
        if np.linalg.norm(y - other @ b.T) < np.linalg.norm(y - a @ b.T):
            a, of_a = other, ties_of()
    return y - a @ b.T, of_a @ (np.abs(b) + of_b).T + np.abs(a) @ of_b.T


def _under_others(x: Any, scheme: Scheme) -> Iterator[tuple[F64, Callable[[], F64]]]:
    """The values of an operand under other conventions of scales, and a function that says how far those at ties may be off."""
    scales = choose_scales(x, scheme)
    for convention in _conventions(scheme):
        values = value(quantize(x, scheme, scales=convention(scales)))
        yield values, partial(ties, x, scheme, values, convention)


def _conventions(scheme: Scheme) -> Iterator[Callable[[Scales], Scales]]:
    """Scales rounded to 16 bits (those that these hold), to bfloat16 down and up, or for `TARGETS`; of float32 scales without
    outer ones."""

    def replaced(scales: Scales, other: Any) -> Scales:
        held = np.isfinite(other) & (other != 0)
        return replace(scales, scale=np.where(held, other, scales.scale))

    def stored(scales: Scales, dtype: str) -> Scales:
        return replaced(scales, np.asarray(decode(encode(scales.scale, dtype), dtype), np.float32))

    def aside(scales: Scales, more: int) -> Scales:
        bits = np.asarray(scales.scale, np.float32).view(np.uint32) + np.uint32(more) & np.uint32(0xFFFF0000)
        return replaced(scales, bits.view(np.float32))

    def onto(scales: Scales, target: float) -> Scales:
        return replaced(scales, scales.scale * np.float32(127 / target))

    if scheme.scale.storage == "float32" and scheme.outer is None:
        yield from (partial(stored, dtype=dtype) for dtype in DTYPES)
        yield from (partial(aside, more=more) for more in (0, 0xFFFF))
        yield from (partial(onto, target=target) for target in TARGETS)


def _anew(s: F64, e: F64, terms: int, whole: float) -> float:
    """The share of |s|^2 that values rounded anew explain; 0 where that may be chance."""
    both = float((e**2).sum())
    if not both:
        return 0.0
    share = -2 * float((s * e).sum()) / whole
    spread = 2 * sqrt(both * float((s**2).sum()) / terms) / whole
    return share if share > CHANCE * spread else 0.0


def _rounding(case: Case, some: Any, size: F64) -> Iterator[tuple[F64, int]]:
    """The error of w's rounding, and that of x's, which has nothing of the other in it; and how many numbers it is made of."""
    tokens, channels = len(some), case.x.shape[1]
    x, w, b = case.x[some].astype(np.float64), case.w[:MOST].astype(np.float64), case.b[:MOST]
    of_w = x @ (b - w).T / size
    of_x = (case.a[some] - x) @ b.T / size
    inner = float((of_w**2).sum())
    apart = of_x - of_w * (float((of_x * of_w).sum()) / inner if inner else 0.0)
    yield of_w, len(w) * min(tokens, channels)
    yield apart, tokens * min(len(w), channels)


def _without_factors(case: Case, s: F64, some: Any, size: F64) -> F64:
    """s without what other scales of w's blocks, then of x's, add to it, each off by `ROUNDING` at most."""
    a, b = case.a[some], case.b[:MOST]
    rest = _fitted(s, a, b, _blocks(case.wq), size)
    return _fitted(rest.T, b, a, 1 if case.scheme is None else _blocks(case.xq), np.ones((1, 1)), size).T


def _blocks(q: Quantized) -> int:
    """Scales of a row along K."""
    return int(q.scale.shape[1]) if q.scale.ndim == 2 else 1


def _fitted(s: F64, a: F64, b: F64, blocks: int, rows: F64, columns: Any = 1.0) -> F64:
    """s (M, N), whose rows and columns are divided by those, without the best multiples of the parts of each column's sum, one
    for each block of b (N, K); s itself where these are of few columns: a convention moves the scales of nearly all."""
    length = -(-a.shape[1] // blocks)
    if len(a) < FITTED * blocks:
        return s
    cuts = [slice(i * length, (i + 1) * length) for i in range(blocks)]
    parts = np.stack([a[:, cut] @ b[:, cut].T for cut in cuts], 2) / np.asarray(rows)[..., None]
    parts = parts.transpose(1, 0, 2) / np.reshape(columns, (-1, 1, 1))  # (N, M, blocks)
    products = parts.transpose(0, 2, 1) @ parts
    unit = np.trace(products, axis1=1, axis2=2)[:, None, None] / blocks
    ridge = np.where(unit > 0, 1e-9 * unit, 1) * np.eye(blocks)
    found = np.linalg.solve(products + ridge, (parts * s.T[:, :, None]).sum(1)[:, :, None])
    found = np.clip(found, -ROUNDING, ROUNDING)
    each = np.abs(found).max((1, 2))
    moved = float((each > LITTLE * each.max()).mean())
    return np.asarray(s - (parts @ found)[:, :, 0].T) if moved >= MOVED else s


__all__ = ["rescaled"]
