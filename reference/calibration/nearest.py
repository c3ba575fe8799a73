"""Values of elements under fixed scales: what `dequantize(quantize(x, scheme, scales=...))` gives, element by element.

GPTQ rounds a column at a time and a search rounds all elements once a candidate, so both need the quantizer's rule without its
work on scales. `Nearest` holds both directions of given scales (what elements are multiplied or divided by, and what codes are
multiplied by) and applies them to any part of a tensor. Most records are plain float32 arithmetic in NumPy:

* integers: rint(x f), the zero point added, clamped, subtracted again, times the decoding scale;
* float elements of at most 6 significant bits: the value of each of 65,536 patterns of x f rounded to odd to bfloat16
  (`reference.formats.encode`), times the decoding scale.

Each float32 operation here is one that the specification rounds correctly, so values are equal to the quantizer's. Records with
other rules (codebooks, float zero points, arithmetic in the input's dtype, other rounding) and scales that are not finite or
overflow go through the specification's own functions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from reference.arrays.namespace import Array, Namespace, float_input
from reference.formats.encode import Arithmetic, encode_table, fits_table, odd_halves
from reference.formats.formats import Format
from reference.quantize.blocks import Blocks
from reference.quantize.quantize import (
    E8M0_BIAS,
    combined_scale,
    element_codes,
    element_factor,
    scaled_values,
)
from reference.quantize.scales import Chosen, given_scales, usable
from reference.quantize.stored import Scales
from reference.schemes.schemes import Scheme, flat_size

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Nearest:
    """The rounding of elements under scales that broadcast against them.

    scheme: the record. dtype: that of the elements, which some records compute in. rounds, decodes: the scales as codes are
    computed with them (raised to floors) and as they are stored. factor, scale, zero: the same for plain float32 arithmetic,
    None where the specification's functions are needed.
    """

    scheme: Scheme
    dtype: str
    rounds: Chosen
    decodes: Chosen
    factor: Floats | None = None
    scale: Floats | None = None
    zero: Floats | None = None

    @classmethod
    def of(
        cls,
        ns: Namespace,
        scales: Scales,
        blocks: Blocks,
        scheme: Scheme,
        dtype: str = "float32",
        *,
        plain: bool = True,
    ) -> Nearest:
        """The rule of a tensor in these blocks by stored scales, arrays of shape (..., blocks, 1).

        plain: whether float32 arithmetic may be used, for NumPy arrays alone.
        """
        decodes = given_scales(ns, scales, blocks, scheme)
        rounds = usable(ns, decodes, scheme, dtype)
        if not plain or not _is_plain(scheme, dtype):
            return cls(scheme, dtype, rounds, decodes)
        return cls(scheme, dtype, rounds, decodes, *_plain(ns, rounds, decodes, scheme))

    def take(self, index: Any) -> Nearest:
        """The rule of a part: every array of scales indexed."""

        def part(array: Any) -> Any:
            return None if array is None else array[index]

        def parts(chosen: Chosen) -> Chosen:
            scale = part(chosen.scale)
            return replace(chosen, scale=scale, exact=scale, zero=part(chosen.zero))

        if self.factor is not None:
            factor, scale, zero = part(self.factor), part(self.scale), part(self.zero)
            return Nearest(self.scheme, self.dtype, self.rounds, self.decodes, factor, scale, zero)
        return replace(self, rounds=parts(self.rounds), decodes=parts(self.decodes))

    def mapped(self, change: Any) -> Nearest:
        """The rule with every array of scales changed by a function."""

        def parts(chosen: Chosen) -> Chosen:
            scale = change(chosen.scale)
            zero = None if chosen.zero is None else change(chosen.zero)
            return replace(chosen, scale=scale, exact=scale, zero=zero)

        plain = [None if array is None else change(array) for array in (self.factor, self.scale, self.zero)]
        return Nearest(self.scheme, self.dtype, parts(self.rounds), parts(self.decodes), *plain)

    def values(self, ns: Namespace, x: Any) -> Any:
        """float32 values that the codes of x, finite float32, stand for; arrays of scales broadcast."""
        if self.factor is None or self.scale is None:
            return self._by_the_specification(ns, x)
        with np.errstate(over="ignore", under="ignore"):  # what overflows saturates
            scaled = x / self.factor if self.scheme.apply == "divide" else x * self.factor
        if self.scheme.format.kind == "int":
            value = _integers(scaled, self.zero, self.scheme.format)
        else:
            index = odd_halves(scaled.reshape(-1).view(np.uint32)).reshape(scaled.shape)
            value = np.take(value_table(self.scheme.format), index)
        if self.scheme.scale.stored == "encode":
            return np.divide(value, self.scale, out=value)
        return np.multiply(value, self.scale, out=value)

    def _by_the_specification(self, ns: Namespace, x: Array) -> Array:
        bits = ns.bitcast(x, "int32")
        codes = element_codes(ns, bits, self.rounds, self.scheme, self.dtype, None)
        values = scaled_values(ns, codes, self.decodes, self.scheme, "float32")
        return ns.bitcast(values, "float32")


def by_columns(nearest: Nearest, blocks: Blocks) -> tuple[Nearest, npt.NDArray[np.intp]]:
    """(the rule with scales of shape (groups, N) or (groups, 1), the group of every column) of a matrix (N, K).

    Columns of one group share their scales: a block along K, or all columns where a scale spans the row or the matrix. Blocks
    of the flattened matrix give every column scales of its own.
    """
    rows, k = blocks.shape
    if blocks.block == "tensor":
        return nearest, np.zeros(k, np.intp)
    if flat := flat_size(blocks.block):

        def spread(array: Array) -> Array:
            full = np.repeat(array.reshape(-1), flat)[: rows * k]
            return np.ascontiguousarray(full.reshape(rows, k).T)

        return nearest.mapped(spread), np.arange(k)
    height, width = blocks.block if isinstance(blocks.block, tuple) else (1, int(blocks.block))

    width = k if width == -1 else width

    def turn(array: Array) -> Array:
        matrix = array.reshape(-(-rows // height), -(-k // width))
        return np.ascontiguousarray(np.repeat(matrix, height, axis=0)[:rows].T)

    return nearest.mapped(turn), np.arange(k) // width


@lru_cache(maxsize=64)
def value_table(fmt: Format) -> Floats:
    """float32 value of the code of every 16-bit pattern, an odd one for everything strictly between its neighbours."""
    values: Floats = fmt.values[encode_table(fmt, "nearest_even", "saturate")]
    return values


def _integers(scaled: Floats, zero: Floats | None, fmt: Format) -> Floats:
    """Integers of scaled elements after saturation, less the zero point, in units of 1; `scaled` is overwritten."""
    low, high = fmt.integer_range
    if fmt.fraction_bits:
        scaled *= np.float32(2.0**fmt.fraction_bits)
    value = np.rint(scaled, out=scaled)
    if zero is not None:
        value += zero
    np.minimum(np.maximum(value, np.float32(low), out=value), np.float32(high), out=value)
    if zero is not None:
        value -= zero
    return np.multiply(value, np.float32(2.0**-fmt.fraction_bits), out=value) if fmt.fraction_bits else value


def _is_plain(scheme: Scheme, dtype: str) -> bool:
    """Whether the record's elements are computed by the float32 arithmetic of this module."""
    fmt = scheme.format
    element = fmt.kind == "int" or (fmt.kind == "float" and fits_table(fmt))
    arithmetic = scheme.arithmetic == "float32" or dtype == "float32"
    zero = scheme.zero is None or scheme.zero.rule == "code"
    return (
        element
        and arithmetic
        and zero
        and scheme.rounding == "nearest_even"
        and scheme.overflow == "saturate"
    )


