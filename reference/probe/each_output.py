"""The largest error of each output of a right kernel, whose quantized values are those of the specification: no statistics.

Averages and standard errors do not see one wrong output (a corner that a mask leaves out, a race): alone among thousands it
makes its own standard error. Where quantized values are known, three things are left that an output may err by, and each has a
bound:

* **Sums**, in any order: `reference.matmul.error_bound`. A kernel may also add codes before it takes the zero points off; the
  bound then counts both.
* **Rounding of the output** to its dtype: half a unit in its last place.
* **Values at ties.** A kernel that scales in another order (x * (448 / amax) for x / (amax / 448)) rounds quotients that lie
  within a few roundings of a tie to the other neighbour. Which ones these are is found by quantizing x (1 + s t) under the
  scales of x (1 + r t) for r, s of -1, 0, 1: each element may then be off by the largest difference that this makes, and
  |da| |b| + |a| |db| + |da| |db| is added up over K.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from reference.matmul.error_bound import float32_error, gamma, matmul_error_bound, rounding_error
from reference.matmul.linear import transposed
from reference.matmul.matmul import operands_of
from reference.probe.estimates import F64
from reference.probe.faults import F32, Case, value
from reference.quantize.quantize import quantize
from reference.quantize.scales import choose_scales
from reference.quantize.stored import Quantized, Scales
from reference.schemes.schemes import Scheme

#: How far another order of scaling takes a quotient, in relation to it: sixteen roundings of float32.
ORDER = 2.0**-20
#: So many times its bound an output has to be off: that covers scales that are rounded to bfloat16 beside outputs of 16 bits.
BEYOND = 4.0


class Beyond(NamedTuple):
    """The output that is furthest beyond its bound, or nearest to it: its token and channel, its error, its bound; and which
    tokens or channels as a whole are beyond `margin` times theirs, in words ("" where none are)."""

    at: tuple[int, int]
    off: float
    bound: float
    whole: str


def beyond(
    case: Case, y: F64, rows: Any, dtype: str, accumulation: str, *, quantized: bool, margin: float = 1.0
) -> Beyond:
    """Of outputs y (tokens that `rows` marks, N) the one that is furthest beyond its bound. None is left out: a token whose
    values lie at ties has the bound of its own ties. quantized: the kernel was given quantized operands, so that no value may
    be another."""
    off = np.abs(y - case.right[rows])
    bound = each_bound(case, off, rows, dtype, accumulation, quantized=quantized)
    over = off / np.maximum(bound, np.finfo(np.float64).tiny)
    at = np.unravel_index(int(over.argmax()), over.shape)
    numbers = np.flatnonzero(rows)
    whole = named_parts(over > margin, y, case.right[rows], numbers)
    return Beyond((int(numbers[at[0]]), int(at[1])), float(off[at]), float(bound[at]), whole)


def each_bound(case: Case, off: F64, rows: Any, dtype: str, accumulation: str, *, quantized: bool) -> F64:
    """What outputs of the tokens `rows`, whose errors are `off`, may err by: `sums_bound`, and `ties_bound` where some are off
    by more than that and the kernel quantizes."""
    bound = sums_bound(case, dtype, accumulation)[rows]
    return np.asarray(bound if quantized or not (off > bound).any() else bound + ties_bound(case)[rows])


def named_parts(over: Any, y: F64, right: F64, numbers: Any) -> str:
    """Tokens, else channels, most of whose outputs are beyond their bound, and what these are in relation to the right ones."""
    for what, of_one, labels in (("token", over, numbers), ("channel", over.T, np.arange(over.shape[1]))):
        some = of_one.mean(1) > 0.5
        if some.any():
            one, two = (values if what == "token" else values.T for values in (y, right))
            return f"{_named(what, labels[some])} {_times(one[some], two[some])}"
    return ""


def _named(what: str, numbers: Any) -> str:
    """Numbers of tokens or channels, those from the first to the last where they have no gap."""
    first, last, count = int(numbers[0]), int(numbers[-1]), len(numbers)
    if count == 1:
        return f"all of {what} {first}"
    gaps = "" if last - first + 1 == count else f", {count} of them,"
    return f"all of {what}s {first} to {last}{gaps}"


def _times(y: F64, right: F64) -> str:
    """The factor that outputs have, if it is one: where what is left without it is less than half."""
    size = float((right**2).sum())
    factor = float((y * right).sum()) / size if size else 1.0
    left, off = (float(np.linalg.norm(y - one * right)) for one in (factor, 1.0))
    return f"times {factor:.4g}" if left < off / 2 else "in no one proportion"


def sums_bound(case: Case, dtype: str, accumulation: str) -> F64:
    """(M, N): what sums of the quantized values and the rounding of outputs to `dtype` may lose; infinite where either may
    overflow. accumulation: as `reference.probe.detect.findings` has it."""
    a: Any = case.x if case.scheme is None else case.xq
    b = transposed(case.wq)
    if accumulation == "float32":
        left, right = operands_of(a, b)
        error = float32_error(left, right, None, left.k)
    else:
        promote = None if accumulation == "fast" else 128
        given: dict[str, Any] = {"accumulation": "hopper_fp8", "promote": promote}
        error = np.asarray(matmul_error_bound(a, b, **given), np.float64)
    error = error + gamma(case.x.shape[1] + 8) * _of_zero_points(case)
    return np.asarray(
        error if dtype == "float64" else error + rounding_error(np.abs(case.right) + error, dtype)
    )


def ties_bound(case: Case) -> F64:
    """(M, N): what values at ties of rounding may add where a kernel scales in another order; 0 where no value is at one."""
    of_a, of_b = _moved(case)
    a, b = np.abs(case.a), np.abs(case.b)
    return np.asarray(of_a @ (b + of_b).T + a @ of_b.T)


def ties_size(case: Case) -> F64:
    """(M, N): the root mean square of what `ties_bound` bounds, if each such value is another one, up or down by chance."""
    of_a, of_b = (one**2 for one in _moved(case))
    a, b = case.a**2, case.b**2
    return np.asarray(np.sqrt(of_a @ (b + of_b).T + a @ of_b.T))


def _moved(case: Case) -> tuple[F64, F64]:
    of_a = np.zeros_like(case.a) if case.scheme is None else ties(case.x, case.scheme, case.a)
    return of_a, ties(case.w, case.weight_scheme, case.b)


def ties(x: F32, scheme: Scheme, right: F64, convention: Callable[[Scales], Scales] = lambda one: one) -> F64:
    """How far each value of x (M, K) may be from `right` in another order of scaling: the specification's values, or those
    under the scales that a convention makes of its own."""
    most = np.zeros_like(right)
    moved = [np.asarray(x * np.float32(1 + step * ORDER), np.float32) for step in (0, -1, 1)]
    scales = [convention(choose_scales(one, scheme)) for one in moved]
    for one, scale in list(product(moved, scales))[1:]:
        other = value(quantize(one, scheme, scales=scale))
        most = np.fmax(most, np.abs(other - right))
    return most


def _of_zero_points(case: Case) -> F64 | float:
    """(M, N): magnitudes of the terms that zero points add to a sum of codes; 0 without zero points."""
    of_a = np.zeros_like(case.a) if case.scheme is None else _zero_points(case.xq, case.a)
    of_b = _zero_points(case.wq, case.b)
    if not of_a.any() and not of_b.any():
        return 0.0
    return np.asarray(of_a @ (np.abs(case.b) + of_b).T + np.abs(case.a) @ of_b.T)


def _zero_points(q: Quantized, right: F64) -> F64:
    """What the zero point of each element stands for, as a magnitude."""
    return (
        np.zeros_like(right)
        if q.zero is None
        else np.abs(value(replace(q, zero=np.zeros_like(q.zero))) - right)
    )


__all__ = [
    "BEYOND",
    "Beyond",
    "beyond",
    "each_bound",
    "named_parts",
    "sums_bound",
    "ties",
    "ties_bound",
    "ties_size",
]
