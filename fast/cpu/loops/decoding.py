"""How a compiled loop makes a float32 number of a code: by integer arithmetic, from a float's fields, or by a table.

Which one an element takes is found by trying: a decoding counts only if it gives the number of every code in the element's
table (`elements.single_table`), bit for bit but for the sign of zero and of NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fast.cpu.elements import Element, single_table
from reference.formats.formats import FORMATS

INTEGER, FLOAT, TABLE = 0, 1, 2


@dataclass(frozen=True)
class Decoding:
    """The number of a code of `bits` bits.

    INTEGER: ((code ^ flip) - less) * unit. FLOAT: a sign, an exponent with `bias`, `mantissa` bits, subnormals; magnitudes from
    `special` on are infinity and NaN as float32's largest exponent has them. TABLE: an entry of the element's table.
    """

    bits: int
    kind: int
    flip: int = 0
    less: int = 0
    unit: float = 1.0
    mantissa: int = 0
    bias: int = 0
    special: int = 0

    @classmethod
    def of(cls, element: Element) -> Decoding:
        """That of an element of at most 8 bits."""
        return _decoding(element)

    def numbers(self) -> np.ndarray:
        """float32 of every code, as the compiled loop computes them; not of TABLE."""
        codes = np.arange(1 << self.bits, dtype=np.int32)
        if self.kind == INTEGER:
            return ((codes ^ self.flip) - self.less).astype(np.float32) * np.float32(self.unit)
        magnitude = codes & ((1 << (self.bits - 1)) - 1)
        normal = (magnitude << (23 - self.mantissa)) + ((127 - self.bias) << 23)
        normal |= np.where(magnitude >= self.special, 0x7F800000, 0).astype(np.int32)
        subnormal = magnitude.astype(np.float32) * np.float32(2.0 ** (1 - self.bias - self.mantissa))
        made = np.where(magnitude >> self.mantissa, normal.view(np.float32), subnormal)
        return np.where(codes >> (self.bits - 1), -made, made).astype(np.float32)


@lru_cache(maxsize=256)
def _decoding(element: Element) -> Decoding:
    want = single_table(element).numpy()[: 1 << element.bits]
    for candidate in _candidates(element):
        if np.array_equal(candidate.numbers(), want, equal_nan=True):
            return candidate
    return Decoding(element.bits, TABLE)


def _candidates(element: Element) -> Iterator[Decoding]:
    """Two's complement, unsigned, centered; and the fields of a float, whose magnitudes may end below its last code."""
    bits, fmt = element.bits, FORMATS[element.name]
    half = 1 << bits >> 1
    for flip, less in ((half, half), (0, 0), (0, half)):
        yield Decoding(bits, INTEGER, flip=flip, less=less)
    table = single_table(element).numpy()
    yield Decoding(bits, INTEGER, flip=half, less=half, unit=float(table[1]))
    if fmt.kind != "float":
        return
    magnitudes = table[: max(half, 1)]
    special = int(np.isfinite(magnitudes).sum())
    mantissa = bits - 1 - fmt.exponent_bits
    # The smallest number, mantissa 1 of the subnormals, says what the bias is.
    bias = 1 - mantissa - int(np.log2(magnitudes[1])) if half > 1 else 0
    yield Decoding(bits, FLOAT, mantissa=mantissa, bias=bias, special=special)


__all__ = ["FLOAT", "INTEGER", "TABLE", "Decoding"]