def _plain(
    ns: Namespace, rounds: Chosen, decodes: Chosen, scheme: Scheme
) -> tuple[Floats | None, Floats | None, Floats | None]:
    """(factor, decoding scale, zero) as float32, or Nones where a product of them might not be finite."""
    unit = Arithmetic(ns, "float32")
    if scheme.scale.power_of_two:
        factor = _inverse_powers(ns, rounds.scale, scheme)
    else:
        factor = ns.bitcast(element_factor(ns, unit, rounds.scale, rounds.outer, scheme), "float32")
    bits = decodes.scale
    if decodes.outer is not None:
        bits = combined_scale(unit, bits, decodes.outer, scheme)
    scale = ns.bitcast(bits, "float32")
    zero = None if decodes.zero is None else ns.astype(decodes.zero, "float32")
    largest = 2.0 * max(scheme.format.max, -scheme.format.min)
    with np.errstate(over="ignore", divide="ignore"):  # scales of the largest weights
        reach = np.abs(1 / scale if scheme.scale.stored == "encode" else scale) * largest
    finite = np.isfinite(factor) & (factor != 0) & (reach < np.finfo(np.float32).max)
    return (factor, scale, zero) if bool(finite.all()) else (None, None, None)


def _inverse_powers(ns: Namespace, bits: Array, scheme: Scheme) -> Floats:
    """2**-e of e8m0 scales by which elements are divided; NaN for a NaN scale."""
    exponent = np.maximum(bits >> 23, 0) - E8M0_BIAS
    if scheme.smallest_exponent is not None:
        exponent = np.where(exponent == -E8M0_BIAS, scheme.smallest_exponent, exponent)
    power = np.ldexp(np.float32(1), -exponent).astype(np.float32)
    return np.where(exponent > E8M0_BIAS, np.float32(np.nan), power)


def checked_weights(w: Any, scheme: Scheme, what: str) -> tuple[Any, str, npt.NDArray[np.float64]]:
    """(w, the name of its dtype, a copy in float64) of a finite matrix; TypeError or ValueError for anything else.

    ValueError for a record whose rounding is drawn, too.
    """
    if not isinstance(w, np.ndarray):
        raise TypeError(f"{what} takes NumPy arrays, got {type(w).__name__}; give numpy.asarray of it")
    _, w, name = float_input(w, what)
    if w.ndim != 2 or not w.shape[1]:
        raise ValueError(
            f"{what} takes a matrix (outputs, inputs), got shape {w.shape}; give matrices one by one"
        )
    wide = w.astype(np.float64)
    wrong = int((~np.isfinite(wide)).sum())
    if wrong:
        raise ValueError(f"{what} takes finite weights, got {wrong} of NaN or infinity; replace them")
    if scheme.rounding == "stochastic":
        raise ValueError(
            f"{what} chooses the nearest values, and {scheme.name} rounds stochastically; use "
            f"dataclasses.replace(scheme, rounding='nearest_even')"
        )
    return w, name, wide


__all__ = ["Nearest", "by_columns", "checked_weights", "value_table"]
