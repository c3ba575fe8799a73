"""What each PTX instruction of the kernels makes of uint32 patterns, in NumPy; see the PTX ISA for the definitions.

16-bit registers are uint32 arrays below 2**16. float32 keeps subnormal numbers, and arithmetic makes one NaN: 0x7fffffff,
0x7fff in 16 bits. `rcp.approx` may err by a unit in the last place; here it is exact plus `RECIPROCAL.error` units.

Inline PTX on vectors of 32-bit registers: what the kernels' instruction sequences make, bit for bit, without a GPU.

Only the opcodes that `fast/kernels` writes are known (`ptx_opcodes`); another one is refused by name. `run` also refuses what a
compiler may silently spoil: registers that are read before they are written or not declared, inputs that are written, and
inputs that are read after an output of their class was, unless that output is early-clobbered.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]
INFINITY, SIGN, MAGNITUDE, NAN = (np.uint32(b) for b in (0x7F800000, 0x80000000, 0x7FFFFFFF, 0x7FFFFFFF))
LOW, HALF = np.uint32(0xFFFF), np.uint32(16)
NAN16 = np.uint32(0x7FFF)
SMALLEST = np.uint32(0x00800000)
RECIPROCAL = SimpleNamespace(error=0)


def floats(b: Words) -> Floats:
    """float32 of patterns."""
    return np.asarray(b, np.uint32).view(np.float32)


def patterns(v: Any) -> Words:
    """Patterns of float32 that arithmetic made: one NaN."""
    v = np.asarray(v, np.float32)
    return np.where(np.isnan(v), NAN, v.view(np.uint32))


def fused(a: Any, b: Any, c: Any) -> Any:
    """a * b + c of float32, rounded once."""
    return fused_to_odd(a, b, c).astype(np.float32)


def fused_to_odd(a: Any, b: Any, c: Any) -> Any:
    """a * b + c of float32 as float64, rounded to odd: the product is exact."""
    product, c = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + c
    back = total - product
    return to_odd(total, (product - (total - back)) + (c - back))


def to_odd(total: Any, error: Any) -> Any:
    """float64 `total` + `error`, the rest of a rounded sum, rounded to odd: then one more rounding is the only one."""
    b = np.asarray(total).view(np.int64)
    outward = np.where((error < 0) == (total < 0), 1, -1)
    inexact = np.isfinite(error) & (error != 0) & (b & 1 == 0)
    return np.where(inexact, b + outward, b).view(np.float64)


def saturated(b: Words) -> Words:
    """Between +0 and 1; NaN becomes +0."""
    v = floats(b)
    return np.where(v > 0, np.minimum(v, np.float32(1)), np.float32(0)).view(np.uint32)


def multiply(a: Words, b: Words) -> Words:
    return patterns(floats(a) * floats(b))


def multiply_towards_zero(a: Words, b: Words) -> Words:
    """The float32 next to a * b whose magnitude is no larger; its exact product is a float64."""
    exact = floats(a).astype(np.float64) * floats(b)
    near = exact.astype(np.float32)
    return patterns(np.where(np.abs(near) > np.abs(exact), np.nextafter(near, np.float32(0)), near))


def add(a: Words, b: Words) -> Words:
    return patterns(floats(a) + floats(b))


def add_upwards(a: Words, b: Words) -> Words:
    """The smallest float32 that is not below a + b."""
    exact = fused_to_odd(floats(a), np.float32(1), floats(b))
    near = exact.astype(np.float32)
    return patterns(np.where(near < exact, np.nextafter(near, np.float32(np.inf)), near))


def add_towards_zero(a: Words, b: Words) -> Words:
    exact = fused_to_odd(floats(a), np.float32(1), floats(b))
    near = exact.astype(np.float32)
    return patterns(np.where(np.abs(near) > np.abs(exact), np.nextafter(near, np.float32(0)), near))


def reciprocal_root(a: Words) -> Words:
    """1 / sqrt(a) as near as float32 comes. Hardware is off by up to 2 units in the last place: no result depends on it."""
    return patterns((1 / np.sqrt(floats(a).astype(np.float64))).astype(np.float32))


def fma(a: Words, b: Words, c: Words) -> Words:
    return patterns(fused(floats(a), floats(b), floats(c)))


def reciprocal(a: Words) -> Words:
    """1 / a, subnormal numbers flushed to zero on the way in and out."""
    tiny = (a & MAGNITUDE) < SMALLEST
    b = patterns(np.float32(1) / floats(np.where(tiny, a & SIGN, a)))
    normal = ((b & MAGNITUDE) < INFINITY) & ((b & MAGNITUDE) >= SMALLEST)
    b = np.where(normal, b + np.uint32(RECIPROCAL.error & 0xFFFFFFFF), b)
    return np.where((b & MAGNITUDE) < SMALLEST, b & SIGN, b)


def extremum(a: Words, b: Words, *, larger: bool, keeps_nan: bool, infinity: int, nan: int) -> Words:
    """The smaller or larger of two floats of any width, -0 below +0; of a number and a NaN the number, or NaN."""
    sign = np.uint32(nan + 1)
    keys = [np.where(v & sign != 0, v ^ (sign | np.uint32(nan)), v | sign) for v in (a, b)]
    first_nan, second_nan = ((v & np.uint32(nan)) > infinity for v in (a, b))
    made = np.where((keys[0] > keys[1]) == larger, a, b)
    if keeps_nan:
        return np.where(first_nan | second_nan, np.uint32(nan), made)
    made = np.where(first_nan, b, np.where(second_nan, a, made))
    return np.where(first_nan & second_nan, np.uint32(nan), made)


def bfloat16_of(b: Words) -> Words:
    """Patterns of float32 rounded to bfloat16."""
    up = (b + np.uint32(0x7FFF) + (b >> HALF & np.uint32(1))) >> HALF
    return np.where((b & MAGNITUDE) > INFINITY, NAN16, up)


def float16_of(b: Words) -> Words:
    """Patterns of float32 rounded to float16."""
    half = floats(b).astype(np.float16).view(np.uint16).astype(np.uint32)
    return np.where((b & MAGNITUDE) > INFINITY, NAN16, half)


def from_float16(b: Words) -> Words:
    """Patterns of float16 as float32."""
    return patterns(b.astype(np.uint16).view(np.float16).astype(np.float32))


def byte_of(b: Words, *, dtype: Any, top: float) -> Words:
    """Codes of float32 in an 8-bit format: nearest even, stopped at the largest number, NaN 0x7f."""
    code = np.clip(floats(b), -np.float32(top), np.float32(top)).astype(dtype).view(np.uint8)
    return np.where((b & MAGNITUDE) > INFINITY, np.uint8(0x7F), code).astype(np.uint32)


e4m3_of = partial(byte_of, dtype=ml_dtypes.float8_e4m3fn, top=448.0)
e5m2_of = partial(byte_of, dtype=ml_dtypes.float8_e5m2, top=57344.0)


def bfloat16_of_wide(exact: Any) -> Words:
    """bfloat16 of float64, rounded to odd in float32, where it may be subnormal, and then once."""
    near = exact.astype(np.float32)
    bits, same = near.view(np.uint32), near.astype(np.float64) == exact
    odd = bits + np.where(np.abs(exact) > np.abs(near), np.uint32(1), np.uint32(0xFFFFFFFF))
    return bfloat16_of(np.where(same | np.isnan(exact) | (bits & 1 == 1), patterns(near), odd))


def multiply_bfloat16(a: Words, b: Words) -> Words:
    return bfloat16_of_wide(floats(a << HALF).astype(np.float64) * floats(b << HALF))


def fma_bfloat16(a: Words, b: Words, c: Words) -> Words:
    """a * b + c of bfloat16, rounded to odd in float64 as well."""
    return bfloat16_of_wide(fused_to_odd(*(floats(v << HALF) for v in (a, b, c))))


def multiply_float16(a: Words, b: Words) -> Words:
    """A product of float16, which float32 holds exactly."""
    return float16_of(multiply(from_float16(a), from_float16(b)))


def add_bfloat16(a: Words, b: Words) -> Words:
    return fma_bfloat16(a, np.uint32(0x3F80), b)


def add_float16(a: Words, b: Words) -> Words:
    """A sum of float16, which float64 holds exactly."""
    made = floats(from_float16(a)).astype(np.float64) + floats(from_float16(b))
    return np.where(np.isnan(made), np.uint32(0x7FFF), made.astype(np.float16).view(np.uint16)).astype(
        np.uint32
    )


def float16_of_byte(a: Words, dtype: Any) -> Words:
    """float16 of an 8-bit float, which is exact."""
    made = (a & np.uint32(0xFF)).astype(np.uint8).view(dtype).astype(np.float16)
    return np.where(np.isnan(made), np.uint32(0x7FFF), made.view(np.uint16)).astype(np.uint32)


def widening(dtype: Any) -> Callable[[Words], Words]:
    """Conversion of a pair of 8-bit floats."""
    return lambda pair: float16_of_byte(pair, dtype) | float16_of_byte(pair >> np.uint32(8), dtype) << HALF


def signed(a: Words, bits: int) -> Any:
    """Two's complement numbers of so many low bits."""
    return (a << np.uint32(32 - bits)).view(np.int32) >> (32 - bits)


