"""Codes as float32 numbers in the order of planes: the first code of every group of bytes, then the second, ...

A product does not mind the order of its sum, if inputs come in the same one (`in_planes`). Then every plane of codes is a few
shifts of whole rows of bytes: each code comes to the top of its byte. From there integers take one conversion, and floats are
moved into the fields of a float16, which keeps subnormals, and take one conversion too. Both leave a power of two to multiply
by, which the caller puts where it is exact (`Decoding.power`). No table is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import torch

from fast.cpu.elements import Element, single_table
from fast.cpu.scratch import scratch
from reference.formats import FORMATS

#: Runs of equal scales that are shorter than this are written out: loops over them would cost more than what they hold.
SHORT, FOUR = 16, 4
#: The only float codes that may stand for something else than their fields say: all ones, which is NaN.
ALL_ONES = 0xFE


@dataclass(frozen=True)
class Decoding:
    """How a byte with a code in its high bits becomes a float32 that is the code's number divided by `power`.

    flip: bits of that byte that are inverted; low: bits that are set below the code; signed: whether it is then a signed
    integer; shift, keep: where a float's bits go in an int16, and which of them stay (0: an integer). nan: whether a code of
    all ones stands for NaN, which is not decoded.
    """

    bits: int
    power: float
    flip: int = 0
    low: int = 0
    signed: bool = True
    shift: int = 0
    keep: int = 0
    nan: bool = False

    @classmethod
    def of(cls, element: Element) -> Decoding | None:
        """That of an element; None where its numbers are no integers, no floats, and need a table."""
        return _decoding(element)

    def write(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        """What rows of bytes stand for, divided by `power`, into out (planes, rows, groups), float32 and contiguous."""
        made = self.raised(codes, tuple(out.shape))
        if not self.keep:
            out.copy_(made.view(torch.int8) if self.signed else made)
            return
        wide = scratch("int16", tuple(out.shape), torch.int16).copy_(made.view(torch.int8))
        wide.mul_(_scalar(1 << self.shift, torch.int16)).bitwise_and_(_scalar(self.keep, torch.int16))
        out.copy_(wide.view(torch.float16))

    def raised(self, codes: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """uint8 (planes, rows, groups): each code in the high bits of its byte, `flip` and `low` done."""
        source = _bytes(codes, self.bits)
        if self.bits == 8 and not self.flip:
            return source
        made = scratch("codes", shape, torch.uint8)
        for place in range(shape[0]):
            _raise(source, self.bits, place, made[place])
        if self.flip:
            made.bitwise_xor_(_scalar(self.flip, torch.uint8))
        if self.low:
            made.bitwise_or_(_scalar(self.low, torch.uint8))
        return made

    def decodes(self, codes: torch.Tensor) -> bool:
        """Whether none of some codes is one that is not decoded."""
        if not self.nan:
            return True
        doubled = scratch("codes", tuple(codes.shape), torch.uint8)
        return int(torch.mul(codes, _scalar(2, torch.uint8), out=doubled).max()) != ALL_ONES


def planes_of(bits: int) -> int:
    """Codes of the smallest group that ends on a byte: the number of planes."""
    return 8 // gcd(bits, 8)


def in_planes(x: torch.Tensor, bits: int, size: int) -> torch.Tensor:
    """A row of inputs (1, K) as (planes, 1, groups), zeros behind it up to `size`."""
    x = torch.nn.functional.pad(x, (0, size - x.shape[1])) if size != x.shape[1] else x
    return x.view(-1, planes_of(bits)).t().contiguous().unsqueeze(1)


def multiplied(x: torch.Tensor, power: float) -> torch.Tensor | None:
    """x times a power of two; None where a number is not exact there, or NaN. Valid until the next call of this thread."""
    if power == 1:
        return x
    made, back = (scratch(name, tuple(x.shape), torch.float32) for name in ("factors", "tile"))
    torch.mul(x, _scalar(power, torch.float32), out=made)
    return made if torch.equal(torch.mul(made, _scalar(1 / power, torch.float32), out=back), x) else None


def scale_planes(numbers: torch.Tensor, scale: torch.Tensor) -> None:
    """Multiply numbers (planes, rows, groups) by scales (rows, blocks) where they stand."""
    planes, rows, groups = numbers.shape
    size = groups // scale.shape[1]
    if size >= SHORT:
        numbers.view(planes, rows, -1, size).mul_(scale[None, :, :, None])
        return
    numbers.mul_(_repeated(scale, size).view(1, -1, groups))


def _repeated(scale: torch.Tensor, size: int) -> torch.Tensor:
    """Scales (rows, blocks), each `size` times, (rows, blocks, size): torch copies long runs faster than it repeats numbers."""
    rows, blocks = scale.shape
    wide = scratch("wide", (rows, blocks, size), torch.float32)
    if size % FOUR:
        return wide.copy_(scale[:, :, None])
    four = scratch("four", (rows, blocks, FOUR), torch.float32) if size > FOUR else wide
    for place in range(FOUR):
        four[:, :, place].copy_(scale)
    # Four numbers count as one complex128: nothing else of torch has 16 bytes.
    for place in range(0, size, FOUR) if size > FOUR else ():
        wide.view(torch.complex128)[:, :, place // FOUR].copy_(four.view(torch.complex128)[:, :, 0])
    return wide


def _bytes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Packed rows as (bytes of a group, rows, groups), each contiguous; missing bytes of a last group are 0."""
    size = bits // gcd(bits, 8)
    if size == 1:
        return codes[None]
    short = -codes.shape[1] % size
    if short:
        codes = torch.nn.functional.pad(codes, (0, short))
    source = codes.view(len(codes), -1, size).permute(2, 0, 1)
    return scratch("bytes", tuple(source.shape), torch.uint8).copy_(source)


