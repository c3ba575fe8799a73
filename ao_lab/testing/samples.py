"""Arrays of one kind of float: random bit patterns, ties of a format and their neighbours, subnormals, specials.

Public through `ao_lab.testing.strategies`; here because it needs no Hypothesis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from reference.arrays.namespace import FLOAT_DTYPES, DTypeLike, dtype_name, lookup
from reference.formats.formats import Format, format_of

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Bit patterns of an IEEE-like dtype, as Python integers."""

    dtype: Any
    bits: int
    mantissa: int

    @classmethod
    def of(cls, dtype: DTypeLike) -> Layout:
        """Layout of float32, bfloat16, float16 or float64."""
        dtype = dtype_name(dtype, FLOAT_DTYPES, "dtype")
        info = ml_dtypes.finfo(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)
        return cls(np.dtype(info.dtype), info.bits, info.nmant)

    @property
    def unsigned(self) -> str:
        """The unsigned integer dtype of the same width."""
        return f"uint{self.bits}"

    @property
    def sign(self) -> int:
        """The sign bit."""
        return 1 << (self.bits - 1)

    @property
    def infinity(self) -> int:
        """+infinity; NaNs are larger."""
        return self.sign - (1 << self.mantissa)

    @property
    def smallest_normal(self) -> int:
        """The smallest positive normal number."""
        return 1 << self.mantissa

    def pattern(self, values: Any) -> Array:
        """Bit patterns of numbers rounded to the dtype."""
        with np.errstate(all="ignore"):
            return np.asarray(np.asarray(values, np.float64).astype(self.dtype)).view(self.unsigned)


def ties(fmt: str | Format) -> Array:
    """Midpoints between neighbouring values of a format, and the one beyond its largest, in float64 (exact)."""
    return _ties(format_of(fmt))


@lru_cache
def _ties(fmt: Format) -> Array:
    values = np.unique(fmt.values[np.isfinite(fmt.values)].astype(np.float64))
    values = np.append(values, 2 * values[-1] - values[-2])
    return (values[1:] + values[:-1]) / 2


Fill = Callable[[np.random.Generator, Shape, Layout, Format], Array]


def _between(low: Callable[[Layout], int], high: Callable[[Layout], int]) -> Fill:
    """Uniformly random magnitudes with low <= pattern < high, of both signs."""

    def fill(rng: np.random.Generator, shape: Shape, layout: Layout, _: Format) -> Array:
        magnitude = rng.integers(low(layout), high(layout), shape, dtype=layout.unsigned)
        return signed(rng, magnitude, layout)

    return fill


def signed(rng: np.random.Generator, magnitude: Array, layout: Layout) -> Array:
    """Magnitudes with random signs."""
    sign = rng.integers(0, 2, magnitude.shape, dtype=layout.unsigned) << (layout.bits - 1)
    return np.asarray(magnitude | sign.astype(layout.unsigned))


def _normal(rng: np.random.Generator, shape: Shape, layout: Layout, _: Format) -> Array:
    return layout.pattern(rng.standard_normal(shape))


def _tie(rng: np.random.Generator, shape: Shape, layout: Layout, fmt: Format) -> Array:
    return layout.pattern(rng.choice(_ties(fmt), shape))


def _near_tie(rng: np.random.Generator, shape: Shape, layout: Layout, fmt: Format) -> Array:
    pattern = _tie(rng, shape, layout, fmt)
    step = np.where(pattern % layout.sign == 0, 1, rng.choice(np.array([-1, 1]), shape))
    return (pattern.astype(np.int64) + step).astype(layout.unsigned)


def _special(rng: np.random.Generator, shape: Shape, layout: Layout, _: Format) -> Array:
    """Infinities and NaNs in equal parts."""
    payload = rng.integers(1, 1 << layout.mantissa, shape, dtype=layout.unsigned)
    magnitude = np.where(rng.integers(0, 2, shape) == 0, 0, payload) + layout.infinity
    return signed(rng, magnitude.astype(layout.unsigned), layout)


#: Kinds of elements, the simplest first (Hypothesis shrinks in this direction).
FILLS: dict[str, Fill] = {
    "zeros": _between(lambda _: 0, lambda _: 1),
    "normals": _normal,
    "ties": _tie,
    "near_ties": _near_tie,
    "wide": _between(lambda layout: layout.smallest_normal, lambda layout: layout.infinity),
    "subnormals": _between(lambda _: 1, lambda layout: layout.smallest_normal),
    "largest": _between(lambda layout: layout.infinity - 4, lambda layout: layout.infinity),
    "specials": _special,
    "bits": lambda rng, shape, layout, _: rng.integers(0, 1 << layout.bits, shape, dtype=layout.unsigned),
}
KINDS = tuple(FILLS)
FINITE_KINDS = tuple(kind for kind in KINDS if kind not in ("specials", "bits"))


def fill(
    kind: str,
    shape: Shape,
    *,
    dtype: DTypeLike = "float32",
    seed: int = 0,
    fmt: str | Format = "float8_e4m3fn",
) -> Array:
    """An array of one kind, the same for the same seed.

    kind: "zeros", "normals", "ties" and "near_ties" of a format, "wide" (random exponents), "subnormals", "largest" (the last
    four finite floats), "specials" (NaN and infinities), "bits" (random bit patterns). shape, dtype: float32, bfloat16, float16
    or float64. fmt: the format whose ties are meant. ValueError for another kind, with the nearest.
    """
    layout = Layout.of(dtype)
    result = lookup(kind, FILLS, "kind")(np.random.default_rng(seed), shape, layout, format_of(fmt))
    return np.asarray(result).view(layout.dtype)


__all__ = ["FILLS", "FINITE_KINDS", "KINDS", "Layout", "fill", "ties"]