def shift_left(a: Words, by: Words) -> Words:
    return np.where(by > 31, np.uint32(0), a << (by & np.uint32(31)))


def shift_right(a: Words, by: Words) -> Words:
    return np.where(by > 31, np.uint32(0), a >> (by & np.uint32(31)))


def shift_signed(a: Words, by: Words) -> Words:
    return (a.view(np.int32) >> np.minimum(by, 31).astype(np.int32)).view(np.uint32)


def lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    """Bit 4 a + 2 b + c of a table, for each bit."""
    parts = []
    for index in range(8):
        chosen = [v if index >> place & 1 else ~v for v, place in ((a, 2), (b, 1), (c, 0))]
        parts.append(np.where(table >> np.uint32(index) & 1, chosen[0] & chosen[1] & chosen[2], 0))
    return np.bitwise_or.reduce(np.broadcast_arrays(*parts)).astype(np.uint32)


def prmt(a: Words, b: Words, selector: Words) -> Words:
    """Four bytes of b:a chosen by the nibbles of a selector; a nibble's top bit asks for eight copies of the byte's sign."""
    wide = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    made = np.uint32(0)
    for place in range(4):
        nibble = selector >> np.uint32(4 * place)
        byte = (wide >> (nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8)).astype(np.uint32) & 0xFF
        copied = np.where(byte >= 0x80, np.uint32(0xFF), np.uint32(0))
        made = made | np.where(nibble & 8 != 0, copied, byte) << np.uint32(8 * place)
    return made


