"""Inputs that show each quantized value of one operand alone: whether a kernel rounds it to the nearest or to one side.

Beside the other operand's rounding that of one operand hardly shows: a cast of x to 8 bits that truncates adds a few percent to
the error of a weight of 4 bits. Here the other operand has one 1 a row, so that each output is one quantized
value times a factor, which is the same for all. Outputs are compared with a line,

    y = g c + b u sign(c) + d u,

c being the middle of the two quantized values that an element lies between, u their distance. Another convention of scales
changes g, and where elements lie between their neighbours, which is any place: rounding to the nearest has b = d = 0. Toward
zero b is -g / 2, down d is. Where quantized values are the specification's, each output is held to its bound as well: it has
one term, so that it is as narrow as it can be where many values lie on ties. Operands of less than 8 bits are left out: their
own error is most of the whole, and they have too few values for a line. Not seen: casts of floats that truncate under scales of
another convention, whose u is another one near powers of two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from reference.formats.encode import decode, encode
from reference.probe.detect import BEYOND, ERRORS, Finding, rounded
from reference.probe.each_output import beyond
from reference.probe.estimates import F64
from reference.probe.faults import F32, Case, value
from reference.quantize.quantize import quantize
from reference.quantize.scales import choose_scales
from reference.schemes.schemes import Scheme

#: Of the distance of two neighbours, what values may be off on average: half of what truncation makes.
ASIDE = 0.25
#: Of the largest magnitude, up to where values are compared: scales of MX that are rounded down saturate from 3/4 of it.
INSIDE = 0.7
LEAST_BITS = 8
#: The names of such cases.
NAMES = {"x": "each value of x alone", "w": "each value of w alone"}


@dataclass(frozen=True)
class Alone:
    """A case in which y[m, n] is one value of an operand times a factor. values, low, high: (M, N), of that operand v and the
    quantized values that it lies between."""

    case: Case
    values: F64
    low: F64
    high: F64

    @property
    def nearest(self) -> F64:
        """What is nearest to each value; none saturates."""
        return np.where(self.values - self.low < self.high - self.values, self.low, self.high)


def alone(case: Case, dtype: str, seed: int) -> Iterator[Alone]:
    """Cases of the same shapes for x and for w, of those that are rounded to floats or integers of 8 bits or more."""
    rng = np.random.default_rng([seed, 13])
    for operand, scheme in (("x", case.scheme), ("w", case.weight_scheme)):
        if scheme is None or scheme.format.kind not in ("float", "int") or scheme.format.bits < LEAST_BITS:
            continue
        one, other = (case.x, case.w) if operand == "x" else (case.w, case.x)
        dense = _held(np.asarray(rng.uniform(-1, 1, one.shape) * _power(one)), dtype)
        single = np.zeros_like(other)
        channels = rng.integers(0, other.shape[1], len(other))
        single[np.arange(len(other)), channels] = 1.0
        x, w = (dense, single) if operand == "x" else (single, dense)
        made = replace(case, x=x, w=w, name=NAMES[operand])
        parts = [part[:, channels] for part in (dense.astype(np.float64), *_neighbours(dense, scheme))]
        shown = Alone(made, *(part if operand == "x" else part.T for part in parts))
        if np.isfinite(rounded(made.right, dtype)).all() and (shown.high > shown.low).any():
            yield shown


def of_alone(shown: Alone, y: F64, dtype: str, accumulation: str, *, same: bool) -> list[Finding]:
    """What is found of outputs y (M, N). same: whether the kernel's quantized values are the specification's elsewhere."""
    broken = int((~np.isfinite(y)).sum())
    if broken:
        said = f"{broken} of {y.size} outputs are inf or NaN where the right ones are finite"
        return [Finding(shown.case.name, said, broken / y.size, 0.0, inf)]
    ways = [_aside(shown, one) for one in (rounded(shown.case.right, dtype), shown.nearest)]
    found = []
    for at, of in enumerate(_aside(shown, y)):
        off = min(abs(of.part - way[at].part) for way in ways)
        told = off > max(ASIDE, ERRORS * of.error)
        test = "values are rounded to one side"
        test += f", by {off:.2g} of their distance on average" if told else ""
        found.append(Finding(shown.case.name, test, off, ASIDE, inf if told else 0.0, 1.0))
    bounded = same and not any(one.found for one in found)
    return [*found, _one(shown.case, y, dtype, accumulation)] if bounded else found


def _one(case: Case, y: F64, dtype: str, accumulation: str) -> Finding:
    """The one output that is furthest beyond its bound."""
    every = np.ones(len(y), bool)
    one = beyond(case, y, every, dtype, accumulation, quantized=False, margin=BEYOND)
    wrong = one.off > BEYOND * one.bound
    test = f"output {one.at}"
    if wrong:
        test += f" is off by {one.off:.3g}, one value by {one.bound:.3g} at most" + (
            f"; {one.whole}" if one.whole else ""
        )
    return Finding(case.name, test, one.off, one.bound, inf if wrong else 0.0, BEYOND)


@dataclass(frozen=True)
class _Part:
    """b / g or d / g, and its standard error."""

    part: float
    error: float


def _aside(shown: Alone, y: F64) -> list[_Part]:
    """b / g and d / g of outputs by least squares."""
    c, u = (shown.high + shown.low).ravel() / 2, (shown.high - shown.low).ravel()
    some = (u > 0) & (np.abs(shown.values).ravel() <= INSIDE * np.abs(shown.values).max())
    terms, wanted = np.stack([c, u * np.sign(c), u], 1)[some], y.ravel()[some]
    fit = np.linalg.lstsq(terms, wanted, rcond=None)[0]
    rest = wanted - terms @ fit
    spread = np.linalg.pinv(terms.T @ terms) * float(rest @ rest) / max(len(wanted) - len(fit), 1)
    gain = abs(float(fit[0])) or 1.0
    return [
        _Part(float(fit[i]) / gain, float(np.sqrt(max(spread[i, i], 0.0))) / gain) for i in range(1, len(fit))
    ]


def _neighbours(x: F32, scheme: Scheme) -> tuple[F64, F64]:
    """The quantized values below and above each element; equal where it is one, or beyond the largest."""
    scales = choose_scales(x, scheme)
    low, high = (
        value(quantize(x, replace(scheme, name=f"{scheme.name}, {mode}", rounding=mode), scales=scales))
        for mode in ("down", "up")
    )
    return low, high


def _power(x: F32) -> float:
    """The power of two next below the largest magnitude."""
    return float(2.0 ** np.floor(np.log2(np.abs(x).max() or 1.0)))


def _held(x: F64, dtype: str) -> F32:
    """Rounded to what the dtype holds."""
    single = x.astype(np.float32)
    return single if dtype == "float32" else np.asarray(decode(encode(single, dtype), dtype), np.float32)


__all__ = ["Alone", "alone", "of_alone"]
