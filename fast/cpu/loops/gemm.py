"""Several rows of inputs times a matrix of codes on a CPU, compiled by Numba: a few rows of the weight are decoded at a time,
into the first cache, and multiplied there by all rows of inputs. The same loop writes decoded rows out.

Decoded numbers have the bits of `reference.dequantize`: code, zero point and scale in its order, a rounding after each, in
float32 or in bfloat16. Steps are vector instructions (`fast.cpu.loops.decode`). Kernels are compiled, kept and named as those
of `fast.cpu.loops.gemv` are.

Small blocks of dot products keep their sums in registers (`dots`). Numba makes such blocks of float32 by itself, but none of
bfloat16, whose products have an instruction of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fast.cpu.elements import Decoding
from fast.cpu.loops.decode import (
    HALVES,
    LANES,
    SINGLES,
    WIDE,
    called,
    decode,
    fetch,
    loaded,
    loop,
    singles,
    stored,
    sum_of,
    with_product,
)
from fast.cpu.loops.gemv import compile_once, group_of

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
            add = _with_pairs if half.literal_value else with_product
            sums[:] = [add(builder, total, ws[r], xs[c]) for total, (r, c) in zip(sums, counts, strict=True)]
        for at, total in enumerate(sums):
            stored(builder, sum_of(builder, total), builder.add(out, ir.Constant(out.type, 4 * at)))
        return context.get_dummy_value()

    numbers = (types.uintp,) * 6
    return types.void(*numbers, rows, columns, half), generate


def _with_pairs(builder: Any, total: Any, w: Any, x: Any) -> Any:
    """Plus the products of pairs of bfloat16, one instruction."""
    return called(builder, "llvm.x86.avx512bf16.dpbf16ps.512", SINGLES, total, w, x)


@intrinsic(prefer_literal=True)
def splat(typing_context, address, number, count):  # type: ignore[no-untyped-def]
    """Store a float32 `count` (a constant) times from an address on, as one vector: Numba alone writes them singly."""
    size = count.literal_value

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        vector = ir.Constant(ir.VectorType(ir.FloatType(), size), ir.Undefined)
        for place in range(size):
            vector = builder.insert_element(vector, arguments[1], ir.Constant(ir.IntType(32), place))
        builder.store(vector, builder.inttoptr(arguments[0], vector.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.uintp, types.float32, count), generate


OPTIONS = {"nogil": True, "error_model": "numpy"}
#: The most steps of a block that are written out one after the other.
UNROLLED = 4
NAMES = ("gemm", "gemv", "decode")
SOURCES = b"".join(Path(__file__).with_name(f"{name}.py").read_bytes() for name in NAMES)


@dataclass(frozen=True)
class Loop:
    """What a kernel is compiled for. zero: NO_ZERO, CODE_ZERO or VALUE_ZERO of `decode`; divides: by scales; rounds: every
    operation to bfloat16; half: decoded numbers are bfloat16, else float32; multiplies: rows of inputs, else decoded rows are
    written; run: a divisor of a block's length, at most LANES; one: codes of a step share a scale; in_block: steps of a block
    where those are few; shift: a block is 2**shift codes, less than a step, or 0; flushes: numbers of bfloat16 below 2**-126
    may be written as 0."""

    decoding: Decoding
    packed: bool
    zero: int
    divides: bool
    rounds: bool
    half: bool
    multiplies: bool
    run: int = 1
    one: bool = False
    in_block: int = 0
    shift: int = 0
    flushes: bool = False

    @property
    def group(self) -> tuple[int, int]:
        """Codes and bytes of a group."""
        return group_of(self.decoding.bits) if self.packed else (1, 1)

    def width(self, length: int) -> int:
        """Numbers of a decoded row of so many codes: whole steps, and whole pieces of a dot product."""
        step = max(LANES * self.group[0], PIECE // 2)
        return -(-length // step) * step

    def of_blocks(self, size: int) -> Loop:
        """That of blocks of `size` codes."""
        steps, rest = divmod(size, LANES * self.group[0])
        few = 0 if rest or steps > UNROLLED else steps
        within = rest == size and size >= LANES and size & (size - 1) == 0
        shift = size.bit_length() - 1 if within else 0
        return replace(self, run=gcd(size, LANES), one=not rest, in_block=few, shift=shift)


@lru_cache(maxsize=256)
def compiled(loop: Loop) -> Callable[..., None]:
    """`kernel(codes, table, scale, zero, size, x, out, first, last)`, rows first to last of a weight (N, K).

    All arrays are contiguous. codes: uint8 (N, bytes); table: float32 (256,); scale, zero: float32 (N or 1, blocks), zero of
    the same shape, or (1, 1); size: codes of a block. Where the loop multiplies, x is (an even number of rows, `width`), 0 from
    K on, and out float32 (rows, N): the dot products with decoded rows. Else x is not read, and out is (last - first, `width`):
    the decoded rows, any numbers from K on. x and decoded rows are float32, or uint16, the bits of bfloat16, where `half`.
    """
    return compile_once(_kernel(loop), "gemm", SOURCES + repr(loop).encode(), _signature(loop), OPTIONS)


def _signature(loop: Loop) -> types.Type:
    single = types.float32[:, ::1]
    numbers = types.uint16[:, ::1] if loop.half else single
    out = single if loop.multiplies else numbers
    stored = (types.uint8[:, ::1], types.float32[::1], single, single, types.intp)
    return types.void(*stored, numbers, out, types.intp, types.intp)


def _kernel(loop: Loop) -> Callable[..., None]:
    """All that a kernel closes over are numbers: they tell Numba's files on disk apart, and become constants."""
    d, (in_group, nbytes), half, run, one = loop.decoding, loop.group, int(loop.half), loop.run, int(loop.one)
    unit, item, multiplies = np.float32(d.unit), 2 if loop.half else 4, loop.multiplies
    bits, kind, flip, less, has_unit = d.bits, d.kind, d.flip, d.less, int(d.unit != 1)
    mantissa, bias, special = d.mantissa, d.bias, d.special
    enters, divides, rounds, has_zero = loop.zero, int(loop.divides), int(loop.rounds), int(loop.zero != 0)
    flushes, in_block, shift = int(multiplies or loop.flushes), loop.in_block, loop.shift
    step, elements, block_rows, columns = LANES * nbytes, LANES * in_group, ROWS, COLUMNS

    def kernel(codes, table, scale, zero, size, x, out, first, last):  # type: ignore[no-untyped-def]
        stored, blocks = codes.shape[1], scale.shape[1]
        width = x.shape[1] if multiplies else out.shape[1]
        steps, whole = -(-stored // step), stored // step
        share = size // elements if one else steps
        kept = np.zeros((block_rows if multiplies else 0, width), x.dtype)
        filled = 0 if one or shift else max(width, blocks * size) + LANES
        scales, zeros = np.ones(filled, np.float32), np.zeros(filled, np.float32)
        last_scales, last_zeros = np.ones(elements, np.float32), np.zeros(elements, np.float32)
        rest, sums = np.zeros(step, np.uint8), np.empty(block_rows * columns, np.float32)
        for begin in range(first, last, block_rows):
            count = min(block_rows, last - begin)
            for r in range(count):
                n = begin + r
                row = n if scale.shape[0] > 1 else 0
                if not one and not shift and (n == first or scale.shape[0] > 1):
                    for b in range(blocks):
                        for j in range(b * size, b * size + size, run):
                            splat(scales.ctypes.data + 4 * j, scale[row, b], run)
                            if has_zero:
                                splat(zeros.ctypes.data + 4 * j, zero[row, b], run)
                place = r if multiplies else n - first
                target = (kept if multiplies else out).ctypes.data + place * width * item
                source = codes.ctypes.data + n * stored
                done, block, end = 0, 0, share
                if in_block and whole >= in_block:
                    block = whole // in_block
                    decode(
                        source, target, block, unit, table.ctypes.data, scale.ctypes.data + 4 * row * blocks,
                        zero.ctypes.data + 4 * row * blocks * has_zero,
                        (bits, in_group, nbytes, kind, flip, less, has_unit, mantissa, bias, special,
                         enters, divides, rounds, half, flushes, 1, in_block, 0),
                    )  # fmt: skip
                    done, end = block * in_block, block * in_block + share
                while done < steps:
                    now = whole - done
                    if now <= 0:
                        now = 1
                        rest[: stored - done * step] = codes[n, done * step :]
                        source = rest.ctypes.data - done * step
                    if done == end:
                        block, end = block + 1, end + share
                    if one:
                        now = min(now, end - done)
                        scale_at = scale.ctypes.data + 4 * (row * blocks + block)
                        zero_at = zero.ctypes.data + 4 * (row * blocks + block) * has_zero
                    elif shift:
                        block = done * elements >> shift
                        scale_at = scale.ctypes.data + 4 * (row * blocks + block)
                        zero_at = zero.ctypes.data + 4 * (row * blocks + block) * has_zero
                        if source != codes.ctypes.data + n * stored:
                            # The last step: blocks that the row does not have would be read.
                            last_scales[: blocks - block] = scale[row, block:]
                            scale_at = last_scales.ctypes.data
                            if has_zero:
                                last_zeros[: blocks - block] = zero[row, block:]
                                zero_at = last_zeros.ctypes.data
                    else:
                        scale_at = scales.ctypes.data + 4 * done * elements
                        zero_at = zeros.ctypes.data + 4 * done * elements
                    decode(
                        source + done * step, target + done * elements * item, now, unit, table.ctypes.data, scale_at, zero_at,
                        (bits, in_group, nbytes, kind, flip, less, has_unit, mantissa, bias, special,
                         enters, divides, rounds, half, flushes, one, 0, shift),
                    )  # fmt: skip
                    done += now
            following = min(last, begin + 2 * block_rows)
            if multiplies and begin + block_rows < following:
                fetch(
                    codes.ctypes.data + (begin + block_rows) * stored, codes.ctypes.data + following * stored
                )
            m = 0
            while multiplies and m < x.shape[0]:
                inputs, wide = x.ctypes.data + m * width * item, width * item
                if m + columns <= x.shape[0]:
                    dots(
                        kept.ctypes.data,
                        wide,
                        inputs,
                        wide,
                        wide,
                        sums.ctypes.data,
                        block_rows,
                        columns,
                        half,
                    )
                    for r in range(count):
                        for c in range(columns):
                            out[m + c, begin + r] = sums[r * columns + c]
                    m += columns
                else:
                    dots(kept.ctypes.data, wide, inputs, wide, wide, sums.ctypes.data, block_rows, 2, half)
                    for r in range(count):
                        for c in range(2):
                            out[m + c, begin + r] = sums[r * 2 + c]
                    m += 2

    return kernel


__all__ = ["Loop", "compiled"]