def dot4(a: Words, b: Words, c: Words) -> Words:
    """c plus the products of four two's complement bytes, modulo 2**32."""
    for place in range(4):
        x, y = (signed(v >> np.uint32(8 * place), 8) for v in (a, b))
        c = c + (x * y).astype(np.uint32)
    return c


def pairwise(make: Callable[..., Words]) -> Callable[..., Words]:
    """The same for the low and the high halves of registers."""

    def both(*values: Words) -> Words:
        low, high = make(*(v & LOW for v in values)), make(*(v >> HALF for v in values))
        return (low & LOW) | high << HALF

    return both


def narrowing(make: Callable[[Words], Words], bits: int) -> Callable[[Words, Words], Words]:
    """Conversion of two floats to a pair: the first becomes the high part."""
    return lambda high, low: make(low) | make(high) << np.uint32(bits)


def integers16(choose: Any, sign: bool) -> Callable[..., Words]:
    """Minimum or maximum of 16-bit integers."""

    def make(a: Words, b: Words) -> Words:
        wide = [signed(v, 16) if sign else v for v in (a, b)]
        return choose(*wide).astype(np.uint32)

    return pairwise(make)


def _extrema() -> dict[str, Callable[..., Words]]:
    made = {}
    for name, larger in (("min", False), ("max", True)):
        for nan, keeps in (("", False), (".NaN", True)):
            pick = partial(extremum, larger=larger, keeps_nan=keeps)
            made[f"{name}{nan}.f32"] = partial(pick, infinity=0x7F800000, nan=0x7FFFFFFF)
            made[f"{name}{nan}.bf16x2"] = pairwise(partial(pick, infinity=0x7F80, nan=0x7FFF))
            made[f"{name}{nan}.f16x2"] = pairwise(partial(pick, infinity=0x7C00, nan=0x7FFF))
    return made


OPCODES: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a, "mov.f32": lambda a: a,
    "and.b32": np.bitwise_and, "or.b32": np.bitwise_or, "xor.b32": np.bitwise_xor,
    "shl.b32": shift_left, "shr.u32": shift_right, "shr.s32": shift_signed,
    "add.u32": np.add, "sub.u32": np.subtract, "mul.lo.u32": np.multiply, "lop3.b32": lop3, "prmt.b32": prmt,
    "dp4a.s32.s32": dot4,
    "abs.f32": lambda a: a & MAGNITUDE, "add.rn.f32": add, "add.rp.f32": add_upwards, "mul.rn.f32": multiply, "fma.rn.f32": fma,
    "mul.rz.f32": multiply_towards_zero, "add.rz.f32": add_towards_zero, "add.sat.f32": lambda a, b: saturated(add(a, b)),
    "rsqrt.approx.ftz.f32": reciprocal_root,
    "mul.rn.sat.f32": lambda a, b: saturated(multiply(a, b)),
    "fma.rn.sat.f32": lambda a, b, c: saturated(fma(a, b, c)),
    "rcp.approx.ftz.f32": reciprocal,
    "min.u16x2": integers16(np.minimum, False),
    "max.u16x2": integers16(np.maximum, False), "min.s16x2": integers16(np.minimum, True),
    "fma.rn.bf16x2": pairwise(fma_bfloat16),
    "mul.rn.bf16x2": pairwise(multiply_bfloat16), "mul.rn.f16x2": pairwise(multiply_float16),
    "add.rn.bf16x2": pairwise(add_bfloat16), "add.rn.f16x2": pairwise(add_float16),
    "cvt.rn.f16x2.e4m3x2": widening(ml_dtypes.float8_e4m3fn), "cvt.rn.f16x2.e5m2x2": widening(ml_dtypes.float8_e5m2),
    "cvt.rn.bf16x2.f32": narrowing(bfloat16_of, 16), "cvt.rn.f16x2.f32": narrowing(float16_of, 16),
    "cvt.rn.satfinite.e4m3x2.f32": narrowing(e4m3_of, 8), "cvt.rn.satfinite.e5m2x2.f32": narrowing(e5m2_of, 8),
    "cvt.f32.f16": from_float16,
    **_extrema(),
}  # fmt: skip


