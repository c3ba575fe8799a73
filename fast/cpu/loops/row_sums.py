"""The vector instructions of `fast.cpu.loops.gemv`: sums of a few rows of codes times inputs, and the numbers of scales.

Vectors, and how codes become numbers, are those of `fast.cpu.loops.decode`. Rows have sums of their own in registers and share
the loads of inputs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fast.cpu.loops.decode import (
    FLOAT32,
    INT8,
    LANES,
    SINGLES,
    WIDE,
    WORDS,
    Constants,
    Step,
    called,
    loaded,
    loop,
    same,
    shuffled,
    singles,
    spread,
    stored,
    sum_of,
    with_product,
    words,
)

#: Rows of the weight whose sums are in registers at a time.
ROWS = 4 if WIDE else 2
#: What scales are: numbers; codes of e4m3 or of exponents; codes of any entries of a table.
NUMBERS, E4M3, E8M0, ENTRIES = range(4)
BYTES = ir.VectorType(INT8, LANES)


@intrinsic(prefer_literal=True)
def scales_of(typing_context, codes, out, count, unit, kind):  # type: ignore[no-untyped-def]
    """The numbers of scales that are codes of a kind, times unit: from one address to another, count a multiple of LANES."""
    is_power = kind.literal_value == E8M0

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        b, (codes, out, count, unit, _) = builder, arguments
        factor = spread(b, unit)
        with loop(b, count, LANES, ()) as (at, _):
            code = loaded(b, codes, BYTES, at)
            number = _power(b, code) if is_power else _e4m3(b, code)
            number = number if is_power else b.fmul(number, factor)
            stored(b, number, b.add(out, b.mul(at, at.type(4))))
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp, types.intp, types.float32, kind), generate


def _power(builder: Any, code: Any) -> Any:
    """Powers of two by their exponents; that of code 0 is subnormal."""
    word = builder.shl(builder.zext(code, WORDS), words(23))
    return builder.bitcast(called(builder, "llvm.umax.v16i32", WORDS, word, words(1 << 22)), SINGLES)


def _e4m3(builder: Any, code: Any) -> Any:
    """Numbers of e4m3 from 0 up, subnormals by a product."""
    word = builder.zext(code, WORDS)
    normal = builder.add(builder.shl(word, words(20)), words(120 << 23))
    small = builder.fmul(builder.sitofp(word, SINGLES), singles(2.0**-9))
    is_small = builder.icmp_unsigned("<", word, words(8))
    return builder.select(is_small, small, builder.bitcast(normal, SINGLES))


@intrinsic(prefer_literal=True)
def row_sums(
    typing_context, codes, stride, count, x, plane, scale, scale_stride, blocks, steps, out, table, unit, constants
):  # type: ignore[no-untyped-def]  # fmt: skip
    """The sums of ROWS rows over so many blocks (1 or more) of so many steps, each LANES groups: numbers times inputs, their
    sum over a block times its scale.

    codes: the address of the first row's, stride: bytes to the next row's; for rows from count on the first is read. x:
    float32, plane: bytes from the first input of every group to the second. scale: float32, LANES / one for a block,
    scale_stride: bytes to the next row's. out: float32 (ROWS,). table, unit: as of `decode`. constants: of `Constants`; one:
    groups of a step that share a scale, in_block: steps of a block, or 0 where `steps` says it, raw: rows with a code for NaN
    are found by their largest code.
    """
    c = Constants(*(int(one.literal_value) for one in constants))

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        _RowSums(builder, c, *arguments[:9], *arguments[10:12]).write(arguments[9])
        return context.get_dummy_value()

    address, number = types.uintp, types.intp
    places = (address, number, number, address, number, address, number, number, number, address, address)
    return types.void(*places, types.float32, constants), generate


class _RowSums:
    """The instructions of `row_sums`."""

    def __init__(
        self, builder: Any, c: Constants, codes: Any, stride: Any, count: Any, x: Any, plane: Any, scale: Any,
        scale_stride: Any, blocks: Any, steps: Any, table: Any, unit: Any,
    ) -> None:  # fmt: skip
        b, word = builder, stride.type
        rows = [b.select(b.icmp_signed("<", word(r), count), word(r), word(0)) for r in range(ROWS)]
        self.builder, self.c, self.word, self.blocks, self.steps = b, c, word, blocks, steps
        self.codes = [b.add(codes, b.mul(stride, row)) for row in rows]
        self.scales = [b.add(scale, b.mul(scale_stride, row)) for row in rows]
        self.inputs = [b.add(x, b.mul(plane, word(place))) for place in range(c.in_group)]
        self.step = Step(b, replace(c, one=0), unit, table, None, None)

    def write(self, out: Any) -> None:
        """Sums of all rows to an address."""
        b, few, nothing = self.builder, self.c.in_block, [singles(0.0)] * ROWS
        peaks = [same(BYTES, 0)] * (ROWS if self.c.raw else 0)
        with loop(b, self.blocks, 1, [*nothing, *peaks]) as (block, carried):
            sums, parts = carried[:ROWS], [*nothing, *carried[ROWS:]]
            begin = b.mul(block, self.word(few) if few else self.steps)
            for at in range(few):
                parts = self._more(parts, b.add(begin, self.word(at)))
            if not few:
                with loop(b, self.steps, 1, parts) as (at, parts):
                    parts[:] = self._more(parts, b.add(begin, at))
            scales = self._block_scales(block)
            sums = [with_product(b, *three) for three in zip(sums, parts[:ROWS], scales, strict=True)]
            carried[:] = [*sums, *parts[ROWS:]]
        for at, total in enumerate(carried[:ROWS]):
            whole = sum_of(b, total)
            if self.c.raw:
                whole = b.fadd(whole, self._nan_of(carried[ROWS + at]))
            stored(b, whole, b.add(out, out.type(4 * at)))

    def _more(self, parts: list[Any], step: Any) -> list[Any]:
        """Sums with the products of a step, and where numbers are raw the largest codes, times two to drop their signs."""
        b, c = self.builder, self.c
        inputs = [loaded(b, plane, SINGLES, b.mul(step, self.word(4 * LANES))) for plane in self.inputs]
        sums, peaks = [], []
        for row, codes in enumerate(self.codes):
            source, total = b.add(codes, b.mul(step, self.word(LANES * c.size))), parts[row]
            for number, x in zip(self.step.planes(source), inputs, strict=True):
                total = with_product(b, total, number, x)
            sums.append(total)
            if c.raw:
                twice = b.shl(loaded(b, source, BYTES), same(BYTES, 1))
                peaks.append(called(b, "llvm.umax.v16i8", BYTES, parts[ROWS + row], twice))
        return sums + peaks

    def _nan_of(self, peak: Any) -> Any:
        """NaN where one of a row's codes stands for it, else 0."""
        b = self.builder
        most = called(b, "llvm.vector.reduce.umax.v16i8", INT8, peak)
        is_special = b.icmp_unsigned("==", most, INT8(2 * self.c.special))
        return b.select(is_special, ir.Constant(FLOAT32, float("nan")), ir.Constant(FLOAT32, 0.0))

    def _block_scales(self, block: Any) -> list[Any]:
        """Of all rows, one for each lane."""
        b, shares = self.builder, LANES // self.c.one
        kind, lanes = ir.VectorType(FLOAT32, shares), [lane // self.c.one for lane in range(LANES)]
        places = [b.add(scale, b.mul(block, self.word(4 * shares))) for scale in self.scales]
        if shares == 1:
            return [spread(b, loaded(b, place, FLOAT32)) for place in places]
        found = [loaded(b, place, kind) for place in places]
        return [shuffled(b, some, some, lanes) for some in found]


__all__ = ["E4M3", "E8M0", "ENTRIES", "NUMBERS", "ROWS", "row_sums", "scales_of"]
