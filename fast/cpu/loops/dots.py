"""Small blocks of dot products, as vector instructions for a loop that Numba compiles: their sums stay in registers.

Numba makes such blocks of float32 by itself, but none of bfloat16, whose products have an instruction of their own.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fast.cpu.loops.vectors import (
    FLOAT32,
    HALVES,
    INT32,
    SINGLES,
    WIDE,
    called,
    loaded,
    loop,
    singles,
    stored,
)

#: Rows of the weight and of inputs in a block: as many sums as registers hold.
ROWS = COLUMNS = 4 if WIDE else 2
#: Bytes that a dot product takes at a time.
PIECE = 64


@intrinsic(prefer_literal=True)
def dots(typing_context, w, w_stride, x, x_stride, length, out, rows, columns, half):  # type: ignore[no-untyped-def]
    """The dot products of `rows` rows of w and `columns` of x, as float32 (rows, columns) at the address out.

    w, x: addresses of rows of float32, or where `half` of bfloat16; strides and length in bytes, length a multiple of PIECE.
    Sums are float32 in any order; products of bfloat16 come in pairs, and numbers below 2**-126 count as 0.
    """
    counts = [(r, c) for r in range(rows.literal_value) for c in range(columns.literal_value)]
    kind = HALVES if half.literal_value else SINGLES

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        w, w_stride, x, x_stride, length, out = arguments[:6]
        left = [builder.add(w, builder.mul(w_stride, w_stride.type(r))) for r in range(rows.literal_value)]
        right = [
            builder.add(x, builder.mul(x_stride, x_stride.type(c))) for c in range(columns.literal_value)
        ]
        with loop(builder, length, PIECE, [singles(0.0)] * len(counts)) as (offset, sums):
            ws = [loaded(builder, address, kind, offset) for address in left]
            xs = [loaded(builder, address, kind, offset) for address in right]
            add = _with_pairs if half.literal_value else _with_product
            sums[:] = [add(builder, total, ws[r], xs[c]) for total, (r, c) in zip(sums, counts, strict=True)]
        for at, total in enumerate(sums):
            stored(builder, _sum(builder, total), builder.add(out, ir.Constant(out.type, 4 * at)))
        return context.get_dummy_value()

    numbers = (types.uintp,) * 6
    return types.void(*numbers, rows, columns, half), generate


@intrinsic
def fetch(typing_context, address, end):  # type: ignore[no-untyped-def]
    """Ask for the memory from an address to an end behind it, to be in the second cache when it is read."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        address, end = arguments
        with loop(builder, builder.sub(end, address), PIECE, ()) as (offset, _):
            place = builder.inttoptr(builder.add(address, offset), ir.IntType(8).as_pointer())
            read, second_cache, data = (ir.Constant(INT32, value) for value in (0, 2, 1))
            called(builder, "llvm.prefetch.p0", ir.VoidType(), place, read, second_cache, data)
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp), generate


def _with_product(builder: Any, total: Any, w: Any, x: Any) -> Any:
    return builder.fadd(total, builder.fmul(w, x, flags=("contract",)), flags=("contract",))


def _with_pairs(builder: Any, total: Any, w: Any, x: Any) -> Any:
    """Plus the products of pairs of bfloat16, one instruction."""
    return called(builder, "llvm.x86.avx512bf16.dpbf16ps.512", SINGLES, total, w, x)


def _sum(builder: Any, total: Any) -> Any:
    """The sum of a vector's lanes."""
    start = ir.Constant(FLOAT32, -0.0)
    return called(builder, "llvm.vector.reduce.fadd.v16f32", FLOAT32, start, total, fastmath=("reassoc",))


__all__ = ["COLUMNS", "PIECE", "ROWS", "dots", "fetch"]