@lru_cache(maxsize=64)
def _scalar(value: float, dtype: torch.dtype) -> torch.Tensor:
    """An operand of torch: cheaper than the number itself, which becomes a tensor at every call."""
    return torch.tensor(value, dtype=dtype)


def _raise(source: torch.Tensor, bits: int, place: int, out: torch.Tensor) -> None:
    """Code `place` of every group of bytes (bytes, rows, groups) into the high bits of a byte, zeros below it."""
    byte, shift = divmod(place * bits, 8)
    over = shift + bits - 8
    mask = _scalar(256 - (1 << 8 - bits), torch.uint8)
    if over == 0:
        torch.bitwise_and(source[byte], mask, out=out)
    elif over < 0:
        torch.mul(source[byte], _scalar(1 << -over, torch.uint8), out=out)
        if shift:
            out.bitwise_and_(mask)
    else:
        torch.bitwise_right_shift(source[byte], _scalar(over, torch.uint8), out=out)
        next_ = scratch("next", tuple(out.shape), torch.uint8)
        out.bitwise_or_(torch.mul(source[byte + 1], _scalar(1 << 8 - over, torch.uint8), out=next_))
        out.bitwise_and_(mask)


@lru_cache(maxsize=256)
def _decoding(element: Element) -> Decoding | None:
    bits = element.bits
    if not 2 <= bits <= 8:
        return None
    values = single_table(element)[: 1 << bits]
    tops = (torch.arange(1 << bits) << (8 - bits)).to(torch.uint8)
    for candidate in _candidates(element):
        made = torch.empty((1, 1, 1 << bits))
        whole = Decoding(**{**vars(candidate), "bits": 8})
        low = tops | candidate.low
        whole.write(low[None], made)
        found = _matches(made.view(-1), values, candidate)
        if found is not None:
            return found
    return None


def _candidates(element: Element) -> list[Decoding]:
    """Decodings that may be an element's: the first whose numbers are those of its table is."""
    bits, fmt = element.bits, FORMATS[element.name]
    top, half = 0x80, (1 << (8 - bits)) >> 1
    found = [Decoding(bits, 1.0), Decoding(bits, 1.0, flip=top), Decoding(bits, 1.0, signed=False)]
    found += [Decoding(bits, 1.0, low=half), Decoding(bits, 1.0, flip=top, low=half)] if half else []
    if fmt.kind == "float" and fmt.exponent_bits <= 5:
        # The exponent's last bit goes from place 7 - exponent_bits to 10; above it only the sign stays.
        lost = (1 << 15) - (1 << 10 + fmt.exponent_bits)
        found.append(Decoding(bits, 1.0, shift=3 + fmt.exponent_bits, keep=_signed(0xFFFF & ~lost)))
    return found


def _signed(bits: int) -> int:
    """Sixteen bits as the integer that int16 makes of them."""
    return bits - (1 << 16) if bits >> 15 else bits


def _matches(made: torch.Tensor, values: torch.Tensor, decoding: Decoding) -> Decoding | None:
    """The decoding with its power, if it makes every number; a code of all ones may be NaN."""
    fine = values.isfinite() & (values != 0) & (made != 0)
    if not bool(fine.any()):
        return None
    power = float((values[fine] / made[fine])[0])
    same = (made * power == values) | (made.isnan() & values.isnan())
    wrong = [code << 8 - decoding.bits for code in (~same).nonzero().flatten().tolist()]
    nan = decoding.bits == 8 and bool(wrong) and all(code << 1 & 0xFF == ALL_ONES for code in wrong)
    if wrong and not nan:
        return None
    if torch.frexp(torch.tensor(power))[0].abs() != 0.5:
        return None
    return Decoding(**{**vars(decoding), "power": power, "nan": nan})


__all__ = ["Decoding", "in_planes", "multiplied", "planes_of", "scale_planes"]
