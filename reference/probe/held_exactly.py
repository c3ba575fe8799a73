"""Inputs that every convention of scales holds exactly: each output of a right kernel is known to its last rounding.

Whether scales are powers of two, rounded to bfloat16, of a row or of the whole tensor, is no fault, and on inputs of a layer it
changes each output by as much as quantization does: a token times 1.01 is nothing beside it. Here all elements of a row are 0
or one magnitude, what the scheme maps the largest one onto times a power of two. Scales that follow the largest magnitude are
powers of two then, in any of these conventions, and

    y[m, n] = count[m, n] * alpha[m] * beta[n],

count being how often both have an element. What is left to err are float32 sums, which have a bound, and the rounding of the
output, which is monotone: so an output lies between the roundings of what is right less and more the bound. No statistics, and
nothing to excuse: a factor on a row, a column, a tail or one output shows once it makes another number of the output's dtype.

A kernel that maps the largest magnitude onto no value of its format (127.5 beside 127) has all outputs times one number, as
powers of two change nothing of it. So one factor is allowed, the same for all outputs and no further from 1 than rounding the
largest magnitude takes it; two factors are a fault. Elements are not negative: where 127.5 is meant, -127.5 may become -128.
Not seen here: what depends on values in between, and one such factor that is none of scales but of a kernel's outputs.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf, log2
from typing import Any

import numpy as np

from reference.formats.encode import decode, encode
from reference.matmul.error_bound import gamma, rounding_error
from reference.probe.detect import BEYOND, Finding, rounded
from reference.probe.each_output import named_parts, sums_bound
from reference.probe.estimates import F64
from reference.probe.faults import F32, Case
from reference.schemes.schemes import Scheme

#: Of so many elements of a row one is there in both operands: each block has its largest, and no count is 0.
EVERY = 16
#: Terms of a sum that chance adds to these.
TERMS = 64
#: Powers of two of rows' magnitudes: outputs of float16 stay below its largest number.
POWERS = {"x": (-3, 4), "w": (-6, -1)}
#: A chain of the tensor core adds multiples of one number exactly up to so many times that.
CHAIN = 2.0**13
#: Roundings of a term by scales, as many as any two operands have.
OF_SCALES = 16
#: How far, in relation to them, values may be from one proportion to the elements: roundings of scales.
PROPORTION = 2.0**-20
#: Steps of a format beyond its largest value that others map the largest magnitude onto: 128 beside 127 of int8.
STEPS = 1.25
#: The share of outputs that are right from which on the others are named by their factor to these.
SOME = 0.25
NAME = "inputs that any scales hold exactly"


def held_exactly(case: Case, dtype: str, seed: int) -> Case | None:
    """A case of the same shapes with such operands; None where a scheme has none: no code of zero."""
    name = f"{NAME}, M, N, K = {case.sizes}"
    # Where rows share a scale their magnitudes may have to be the same.
    for spread in (True, False):
        rng = np.random.default_rng([seed, 17])
        x = _elements(case.x.shape, case.scheme, rng, POWERS["x"], spread)
        w = _elements(case.w.shape, case.weight_scheme, rng, POWERS["w"], spread)
        made = replace(case, x=x, w=w, name=name)
        if _holds(x, dtype) and _holds(w, dtype) and _in_proportion(made):
            return made
    return None


def of_held(case: Case, y: F64, dtype: str, accumulation: str, *, quantized: bool) -> Finding:
    """What is found of outputs y (M, N) of such a case, sure or nothing. quantized: the kernel was given quantized operands."""
    broken = int((~np.isfinite(y)).sum())
    if broken:
        said = f"{broken} of {y.size} outputs are inf or NaN where the right ones are finite"
        return Finding(case.name, said, broken / y.size, 0.0, inf)
    factor, wrong = _compared(y, case.right, BEYOND * _bound(case, accumulation), dtype)
    if wrong.any():
        return Finding(case.name, _said(y, factor * case.right, wrong), float(wrong.mean()), 0.0, inf)
    allowed = 0.0 if quantized else sum(map(aside, (case.scheme, case.weight_scheme)))
    if not -allowed <= log2(factor) <= allowed:
        said = f"all outputs times {factor:.4g}, which no rounding of a largest magnitude makes"
        return Finding(case.name, said, abs(factor - 1), 0.0, inf)
    test = "each output is right" + ("" if factor == 1 else f", times {factor:.4g}")
    return Finding(case.name, test, abs(factor - 1), 0.0, 0.0)


def aside(scheme: Scheme | None) -> float:
    """The logarithm to base 2 of what a largest magnitude that is mapped between half the format's largest value and `STEPS`
    steps beyond it may multiply all outputs by."""
    if scheme is None:
        return 0.0
    values = np.asarray(scheme.format.values, np.float64)
    values = np.unique(np.abs(values[np.isfinite(values)]))
    top = values[-1]
    steps = np.diff(values)[values[1:] >= top / 2]
    return float(np.log2(1 + STEPS * steps.max() / top)) if len(steps) else 0.0


def _compared(y: F64, right: F64, bound: F64, dtype: str) -> tuple[float, Any]:
    """The number g for which most outputs y are right * g, and which are not, to `bound` and their rounding to `dtype`. g is 1
    where all are right, and where no g is that of all but some are right."""
    wrong = _outside(y, right, bound, dtype)
    if not wrong.any():
        return 1.0, wrong
    factor, others = _common_factor(y, right, bound + rounding_error(np.abs(y), dtype))
    return (1.0, wrong) if others.any() and (~wrong).mean() >= SOME else (factor, others)


def _outside(y: F64, right: F64, bound: F64, dtype: str) -> Any:
    """Where y is neither what is right to `bound` nor its rounding."""
    low, high = right - bound, right + bound
    return (y < np.fmin(low, rounded(low, dtype))) | (y > np.fmax(high, rounded(high, dtype)))


def _common_factor(y: F64, right: F64, bound: F64) -> tuple[float, Any]:
    """The g > 0 with |y - g right| <= bound for as many outputs as there can be, and for which it is not; right is positive."""
    low, high = (y - bound) / right, (y + bound) / right
    starts, ends = np.sort(low.ravel()), np.sort(high.ravel())
    holding = np.arange(1, y.size + 1) - np.searchsorted(ends, starts, "left")
    start = starts[int(holding.argmax())]
    factor = float((start + ends[np.searchsorted(ends, start, "left")]) / 2)
    return max(factor, float(np.finfo(np.float64).tiny)), (low > factor) | (high < factor)


def _said(y: F64, right: F64, wrong: Any) -> str:
    """The output that is furthest off, and which tokens or channels are as a whole."""
    off = np.where(wrong, np.abs(y - right) / right, -1.0)
    at = tuple(int(i) for i in np.unravel_index(int(off.argmax()), off.shape))
    whole = named_parts(wrong, y, right, np.arange(len(y)))
    return (
        f"{int(wrong.sum())} of {y.size} outputs are wrong; output {at} is {y[at]:.6g} in place of {right[at]:.6g}"
        + (f"; {whole}" if whole else "")
    )


def _bound(case: Case, accumulation: str) -> F64:
    """(M, N): what sums may lose; in the tensor core nothing but roundings of float32 where counts are few. No term is
    negative, so that without zero points a sum is as large as all its terms."""
    if accumulation != "float32":
        counts = ((case.x > 0).astype(np.float64) @ (case.w > 0).T.astype(np.float64)).max()
        units = [_odd(_top(one)) for one in (case.scheme, case.weight_scheme)]
        accumulation = "float32" if counts * units[0] * units[1] < CHAIN else accumulation
    zeros = case.weight_scheme.zero, None if case.scheme is None else case.scheme.zero
    if accumulation != "float32" or any(zeros):
        return sums_bound(case, "float64", accumulation)
    return gamma(case.x.shape[1] + OF_SCALES) * case.right


def _top(scheme: Scheme | None) -> float:
    return 1.0 if scheme is None else float(scheme.scale.target or max(scheme.format.values))


def _odd(x: float) -> int:
    """The odd number that x is times a power of two."""
    top = x.as_integer_ratio()[0]
    return top // (top & -top)


def _elements(
    shape: tuple[int, ...],
    scheme: Scheme | None,
    rng: np.random.Generator,
    powers: tuple[int, int],
    spread: bool,
) -> F32:
    """Zeros and one magnitude a row. spread: these are of different powers of two."""
    there = rng.random(shape) < min(0.5, (TERMS / shape[1]) ** 0.5)
    there[:, ::EVERY] = True
    top = _top(scheme)
    power = rng.integers(*powers, (shape[0], 1)) if spread else np.full((shape[0], 1), powers[0])
    return np.asarray(there * (top * 2.0 ** (power - np.ceil(np.log2(top)))), np.float32)


def _holds(x: F32, dtype: str) -> bool:
    """Whether a dtype holds all elements."""
    return dtype == "float32" or bool((np.asarray(decode(encode(x, dtype), dtype)) == x).all())


def _in_proportion(case: Case) -> bool:
    """Whether quantized values of each operand are its elements times one number."""
    try:
        pairs = (case.x, case.a), (case.w, case.b)
    except ValueError:
        return False
    for x, values in pairs:
        some = x > 0
        factors = values[some] / x[some]
        if np.ptp(factors) > PROPORTION * factors.min() or values[~some].any():
            return False
    return True


__all__ = ["aside", "held_exactly", "of_held"]