Instruction = tuple[str, str, tuple[str, ...]]
OPERAND = re.compile(r"\{[^}]*\}|[^,\s]+")


@lru_cache(maxsize=64)
def parsed(asm: str) -> tuple[dict[str, int], tuple[Instruction, ...]]:
    """(width of each declared register, (opcode, destination, sources) of each instruction)."""
    widths, instructions = {}, []
    for statement in re.sub(r"//[^\n]*", "", asm).split(";"):
        # No instruction starts with a brace: those are of scopes.
        opcode, _, rest = statement.lstrip("{} \n\t").rstrip().partition(" ")
        operands = OPERAND.findall(rest)
        if opcode == ".reg":
            widths.update({name: int(operands[0][2:]) for text in operands[1:] for name in declared(text)})
        elif opcode:
            instructions.append((opcode, operands[0], tuple(operands[1:])))
    return widths, tuple(instructions)


def declared(text: str) -> list[str]:
    """Names that a declaration stands for: a<2> is a0 and a1."""
    name, _, count = text.rstrip(">").partition("<")
    return [f"{name}{i}" for i in range(int(count))] if count else [name]


@dataclass
class Registers:
    """Named registers and the operands $0, $1, ... of one piece of assembly."""

    widths: dict[str, int]
    constraints: list[str]
    values: dict[str, Words]
    # Classes of outputs that are written and may share a register with an input.
    spoiled: set[str] = field(default_factory=set)

    def read(self, operand: str) -> Words:
        """A register, an immediate, or a pair of 16-bit registers, the first in the low half."""
        if operand.startswith("{"):
            low, high = OPERAND.findall(operand[1:-1])
            return self.read(low) | self.read(high) << np.uint32(16)
        if operand[0].isdigit():
            return immediate(operand)
        if operand.startswith("$"):
            kind = self.constraints[int(operand[1:])]
            if kind in self.spoiled:
                raise ValueError(f"{operand} is read after an output that may be in the same register")
        if operand not in self.values:
            raise ValueError(f"{operand} is read before it is written")
        return self.values[operand]

    def write(self, operand: str, value: Words) -> None:
        """The inverse of `read`."""
        if operand.startswith("{"):
            low, high = OPERAND.findall(operand[1:-1])
            self.write(low, value & np.uint32(0xFFFF))
            self.write(high, value >> np.uint32(16))
            return
        if operand.startswith("$"):
            self.spoil(operand)
        elif operand not in self.widths:
            raise ValueError(f"{operand} is not declared")
        self.values[operand] = value

    def spoil(self, operand: str) -> None:
        """Note that an output is written."""
        kind = self.constraints[int(operand[1:])]
        if not kind.startswith("="):
            raise ValueError(f"{operand} is an input and written")
        if "&" not in kind:
            self.spoiled.add(kind[1:])


def immediate(text: str) -> Words:
    """A constant: 0f and a float32 pattern, hexadecimal, or decimal."""
    number = int(text[2:], 16) if text[:2] in ("0f", "0F") else int(text, 0)
    return np.array(number, np.uint32)


@np.errstate(all="ignore")
def run(asm: str, constraints: str, inputs: list[Any]) -> list[Words]:
    """The output registers, as patterns, for patterns of the input registers; one element for each thread."""
    kinds = [kind.strip() for kind in constraints.split(",")]
    outputs = sum(kind.startswith("=") for kind in kinds)
    if len(kinds) != outputs + len(inputs):
        raise ValueError(f"{len(inputs)} input registers for {constraints}")
    widths, instructions = parsed(asm)
    held = {f"${outputs + i}": np.asarray(value, np.uint32) for i, value in enumerate(inputs)}
    registers = Registers(widths, kinds, held)
    for opcode, target, sources in instructions:
        if opcode not in OPCODES:
            raise NotImplementedError(f"PTX instruction {opcode}")
        made = OPCODES[opcode](*(registers.read(source) for source in sources))
        registers.write(target, made)
    return [registers.values[f"${i}"] for i in range(outputs)]
