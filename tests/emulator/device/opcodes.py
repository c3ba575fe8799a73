"""Instructions of one thread alone, as functions of its registers; see the PTX ISA for the definitions.

Registers hold patterns: unsigned integers of their width, predicates bool. `compiled` makes of an instruction a function that
reads and writes them; it gives the number of the next instruction where that is not the following one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.emulator.device.floats import pattern, patterns_of_halves, real, to_bfloat16, to_e4m3, to_float16

Step = Callable[[Any], Any]
WIDTHS = {
    "b8": 8,
    "u8": 8,
    "s8": 8,
    "b16": 16,
    "u16": 16,
    "s16": 16,
    "b32": 32,
    "u32": 32,
    "s32": 32,
    "f32": 32,
    "b64": 64,
    "u64": 64,
    "s64": 64,
}
#: What a thread knows of itself.
SPECIAL = ("%tid.", "%ctaid.", "%nctaid.", "%cluster_ctarank")
COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip


def signed(value: int, width: int) -> int:
    """Two's complement."""
    return value - (1 << width) if value >> (width - 1) else value


def number(value: int, kind: str) -> int:
    """A pattern as an integer of a type."""
    return signed(value, WIDTHS[kind]) if kind[0] == "s" else value


def truncated(a: int, b: int) -> int:
    """Integer division toward zero."""
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


ARITHMETIC: dict[str, Callable[..., int]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul.lo": lambda a, b: a * b, "mad.lo": lambda a, b, c: a * b + c,
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "min": min, "max": max,
    "shl": lambda a, b: a << b if b < 64 else 0, "shr": lambda a, b: a >> b, "div": truncated,
    "rem": lambda a, b: a - truncated(a, b) * b, "neg": lambda a: -a, "not": lambda a: ~a,
}  # fmt: skip


UNARY: dict[str, Callable[[int], int]] = {
    "cvt.rn.bf16.f32": to_bfloat16,
    "cvt.rn.f16.f32": to_float16,
    "cvt.f32.f16": lambda v: patterns_of_halves()[v],
    "cvt.rn.f32.s32": lambda v: pattern(signed(v, 32)),
    "abs.f32": lambda v: v & 0x7FFFFFFF,
    # The device may err by a unit in the last place.
    "rcp.approx.ftz.f32": lambda v: pattern(np.float32(1) / np.float32(real(v))),
    "rcp.rn.f32": lambda v: pattern(np.float32(1) / np.float32(real(v))),
    "ex2.approx.ftz.f32": lambda v: pattern(np.exp2(real(v))),
    "rsqrt.approx.ftz.f32": lambda v: pattern(1 / np.sqrt(np.float64(real(v)))),
    "cvt.rpi.f32.f32": lambda v: pattern(np.ceil(real(v))),
    "cvt.rzi.u32.f32": lambda v: int(min(max(real(v), 0.0), 4294967295.0)),
}  # fmt: skip
PAIRS: dict[str, Callable[..., int]] = {
    "cvt.rn.bf16x2.f32": lambda high, low: to_bfloat16(high) << 16 | to_bfloat16(low),
    "cvt.rn.f16x2.f32": lambda high, low: to_float16(high) << 16 | to_float16(low),
    "cvt.rn.satfinite.e4m3x2.f32": lambda high, low: to_e4m3(real(high)) << 8 | to_e4m3(real(low)),
}
FLOATS: dict[str, Callable[[Any, Any], Any]] = {
    "add.f32": lambda a, b: a + b, "add.rn.f32": lambda a, b: a + b, "mul.rn.f32": lambda a, b: a * b,
    "sub.rn.f32": lambda a, b: a - b,
    "div.rn.f32": lambda a, b: np.float32(a) / np.float32(b),
    # Of a NaN and a number the number.
    "min.f32": np.fmin, "max.f32": np.fmax, "max.NaN.f32": np.maximum,
    # NaN is 0.
    "mul.rn.sat.f32": lambda a, b: np.fmin(np.fmax(a * b, 0.0), 1.0),
}  # fmt: skip


