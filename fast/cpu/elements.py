"""Codes of a stored matrix as float32 numbers, rows at a time, through tables.

Two codes are looked up at once: the table of a pair has 8 bytes an entry, so one gather of an int64 writes two float32. Codes
of 8 bits are read as pairs of bytes (65,536 entries, 512 KiB: the second cache holds it), codes of 4 bits as one byte (256
entries), and so are pairs of 3, 5, 6 and 7 bits, which lie across bytes. Signed integers of 8 bits need no table.

What a code stands for is an `Element`: `reference.quantize.block_values` in numbers.

`Decoding`: how a compiled loop makes a float32 number of a code, by integer arithmetic, from a float's fields, or by a table.
Which one an element takes is found by trying: a decoding counts only if it gives the number of every code in the element's
table (`single_table`), bit for bit but for the sign of zero and of NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import numpy as np
import torch

from fast.cpu.threads import scratch
from reference.formats.formats import FORMATS
from reference.schemes.schemes import Scheme


@dataclass(frozen=True)
class Element:
    """A format, and how its codes count: as its values, as integers (a zero point is subtracted from them), or `centered`
    (unsigned, less half their range: a zero point that is a value is added to their product)."""

    name: str
    counts: str

    @classmethod
    def of(cls, scheme: Scheme) -> Element:
        """As a record dequantizes."""
        if scheme.zero is None:
            return cls(scheme.element, "values")
        return cls(scheme.element, "integers" if scheme.zero.rule == "code" else "centered")

    @property
    def bits(self) -> int:
        """Of a code."""
        return FORMATS[self.name].bits

    @property
    def is_plain_int8(self) -> bool:
        """Whether a byte's number is that of the signed integer it is."""
        bytes_ = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.int8).to(torch.float32)
        return self.bits == 8 and torch.equal(_values(self), bytes_)


def numbers(codes: torch.Tensor, element: Element, packed: bool, out: torch.Tensor) -> None:
    """Write what codes stand for into out (rows, K), float32 and contiguous.

    codes: contiguous uint8 (rows, K), or where `packed` what `reference.pack` makes of that (of 8 bits: the same).
    """
    length = out.shape[1]
    if packed and element.bits < 8:
        if element.bits == 4 or 8 % element.bits:
            index = _indices(codes) if element.bits == 4 else pair_indices(codes, element.bits)
            _look_up(pair_table(element, element.bits), index, out)
            return
        codes = unpacked(codes, element.bits, length)
    if is_int8(element):
        out.copy_(codes.view(torch.int8))
    elif length % 2 or codes.storage_offset() % 2:
        torch.index_select(single_table(element), 0, codes.reshape(-1).to(torch.int32), out=out.view(-1))
    else:
        _look_up(pair_table(element, 8), _indices(codes.view(torch.uint16)), out)


def _indices(codes: torch.Tensor) -> torch.Tensor:
    """Codes as the indices that torch takes."""
    return scratch("indices", tuple(codes.shape), torch.int32).copy_(codes)


