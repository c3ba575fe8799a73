"""Inputs every element of which lies on a tie of rounding: whether a kernel rounds ties as the specification does.

Inputs of a layer have next to no ties, so that a kernel that rounds them away from zero has the same outputs there. Here scales
are powers of two in any order of scaling, elements are halfway between two values of their format, and the largest magnitude
stands in each block. Schemes whose scales cannot be so (zero points, codebooks) have no such inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from reference.formats.encode import decode, encode
from reference.probe.each_output import ORDER, sums_bound
from reference.probe.estimates import F64
from reference.probe.faults import F32, Case, value
from reference.quantize.quantize import quantize
from reference.quantize.scales import choose_scales
from reference.schemes.schemes import Scheme

#: Elements from one largest magnitude to the next; blocks of other lengths than multiples of it have no such inputs.
APART = 16
#: Ties below so much of the largest magnitude are left out: sums would not show them.
LEAST = 1 / 8
#: What ties are multiplied by so that scales of two levels are exact as well: the largest scale in e4m3.
SECOND_LEVEL = 448.0


def at_ties(case: Case, dtype: str, seed: int) -> Case | None:
    """A case of the same shapes whose operands lie on ties, those that can; None where neither can."""
    rng = np.random.default_rng([seed, 11])
    x = None if case.scheme is None else _tied(case.x.shape, case.scheme, dtype, rng)
    w = _tied(case.w.shape, case.weight_scheme, dtype, rng)
    if x is None and w is None:
        return None
    return replace(
        case, x=case.x if x is None else x, w=case.w if w is None else w, name="elements at ties of rounding"
    )


def ties_are_the_specifications(case: Case, y: F64, dtype: str, accumulation: str, margin: float) -> bool:
    """Whether outputs y (M, N) of a case at ties are off by no more than `margin` times what sums and outputs may be."""
    return bool((np.abs(y - case.right) <= margin * sums_bound(case, dtype, accumulation)).all())


def _tied(shape: Any, scheme: Scheme, dtype: str, rng: np.random.Generator) -> F32 | None:
    """Elements at ties; None where the scheme has none that the dtype holds."""
    for values in _candidates(shape, scheme, rng):
        x = values.astype(np.float32)
        held = dtype == "float32" or (np.asarray(decode(encode(x, dtype), dtype)) == x).all()
        if held and (x == values).all() and _on_ties(x, scheme):
            return x
    return None


def _candidates(shape: Any, scheme: Scheme, rng: np.random.Generator) -> Iterator[F64]:
    """Ties of the element under scales of 1, or of 448 where there are scales of two levels, all divided by a power of two."""
    numbers = np.asarray(scheme.format.values, np.float64)
    numbers = np.unique(numbers[np.isfinite(numbers)])
    top = float(scheme.scale.target or numbers[-1])
    between = (numbers[1:] + numbers[:-1]) / 2
    between = between[(between >= LEAST * top) & (between < top)]
    if not len(between):
        return
    signs = rng.choice([-1.0, 1.0], shape)
    values = signs * rng.choice(between, shape)
    values[:, ::APART] = signs[:, ::APART] * top
    values = values / 2.0 ** np.ceil(np.log2(top))
    yield values
    yield values * SECOND_LEVEL / 512


def _on_ties(x: F32, scheme: Scheme) -> bool:
    """Whether each element but the largest lies exactly between the values that a little more and a little less have."""
    try:
        scales = choose_scales(x, scheme)
        less, more = (
            value(quantize(np.asarray(x * np.float32(1 + step * ORDER), np.float32), scheme, scales=scales))
            for step in (-1, 1)
        )
    except ValueError:
        return False
    inner = np.arange(x.shape[1]) % APART != 0
    return bool(((less + more) / 2 == x)[:, inner].all() and (less != more)[:, inner].all())


__all__ = ["at_ties", "ties_are_the_specifications"]