class Operands:
    """What reads and writes operands of a program's threads."""

    def __init__(self, labels: dict[str, int], symbols: dict[str, int]) -> None:
        self.labels, self.symbols = labels, symbols
        self.numbers: dict[str, int] = {}

    def at(self, name: str) -> int:
        """The place of a register."""
        return self.numbers.setdefault(name, len(self.numbers))

    def reader(self, text: str) -> Step:
        """A register, special register, symbol or immediate."""
        if text.startswith(SPECIAL):
            special = text[1:].replace(".", "_")
            return lambda th: getattr(th, special)
        constant = self.constant(text)
        if constant is None:
            place = self.at(text)
            return lambda th: th.registers[place]
        return lambda th: constant

    def constant(self, text: str) -> int | None:
        """A symbol or immediate."""
        if text in self.symbols:
            return self.symbols[text]
        if text[:2] in ("0f", "0F"):
            return int(text[2:], 16)
        if text.lstrip("-").isdigit() or text.startswith("0x"):
            return int(text, 0) & ((1 << 64) - 1)
        return None

    def text(self, text: str) -> str:
        """What `reader` reads as an expression of Python, of a thread `th` with registers `r`."""
        if text.startswith(SPECIAL):
            return "th." + text[1:].replace(".", "_")
        constant = self.constant(text)
        return f"r[{self.at(text)}]" if constant is None else str(constant)

    def address(self, text: str) -> Step:
        """[register+offset], or a symbol with an offset."""
        base, _, offset = text.strip("[]").partition("+")
        read, plus = self.reader(base), int(offset or 0)
        return lambda th: read(th) + plus

    def list(self, text: str) -> list[str]:
        """The names in braces, or the one without."""
        return [part.strip() for part in text.strip("{}").split(",")]


def compiled(opcode: str, operands: tuple[str, ...], o: Operands) -> Step | None:
    """The function of an instruction; None for those of several threads or of the memory."""
    parts = opcode.split(".")
    if opcode in ("bra", "bra.uni"):
        target = o.labels[operands[0]]
        return lambda th: target
    if opcode in ("mov.b64", "mov.b32") and "{" in "".join(operands):
        return _pair(opcode, operands, o)
    if parts[0] == "setp":
        return _setp(parts, operands, o)
    target, reads = o.at(operands[0]) if operands else 0, [o.reader(text) for text in operands[1:]]
    make = _value(opcode, parts, reads)
    if make is None:
        return None

    def step(th: Any) -> None:
        th.registers[target] = make(th)

    return step


def _pair(opcode: str, operands: tuple[str, ...], o: Operands) -> Step:
    """mov between a register and its halves."""
    half = int(opcode[-2:]) // 2
    if operands[0].startswith("{"):
        names, read = [o.at(name) for name in o.list(operands[0])], o.reader(operands[1])

        def split(th: Any) -> None:
            for at, place in enumerate(names):
                th.registers[place] = read(th) >> at * half & ((1 << half) - 1)

        return split
    target, reads = o.at(operands[0]), [o.reader(name) for name in o.list(operands[1])]

    def join(th: Any) -> None:
        th.registers[target] = reads[0](th) | reads[1](th) << half

    return join


def _setp(parts: list[str], operands: tuple[str, ...], o: Operands) -> Step:
    kind, target, a, b = parts[2], o.at(operands[0]), o.reader(operands[1]), o.reader(operands[2])
    if kind == "f32":
        return _setp_float(parts[1], target, a, b)
    compare = COMPARISONS[parts[1]]
    mask = (1 << WIDTHS[kind]) - 1

    def step(th: Any) -> None:
        th.registers[target] = compare(number(a(th) & mask, kind), number(b(th) & mask, kind))

    return step


def _setp_float(name: str, target: int, a: Step, b: Step) -> Step:
    """A comparison that ends in u holds of NaN, the others do not."""
    unordered = name not in COMPARISONS
    compare = COMPARISONS[name.removesuffix("u") if unordered else name]

    def step(th: Any) -> None:
        x, y = real(a(th)), real(b(th))
        th.registers[target] = bool(compare(x, y)) if x == x and y == y else unordered

    return step


