"""Which schemes of inputs a product of 16-bit floats computes exactly: a question to the record alone.

The tensor core multiplies bfloat16 or float16, exactly, and adds in float32. So a product of a quantized input is that of
its dequantized values, to the bound of one of the values alone, where 16-bit floats hold

* ``values``: the elements times their scales. These are powers of two: they move no digit, and what is rounded from 16-bit
  floats to fewer digits is a multiple of their smallest one. Above the dtype's largest number it stops there, as
  `reference.dequantize` in that dtype.
* ``codes``: the elements less their zero point, under one float scale for each row, by which the sums are multiplied.

Neither holds of scales with digits of their own for parts of a row (float32 in blocks, an outer scale over e4m3 ones).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from reference.schemes.schemes import Scheme, record_of

#: Dtypes of inputs that the tensor core takes here: digits of a significand, exponents of the smallest number and the largest.
DIGITS = {torch.bfloat16: (8, -133, 127), torch.float16: (11, -24, 15)}
VALUES, CODES = "values", "codes"
#: Storages of the scales of rows, which float32 holds.
ROW_STORAGES = ("float32", "bfloat16", "float16")


def kind_of(scheme: Scheme) -> str | None:
    """What the dtypes of `DIGITS` hold exactly of inputs in a scheme, VALUES or CODES; None where neither."""
    return _kind(scheme.key)


@lru_cache(maxsize=1024)
def inputs_record(key: str) -> Scheme:
    """The record of a `Scheme.key`, the same object in every call: the cache of calls knows records by their ids."""
    return record_of(key)


def inputs_reason(scheme: Scheme) -> str | None:
    """Why no product of 16-bit floats computes with inputs in a scheme; None where one does."""
    if kind_of(scheme) is not None:
        return None
    return f"16-bit floats must hold {scheme.name} exactly: elements times powers of two, or under one float scale for each row"


@lru_cache(maxsize=1024)
def _kind(key: str) -> str | None:
    scheme = record_of(key)
    scale, fmt = scheme.scale, scheme.format
    plain = scheme.outer is None and scheme.rounding == "nearest_even" and scale.stored == "decode"
    if not plain or fmt.kind not in ("float", "int") or scheme.dequantize == "target":
        return None
    if (
        scale.power_of_two
        and isinstance(scale.block, int)
        and scheme.zero is None
        and _digits(scheme) <= _least_digits()
    ):
        return VALUES
    rows = scale.block == -1 and scale.storage in ROW_STORAGES
    return CODES if rows and _codes_are_exact(scheme) else None


def _least_digits() -> int:
    return min(digits for digits, *_ in DIGITS.values())


def _digits(scheme: Scheme) -> int:
    """Digits of the longest significand of an element."""
    return _significand(scheme.format.values)


def _significand(values: np.ndarray) -> int:
    """Digits of the longest of these numbers, from their first to their last that is not 0."""
    finite = values[np.isfinite(values) & (values != 0)].astype(np.float64)
    fractions = np.abs(np.frexp(finite)[0])
    return next(digits for digits in range(1, 54) if bool((fractions * 2.0**digits % 1 == 0).all()))


def _codes_are_exact(scheme: Scheme) -> bool:
    """Whether elements less any zero point have few enough digits, and lie in the range of every dtype."""
    fmt = scheme.format
    values = fmt.values
    if scheme.zero is not None:
        low, high = fmt.integer_range
        values = np.arange(low - high, high - low + 1, dtype=np.float32)
        if scheme.zero.rule != "code":
            return False
    finite = np.abs(values[np.isfinite(values) & (values != 0)].astype(np.float64))
    span = [int(np.frexp(end)[1]) - 1 for end in (finite.min(), finite.max())]
    return all(
        _significand(values) <= digits and lowest <= span[0] and span[1] <= highest
        for digits, lowest, highest in DIGITS.values()
    )


__all__ = ["CODES", "DIGITS", "VALUES", "inputs_reason", "inputs_record", "kind_of"]
