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
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import sqrt
from typing import Any

import numpy as np

from reference.formats.encode import decode, encode
from reference.probe.estimates import F64
from reference.probe.faults import Case, value
from reference.quantize.quantize import quantize
from reference.quantize.scales import choose_scales
from reference.quantize.stored import Quantized
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
#: Tokens and outputs that are looked at.
MOST = 256


def rescaled(case: Case, y: F64, rows: Any) -> bool:
    """Whether at least half of the difference of outputs y (M, N), those of the tokens `rows` of a case, from the right ones is
    that of other scales."""
    some = np.flatnonzero(rows)[:MOST]
    right = case.right[some, :MOST]
    size = np.linalg.norm(right, axis=1, keepdims=True)
    size[size == 0] = 1
    s = (y[:MOST, :MOST] - right) / size
    whole = float((s**2).sum())
    if not whole:
        return False
    rest = _without_factors(case, _without_known(case, s, some, size), some, size)
    share = 1 - float((rest**2).sum()) / whole
    for e, terms in _rounding(case, some, size):
        share += _anew(rest, e, terms, whole)
    return share > SHARE


def _without_known(case: Case, s: F64, some: Any, size: F64) -> F64:
    """s without what known conventions of w's, then of x's scales make of it, where that leaves less."""
    a, b = case.a[some], case.b[:MOST]
    known = [a @ (other - b).T / size for other in _under_others(case.w[:MOST], case.weight_scheme)]
    s = min([s, *(s - one for one in known)], key=np.linalg.norm)
    x = case.x[some]
    known = (
        [] if case.scheme is None else [(other - a) @ b.T / size for other in _under_others(x, case.scheme)]
    )
    return min([s, *(s - one for one in known)], key=np.linalg.norm)


def _under_others(x: Any, scheme: Scheme) -> Iterator[F64]:
    """The values of an operand under scales rounded to 16 bits (those that these hold), or for `TARGETS`; of float32 scales."""
    if scheme.scale.storage != "float32" or scheme.outer is not None:
        return
    scales = choose_scales(x, scheme)
    scale = scales.scale
    others = [np.asarray(decode(encode(scale, dtype), dtype), np.float32) for dtype in DTYPES]
    for other in (*others, *(scale * np.float32(127 / target) for target in TARGETS)):
        held = np.isfinite(other) & (other != 0)
        yield value(quantize(x, scheme, scales=replace(scales, scale=np.where(held, other, scale))))


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
    for each block of b (N, K)."""
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
    return np.asarray(s - (parts @ np.clip(found, -ROUNDING, ROUNDING))[:, :, 0].T)


__all__ = ["rescaled"]