def _value(opcode: str, parts: list[str], reads: list[Step]) -> Step | None:
    """What an instruction with one result makes."""
    kind = parts[-1]
    if opcode in UNARY:
        return lambda th: UNARY[opcode](reads[0](th))
    if opcode in PAIRS:
        return lambda th: PAIRS[opcode](*(read(th) for read in reads))
    if opcode in FLOATS:
        return lambda th: pattern(FLOATS[opcode](real(reads[0](th)), real(reads[1](th))))
    if opcode == "add.rz.f32":
        return lambda th: toward_zero(real(reads[0](th)), real(reads[1](th)))
    if opcode == "shf.l.wrap.b32":
        return lambda th: ((reads[1](th) << 32 | reads[0](th)) << (reads[2](th) & 31) >> 32) & 0xFFFFFFFF
    if kind == "pred":
        names: dict[str, Step] = {
            "and": lambda th: reads[0](th) and reads[1](th), "or": lambda th: reads[0](th) or reads[1](th),
            "not": lambda th: not reads[0](th), "mov": lambda th: bool(reads[0](th)),
            "xor": lambda th: reads[0](th) != reads[1](th),
        }  # fmt: skip
        return names[parts[0]]
    if parts[0] in ("mov", "cvta"):
        mask = (1 << WIDTHS.get(kind, 64)) - 1
        return lambda th: reads[0](th) & mask
    if opcode == "prmt.b32":
        return lambda th: permuted(*(read(th) for read in reads))
    if opcode == "dp4a.u32.u32":
        return lambda th: _dot(*(read(th) for read in reads))
    if opcode in ("bfi.b32", "bfi.b64"):
        return lambda th: _inserted(WIDTHS[kind], *(read(th) for read in reads))
    if parts[0] == "selp":
        return lambda th: reads[0](th) if reads[2](th) else reads[1](th)
    if parts[0] == "cvt" and len(parts) == 3 and parts[1] in WIDTHS and kind in WIDTHS and "f32" not in parts:
        into, source = (1 << WIDTHS[parts[1]]) - 1, (1 << WIDTHS[kind]) - 1
        return lambda th: number(reads[0](th) & source, kind) & into
    if parts[:2] == ["mul", "hi"]:
        bits, low = WIDTHS[kind], (1 << WIDTHS[kind]) - 1
        return lambda th: (number(reads[0](th) & low, kind) * number(reads[1](th) & low, kind) >> bits) & low
    if parts[:2] == ["mul", "wide"]:
        mask, wide = (1 << WIDTHS[kind]) - 1, (1 << 2 * WIDTHS[kind]) - 1
        return lambda th: number(reads[0](th) & mask, kind) * number(reads[1](th) & mask, kind) & wide
    name = ".".join(parts[:-1])
    if name in ARITHMETIC and kind in WIDTHS and kind[0] != "f":
        return _integer(ARITHMETIC[name], kind, reads, shift=parts[0] in ("shl", "shr"))
    return None


def toward_zero(a: float, b: float) -> int:
    """The pattern of a sum of two float32, rounded toward zero; what float64 rounds away lies below float32's last place."""
    total = a + b
    made = pattern(total)
    return made - 1 if math.isfinite(total) and abs(real(made)) > abs(total) else made


def permuted(a: int, b: int, selector: int) -> int:
    """Bytes of two words by their numbers; of a number of 8 and more the byte's sign, eight times."""
    both = a & 0xFFFFFFFF | (b & 0xFFFFFFFF) << 32
    found = (
        both >> ((selector & 7) << 3) & 255
        | (both >> ((selector >> 4 & 7) << 3) & 255) << 8
        | (both >> ((selector >> 8 & 7) << 3) & 255) << 16
        | (both >> ((selector >> 12 & 7) << 3) & 255) << 24
    )
    if selector & 0x8888:
        for at in range(4):
            if selector >> 4 * at & 8:
                sign = 255 * (found >> 8 * at + 7 & 1)
                found = found & ~(255 << 8 * at) | sign << 8 * at
    return found


def _dot(a: int, b: int, c: int) -> int:
    """The sum of products of bytes without signs, plus c, what a word holds of it."""
    return (sum((a >> at & 255) * (b >> at & 255) for at in (0, 8, 16, 24)) + c) & 0xFFFFFFFF


def _inserted(width: int, field: int, into: int, place: int, length: int) -> int:
    """`length` low bits of a field put into a word of so many bits at a place."""
    mask = (1 << length) - 1 << place
    return (into & ~mask | field << place & mask) & (1 << width) - 1


def _integer(make: Callable[..., int], kind: str, reads: list[Step], shift: bool) -> Step:
    mask = (1 << WIDTHS[kind]) - 1

    def value(th: Any) -> int:
        given = [number(read(th) & mask, kind) for read in reads]
        if shift:
            given[1] &= 0xFFFFFFFF
        return make(*given) & mask

    return value


__all__ = ["Operands", "compiled", "pattern", "permuted", "real", "signed"]
