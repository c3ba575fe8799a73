"""Codes of a stored row become numbers, as vector instructions for a loop that Numba compiles.

A step reads `LANES` groups of codes, each of which ends on a byte, and writes their numbers in order: decoded as
`fast.cpu.elements` says, less the zero point, times the scale, each rounded as `reference.dequantize` rounds it. Where
whole steps share a scale, elements of up to 4 bits are looked up among their 16 scaled numbers.

Vectors are those of LLVM, in which steps are written that Numba does not make of simple ones. LLVM lowers them to whatever the
processor has. Where it has AVX-512, instructions are named that LLVM has no words for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llvmlite import binding, ir
from numba import config, types
from numba.extending import intrinsic

from fast.cpu.elements import FLOAT, INTEGER, Decoding

#: Numbers of a vector, and groups of codes that a step decodes.
LANES = 16

FLOAT32, INT8, INT16, INT32 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32)
SINGLES, WORDS = ir.VectorType(FLOAT32, LANES), ir.VectorType(INT32, LANES)


class BFloat16(ir.Type):
    """LLVM's type, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat16)

    def __hash__(self) -> int:
        return hash(BFloat16)


HALVES = ir.VectorType(BFloat16(), 2 * LANES)


def _features() -> frozenset[str]:
    """What Numba compiles for."""
    if config.CPU_FEATURES is not None or config.CPU_NAME is not None or not config.ENABLE_AVX:
        return frozenset(name[1:] for name in (config.CPU_FEATURES or "").split(",") if name.startswith("+"))
    return frozenset(name for name, there in binding.get_host_cpu_features().items() if there)


FEATURES = _features()
#: Whether 16 numbers of 32 bits fit a register, or 32 of 16 bits; and whether float16 is widened, and products of bfloat16 are
#: made, by an instruction.
WIDE, WIDE_HALVES = "avx512f" in FEATURES, {"avx512f", "avx512bw"} <= FEATURES
HALF = "f16c" in FEATURES
BFLOAT16 = {"avx512f", "avx512bw", "avx512bf16"} <= FEATURES


def words(value: int) -> ir.Constant:
    """An int32 in every lane."""
    return same(WORDS, value)


def same(kind: ir.VectorType, value: int) -> ir.Constant:
    """An integer in every lane of a vector."""
    return ir.Constant(kind, [value] * kind.count)


def singles(value: float) -> ir.Constant:
    """A float32 in every lane."""
    return ir.Constant(SINGLES, [float(value)] * LANES)


def loaded(builder: Any, address: Any, kind: ir.Type, offset: Any = None) -> Any:
    """A vector at an address (an integer) and perhaps so many bytes behind it."""
    place = address if offset is None else builder.add(address, offset)
    return builder.load(builder.inttoptr(place, kind.as_pointer()), align=1)


def stored(builder: Any, value: Any, address: Any) -> None:
    """Write a vector to an address (an integer)."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def shuffled(builder: Any, first: Any, second: Any, order: Sequence[int]) -> Any:
    """Lanes of two vectors by their numbers."""
    mask = ir.Constant(ir.VectorType(INT32, len(order)), list(order))
    return builder.shuffle_vector(first, second, mask)


def spread(builder: Any, number: Any) -> Any:
    """A number in every lane."""
    vector = builder.insert_element(ir.Constant(SINGLES, ir.Undefined), number, ir.Constant(INT32, 0))
    return shuffled(builder, vector, vector, [0] * LANES)


@contextmanager
def loop(builder: Any, end: Any, step: int, values: Sequence[ir.Constant]) -> Iterator[tuple[Any, list[Any]]]:
    """A loop whose counter runs from 0 in steps to an end beyond 0; it carries a list of values: after it, the last."""
    before = builder.block
    body, after = builder.append_basic_block("loop"), builder.append_basic_block("end")
    builder.branch(body)
    builder.position_at_end(body)
    counter = builder.phi(end.type)
    phis = [builder.phi(value.type) for value in values]
    carried = list(phis)
    yield counter, carried
    following = builder.add(counter, end.type(step))
    for phi, first, last in zip([counter, *phis], [end.type(0), *values], [following, *carried], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(last, builder.block)
    builder.cbranch(builder.icmp_unsigned("<", following, end), body, after)
    builder.position_at_end(after)


def called(builder: Any, name: str, result: ir.Type, *operands: Any, **flags: Any) -> Any:
    """An intrinsic function of LLVM."""
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    return builder.call(builder.module.declare_intrinsic(name, fnty=kind), operands, **flags)


def with_product(builder: Any, total: Any, w: Any, x: Any) -> Any:
    """A sum plus a product, rounded once where the processor can."""
    return builder.fadd(total, builder.fmul(w, x, flags=("contract",)), flags=("contract",))


def sum_of(builder: Any, vector: Any) -> Any:
    """The sum of a vector's lanes, in any order."""
    start = ir.Constant(FLOAT32, -0.0)
    return called(builder, "llvm.vector.reduce.fadd.v16f32", FLOAT32, start, vector, fastmath=("reassoc",))