def _look_up(table: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    """Pairs of a table into out (rows, K); a row of indices may reach beyond K."""
    rows, length = out.shape
    index = index.reshape(rows, -1)
    if 2 * index.shape[1] == length:
        torch.index_select(table, 0, index.view(-1), out=out.view(torch.int64).view(-1))
        return
    wide = torch.index_select(table, 0, index.view(-1)).view(torch.float32)
    out.copy_(wide.view(rows, -1)[:, :length])


def unpacked(codes: torch.Tensor, bits: int, length: int) -> torch.Tensor:
    """Packed rows of codes of 1, 2 or 4 bits as one code a byte, contiguous (rows, length)."""
    index = codes.to(torch.int32).view(-1)
    wide = torch.index_select(spread_table(bits), 0, index).view(torch.uint8).view(len(codes), -1)
    return wide if wide.shape[1] == length else wide[:, :length].contiguous()


def pair_indices(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Two neighbouring codes as one integer, int32 (rows, groups, pairs), of packed rows whose codes lie across bytes.

    A group is the fewest codes that end on a byte; missing bytes of a last group count as 0.
    """
    planes = byte_planes(codes, bits)
    size, pairs = len(planes), 4 // gcd(bits, 8)
    word = planes[0].to(torch.int32 if size < 4 else torch.int64)
    for place in range(1, size):
        word |= planes[place].to(word.dtype) << (8 * place)
    shifts = torch.arange(pairs, dtype=word.dtype, device="cpu") * (2 * bits)
    return ((word[:, :, None] >> shifts) & ((1 << 2 * bits) - 1)).to(torch.int32)


def byte_planes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Packed rows as (bytes of a group, rows, groups), contiguous; missing bytes of a last group are 0."""
    size = bits // gcd(bits, 8)
    short = -codes.shape[1] % size
    if short:
        codes = torch.nn.functional.pad(codes, (0, short))
    return codes.view(len(codes), -1, size).permute(2, 0, 1).contiguous()


@lru_cache(maxsize=256)
def is_int8(element: Element) -> bool:
    """`Element.is_plain_int8`, asked once."""
    return element.is_plain_int8


@lru_cache(maxsize=256)
def is_exact(element: Element, dtype: torch.dtype) -> bool:
    """Whether a dtype holds every number that a code stands for."""
    values = single_table(element)
    return torch.equal(values.to(dtype).to(torch.float32).nan_to_num(), values.nan_to_num())


@lru_cache(maxsize=256)
def largest(element: Element) -> float:
    """The largest finite magnitude that a code stands for."""
    values = single_table(element).abs()
    return float(values[values.isfinite()].max())


@lru_cache(maxsize=256)
def has_infinities(element: Element) -> bool:
    """Whether a code stands for an infinity."""
    return bool(single_table(element).isinf().any())


@lru_cache(maxsize=256)
def single_table(element: Element) -> torch.Tensor:
    """The numbers of all 256 bytes; bits above the format's are ignored."""
    return _values(element)


@lru_cache(maxsize=64)
def pair_table(element: Element, bits: int) -> torch.Tensor:
    """int64: the numbers of two neighbouring codes of so many bits, the low one first, as the bits of two float32."""
    values = _values(element)[: 1 << bits]
    pairs = torch.stack((values.repeat(len(values)), values.repeat_interleave(len(values))), -1)
    return pairs.view(torch.int64).view(-1)


@lru_cache(maxsize=8)
def spread_table(bits: int) -> torch.Tensor:
    """The codes of 1, 2 or 4 bits in a byte, one a byte, as an integer of that many bytes."""
    per_byte = 8 // bits
    bytes_ = torch.arange(256, dtype=torch.int64, device="cpu")[:, None]
    codes = (bytes_ >> (torch.arange(per_byte, device="cpu") * bits)) & ((1 << bits) - 1)
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[per_byte]
    return codes.to(torch.uint8).view(whole).view(-1)


def _values(element: Element) -> torch.Tensor:
    """float32 of every byte."""
    fmt = FORMATS[element.name]
    codes = np.arange(256) & ((1 << fmt.bits) - 1)
    if element.counts == "values":
        return torch.from_numpy(fmt.values[codes].copy())
    if element.counts == "integers":
        return torch.from_numpy(
            np.where(codes > fmt.max_code, codes - (1 << fmt.bits), codes).astype(np.float32)
        )
    low, high = fmt.integer_range
    return torch.from_numpy((codes - (low + high + 1) // 2).astype(np.float32))


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
        result = np.where(magnitude >> self.mantissa, normal.view(np.float32), subnormal)
        return np.where(codes >> (self.bits - 1), -result, result).astype(np.float32)


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


__all__ = [
    "FLOAT",
    "INTEGER",
    "TABLE",
    "Decoding",
    "Element",
    "has_infinities",
    "is_exact",
    "is_int8",
    "largest",
    "numbers",
    "single_table",
    "unpacked",
]