#: Bytes that the memory hands out at a time.
LINE = 64


@intrinsic
def fetch(typing_context, address, end):  # type: ignore[no-untyped-def]
    """Ask for the memory from an address to an end behind it, to be in the second cache when it is read."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        address, end = arguments
        with loop(builder, builder.sub(end, address), LINE, ()) as (offset, _):
            place = builder.inttoptr(builder.add(address, offset), INT8.as_pointer())
            read, second_cache, data = (ir.Constant(INT32, value) for value in (0, 2, 1))
            called(builder, "llvm.prefetch.p0", ir.VoidType(), place, read, second_cache, data)
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp), generate


#: How zero points enter: not at all, subtracted from codes, or added to numbers.
NO_ZERO, CODE_ZERO, VALUE_ZERO = 0, 1, 2
INT64, ROUNDED = ir.IntType(64), ir.VectorType(BFloat16(), LANES)


@dataclass(frozen=True)
class Constants:
    """What a step is written for. bits: of a code; in_group, size: codes and bytes of a group; kind to special: `Decoding`;
    has_unit: whether its unit is not 1; zero: how zero points enter; divides: numbers are divided by scales; rounds: every
    operation rounds to bfloat16; half: bfloat16 is written, else float32; flushes: of bfloat16 below 2**-126 may be 0; one:
    steps of a block share a scale; in_block: how many those are; shift: a block is 2**shift codes, less than a step, or 0;
    raw: numbers are raw (`raw_unit`). `fast.cpu.loops.row_sums` reads some of these otherwise."""

    bits: int
    in_group: int
    size: int
    kind: int
    flip: int
    less: int
    has_unit: int
    mantissa: int
    bias: int
    special: int
    zero: int
    divides: int
    rounds: int
    half: int
    flushes: int
    one: int
    in_block: int
    shift: int
    raw: int = 0


def raw_unit(decoding: Decoding) -> float:
    """What numbers of `Step` that are raw are short of; 0 where none are: of 8 bits whose last magnitude alone is NaN."""
    d = decoding
    return 2.0 ** (15 - d.bias) if HALF and d.kind == FLOAT and d.bits == 8 and d.special == 127 else 0.0


@intrinsic(prefer_literal=True)
def decode(typing_context, codes, out, steps, unit, table, scale, zero, constants):  # type: ignore[no-untyped-def]
    """The numbers of `blocks` (1 or more) of steps from one address to another, each step LANES groups of codes.

    codes, out, table, scale, zero: addresses; table of float32, 16 entries or more; scale and zero of float32, one for each
    number, or where steps share one, or shift is not 0, for each block. unit: float32, that of `Decoding`. constants: a tuple
    of those of `Constants`; where in_block is 0 there is one block, and `blocks` are its steps.
    """
    c = Constants(*(int(one.literal_value) for one in constants))

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        codes, out, blocks, unit, table, scale, zero = arguments[:7]
        shared = Step(builder, c, unit, table, scale, zero) if not c.in_block else None
        with loop(builder, blocks, 1, ()) as (block, _):
            step = shared
            if step is None:
                offset = builder.mul(block, block.type(4))
                own = (builder.add(part, offset) if c.one else part for part in (scale, zero))
                step = Step(builder, c, unit, table, *own)
            for at in range(max(c.in_block, 1)):
                step.write(
                    codes,
                    out,
                    builder.add(builder.mul(block, block.type(max(c.in_block, 1))), block.type(at)),
                )
        return context.get_dummy_value()

    addresses = (*(types.uintp,) * 3, types.float32, *(types.uintp,) * 3)
    return types.void(*addresses, constants), generate


class Step:
    """The instructions of a step, and of what steps of a block share: one scale in every lane, a table of scaled numbers."""

    def __init__(self, builder: Any, c: Constants, unit: Any, table: Any, scale: Any, zero: Any) -> None:
        self.builder, self.c = builder, c
        self.unit, self.table, self.scale, self.zero = unit, table, scale, zero
        self.one = [spread(builder, loaded(builder, part, FLOAT32)) for part in (scale, zero) if c.one]
        #: Whether numbers are looked up in a register, and whether those are scaled already.
        self.looks_up = WIDE and c.bits <= 4
        self.is_scaled = self.looks_up and bool(c.one)
        self.has_nibbles = self.is_scaled and WIDE_HALVES and c.half and (c.bits, c.in_group) == (4, 2)
        self.entries = loaded(builder, table, SINGLES) if self.looks_up else None
        #: The same of 32 numbers, in two registers: of codes of 5 bits, and of the magnitudes of floats of 6.
        self.pair = []
        if WIDE and (c.bits == 5 or (c.bits == 6 and c.kind == FLOAT)):
            self.pair = [loaded(builder, table, SINGLES, table.type(offset)) for offset in (0, 4 * LANES)]
        #: Whether numbers are made of float16: floats with up to 5 bits of exponent.
        widens = HALF and c.kind == FLOAT and c.bits - c.mantissa <= 6
        self.by_half = widens and not self.looks_up and not self.pair
        if self.is_scaled:
            self.entries = self._scaled(self.entries, *self.one)
        if self.has_nibbles:
            halves = builder.bitcast(self._as_bfloat16(self.entries), ir.VectorType(INT16, LANES))
            self.entries = shuffled(builder, halves, halves, list(range(LANES)) * 2)

    def write(self, codes: Any, out: Any, number: Any) -> None:
        """Step `number` of those whose codes, and whose results, begin at these addresses."""
        b, c = self.builder, self.c
        source = b.add(codes, b.mul(number, number.type(LANES * c.size)))
        place = b.mul(number, number.type(4 * LANES * c.in_group))
        target = b.add(out, b.lshr(place, place.type(1)) if c.half else place)
        for vector in self._written(source, place):
            stored(b, vector, target)
            target = b.add(target, target.type(2 * vector.type.count if c.half else 4 * LANES))

    def _written(self, source: Any, place: Any) -> list[Any]:
        """Vectors of all numbers, in order. source: the address of their codes; place: bytes of float32 before them."""
        c, b = self.c, self.builder
        if self.has_nibbles:
            return [self._of_nibbles(source)]
        numbers = self._interleaved(self.planes(source))
        result = []
        for at, number in enumerate(numbers):
            if not self.is_scaled:
                offset = b.add(place, place.type(4 * LANES * at))
                number = self._scaled(number, *(self.one or self._operands(offset)))
            result.append(self._as_bfloat16(number) if c.half else number)
        return result

    def planes(self, source: Any) -> list[Any]:
        """The numbers of LANES groups, whose codes begin at an address: the first of every group, the second of each, ..."""
        return [self._number(code) for code in self._codes(self._bytes(source))]

    def _operands(self, offset: Any) -> list[Any]:
        b, shift = self.builder, self.c.shift
        if not shift:
            return [loaded(b, part, SINGLES, offset) for part in (self.scale, self.zero)]
        block = b.shl(b.lshr(offset, offset.type(shift + 2)), offset.type(2))
        parts = (self.scale, self.zero) if self.c.zero else (self.scale, self.scale)
        return [spread(b, loaded(b, part, FLOAT32, block)) for part in parts]

    def _bytes(self, source: Any) -> list[Any]:
        """The bytes of LANES groups as int32: the first byte of every group, the second, ...; or of three all in one."""
        b, size = self.builder, self.c.size
        if size == 3 and WIDE_HALVES:
            return [self._threes(source)]
        raw = loaded(b, source, ir.VectorType(INT8, LANES * size))
        if size == 1:
            return [b.sext(raw, WORDS) if self._is_signed_byte() or self.by_half else b.zext(raw, WORDS)]
        planes = [
            shuffled(b, raw, raw, [lane * size + byte for lane in range(LANES)]) for byte in range(size)
        ]
        return [b.zext(plane, WORDS) for plane in planes]

    def _threes(self, source: Any) -> Any:
        """LANES groups of three bytes, each an int32: by one load and one permutation, of which LLVM makes few steps."""
        b, kind = self.builder, ir.VectorType(INT8, 4 * LANES)
        place = b.inttoptr(source, kind.as_pointer())
        there = ir.Constant(
            ir.VectorType(ir.IntType(1), 4 * LANES), [at < 3 * LANES for at in range(4 * LANES)]
        )
        nothing = same(kind, 0)
        raw = called(b, "llvm.masked.load.v64i8.p0", kind, place, INT32(1), there, nothing)
        order = [3 * lane + byte if byte < 3 else 4 * LANES for lane in range(LANES) for byte in range(4)]
        return b.bitcast(shuffled(b, raw, nothing, order), WORDS)

    def _is_signed_byte(self) -> bool:
        """Whether codes are the bytes of signed integers."""
        c = self.c
        return c.kind == INTEGER and c.bits == 8 and c.flip == c.less == 128

    def _codes(self, planes: list[Any]) -> list[Any]:
        """The codes of LANES groups: the first of every group, the second, ... Bits above a code's are any."""
        b, bits, result = self.builder, self.c.bits, []
        if len(planes) == 1:
            (word,) = planes
            return [b.lshr(word, words(place * bits)) if place else word for place in range(self.c.in_group)]
        for place in range(self.c.in_group):
            byte, shift = place * bits >> 3, place * bits & 7
            code = planes[byte] if shift == 0 else b.lshr(planes[byte], words(shift))
            if shift + bits > 8:
                code = b.or_(code, b.shl(planes[byte + 1], words(8 - shift)))
            result.append(code)
        return result

    def _of_nibbles(self, source: Any) -> Any:
        """32 codes of 4 bits, each a bfloat16 of the table: of a byte one in each half of 32 bits."""
        b = self.builder
        (byte,) = self._bytes(source)
        pairs = b.and_(b.or_(byte, b.shl(byte, words(12))), words(0x000F000F))
        halves = ir.VectorType(INT16, 2 * LANES)
        return called(b, "llvm.x86.avx512.permvar.hi.512", halves, self.entries, b.bitcast(pairs, halves))

    def _number(self, code: Any) -> Any:
        """What a code stands for, as `fast.cpu.elements.Decoding` says; scaled where the table is."""
        b, c = self.builder, self.c
        if self.looks_up:
            return called(b, "llvm.x86.avx512.permvar.sf.512", SINGLES, self.entries, code)
        if self.pair:
            return self._of_pair(code)
        if self._is_signed_byte():
            return self._with_unit(b.sitofp(code, SINGLES))
        if self.by_half:
            return self._of_half(code)
        code = b.and_(code, words((1 << c.bits) - 1))
        if c.kind == INTEGER:
            return self._with_unit(b.sitofp(b.sub(b.xor(code, words(c.flip)), words(c.less)), SINGLES))
        return self._float(code) if c.kind == FLOAT else self._gathered(code)

    def _with_unit(self, number: Any) -> Any:
        b = self.builder
        return b.fmul(number, spread(b, self.unit)) if self.c.has_unit else number

    def _of_pair(self, code: Any) -> Any:
        """An entry of two registers; of a float of 6 bits with its sign."""
        b, (first, second) = self.builder, self.pair
        number = called(b, "llvm.x86.avx512.vpermi2var.ps.512", SINGLES, first, code, second)
        if self.c.bits == 5:
            return number
        sign = b.and_(b.shl(code, words(26)), words(-(1 << 31)))
        return b.bitcast(b.or_(b.bitcast(number, WORDS), sign), SINGLES)

    def _of_half(self, code: Any) -> Any:
        """`Decoding.numbers` of FLOAT with up to 5 bits of exponent: as float16, and times a power of two.

        float16 holds their subnormals as such, which no processor is slow to widen."""
        b, c = self.builder, self.c
        kind, up, infinity = ir.VectorType(INT16, LANES), 10 - c.mantissa, 31 << 10
        half, most = b.trunc(code, kind), (1 << (c.bits - 1)) - 1
        if c.bits == 8:
            # Bytes come with their sign above them.
            signed = b.and_(b.shl(half, same(kind, up)), same(kind, (most << up) - (1 << 15)))
        else:
            signed = b.or_(
                b.and_(b.shl(half, same(kind, up)), same(kind, most << up)),
                b.and_(b.shl(half, same(kind, 16 - c.bits)), same(kind, -(1 << 15))),
            )
        if not c.raw and c.special <= most and c.special << up != infinity:
            magnitude = b.and_(signed, same(kind, most << up))
            is_special = b.icmp_unsigned(">=", magnitude, same(kind, c.special << up))
            signed = b.select(is_special, b.or_(signed, same(kind, infinity)), signed)
        number = b.fpext(b.bitcast(signed, ir.VectorType(ir.HalfType(), LANES)), SINGLES)
        return number if c.bias == 15 or c.raw else b.fmul(number, singles(2.0 ** (15 - c.bias)))

    def _float(self, code: Any) -> Any:
        """`Decoding.numbers` of FLOAT: subnormals by a product, so that no float32 on the way is one."""
        b, c = self.builder, self.c
        magnitude = b.and_(code, words((1 << (c.bits - 1)) - 1))
        pattern = b.add(b.shl(magnitude, words(23 - c.mantissa)), words((127 - c.bias) << 23))
        if c.special < 1 << (c.bits - 1):
            is_special = b.icmp_unsigned(">=", magnitude, words(c.special))
            pattern = b.select(is_special, b.or_(pattern, words(0x7F800000)), pattern)
        small = b.fmul(b.sitofp(magnitude, SINGLES), singles(2.0 ** (1 - c.bias - c.mantissa)))
        is_small = b.icmp_unsigned("<", magnitude, words(1 << c.mantissa))
        pattern = b.select(is_small, b.bitcast(small, WORDS), pattern)
        sign = b.shl(b.lshr(code, words(c.bits - 1)), words(31))
        return b.bitcast(b.or_(pattern, sign), SINGLES)

    def _gathered(self, code: Any) -> Any:
        """Entries of the table in memory."""
        b, result = self.builder, ir.Constant(SINGLES, ir.Undefined)
        for lane in range(LANES):
            place = INT32(lane)
            entry = b.shl(b.zext(b.extract_element(code, place), INT64), INT64(2))
            result = b.insert_element(result, loaded(b, self.table, FLOAT32, entry), place)
        return result

    def _interleaved(self, planes: list[Any]) -> list[Any]:
        """Numbers in the order of their codes: the first of each plane, the second of each, ..."""
        streams = [[plane] for plane in planes]
        while len(streams) > 1:
            half = len(streams) // 2
            streams = [self._zipped(streams[at], streams[at + half]) for at in range(half)]
        return streams[0]

    def _zipped(self, first: list[Any], second: list[Any]) -> list[Any]:
        result = []
        for one, other in zip(first, second, strict=True):
            for begin in (0, LANES // 2):
                order = [lane for at in range(begin, begin + LANES // 2) for lane in (at, LANES + at)]
                result.append(shuffled(self.builder, one, other, order))
        return result

    def _scaled(self, number: Any, scale: Any, zero: Any) -> Any:
        """Less the zero point, times the scale; or plus the zero point in the end. The last rounding is left to who stores."""
        b, c = self.builder, self.c
        if c.zero == CODE_ZERO:
            number = b.fsub(number, zero)
            number = self._at_bfloat16(number) if c.rounds else number
        number = b.fdiv(number, scale) if c.divides else b.fmul(number, scale)
        if c.zero == VALUE_ZERO:
            number = self._at_bfloat16(number) if c.rounds else number
            number = b.fadd(number, zero)
        return number

    def _rounded(self, number: Any) -> Any:
        """The upper halves of float32 as bfloat16 rounds them, ties to even; NaN stays NaN where its lower half is 0."""
        b = self.builder
        word = b.bitcast(number, WORDS)
        odd = b.and_(b.lshr(word, words(16)), words(1))
        return b.lshr(b.add(word, b.add(odd, words(0x7FFF))), words(16))

    def _at_bfloat16(self, number: Any) -> Any:
        """float32 rounded to bfloat16's numbers."""
        b = self.builder
        return b.bitcast(b.shl(self._rounded(number), words(16)), SINGLES)

    def _as_bfloat16(self, number: Any) -> Any:
        """The bits of bfloat16."""
        if self.c.flushes and BFLOAT16:
            return called(self.builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", ROUNDED, number)
        return self.builder.trunc(self._rounded(number), ir.VectorType(INT16, LANES))


__all__ = [
    "BFLOAT16",
    "CODE_ZERO",
    "FLOAT32",
    "HALVES",
    "INT8",
    "INT32",
    "LANES",
    "NO_ZERO",
    "SINGLES",
    "VALUE_ZERO",
    "WIDE",
    "WORDS",
    "Constants",
    "Step",
    "called",
    "decode",
    "fetch",
    "loaded",
    "loop",
    "raw_unit",
    "same",
    "shuffled",
    "singles",
    "spread",
    "stored",
    "sum_of",
    "with_product",
    "words",
]
