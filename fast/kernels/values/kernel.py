"""Blocks of 32 along rows and blocks of 32 down columns of a 16-bit matrix from one read, both in the matrix's layout.

A program is a warp with 32 rows of 64 columns; a lane has eight neighbouring columns of eight rows, 16 bytes of each:

    row  0      lane 0 | lane 1  | ... | lane 7        a row's block of 32: 4 lanes
    row  1      lane 8 | lane 9  | ... | lane 15       a column's block of 32: 4 lanes, 8 registers of each
    ...
    row  4      lane 0 | ...

So neither maximum leaves the warp, nothing is transposed, and no barrier or shared memory is needed. Two neighbours share a
register until they are stored: bfloat16 is rounded in pairs (`pairs`). float16 has more significant bits than that takes and a
range that scales leave; it goes through float32, and so does everything in the interpreter, which knows no instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import MAGNITUDE, bits_of, high_float, low_float, widened
from fast.kernels.hadamard.elements import values_of
from fast.kernels.rowwise_colwise.mxfp8 import MAGNITUDES, inverse_power, unit_of, word_of_codes
from fast.kernels.rules.scales import power_scale, power_value
from fast.kernels.rules.statistics import larger
from fast.kernels.sm90.fp4 import larger_pair
from fast.kernels.values.pairs import factors_of, rounded_pairs, scale_codes, scaled_pairs

#: Rows and columns of a program: a block of each.
ROWS, COLUMNS, WARPS = 32, 64, 1


@triton.jit
def values_kernel(
    x, along_rows, along_columns, codes, scale, columns,
    SCHEME: tl.constexpr, CODES: tl.constexpr, SATURATES: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Values of the blocks of rows; with CODES codes and scales of those of columns, else their values.

    Columns are a multiple of 32; MASKED: they do not fill the last program. Grid: programs across, then down.
    """
    tiles = tl.cdiv(columns, COLUMNS)
    strip, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    if SCHEME.has_ptx and SCHEME.dtype == "bfloat16":
        _pairs_tile(
            x, along_rows, along_columns, codes, scale, columns, strip, tile,
            SCHEME, CODES, SATURATES, MASKED, ROWS, COLUMNS,
        )  # fmt: skip
    else:
        _floats_tile(
            x, along_rows, along_columns, codes, scale, columns, strip, tile, SCHEME, CODES, MASKED, ROWS, COLUMNS
        )  # fmt: skip


@triton.jit
def _places(
    strip, tile, columns, MASKED: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Offsets of a tile in units of UNIT neighbours from its first row on, (ROWS, COLUMNS / UNIT), and which exist.

    They are said to have no more neighbours than a lane has: wider stores would be put together by shuffles.
    """
    row = tl.arange(0, ROWS)[:, None]
    column = tl.max_contiguous(tl.arange(0, COLUMNS // UNIT), [8 // UNIT])[None, :]
    column = tile * (COLUMNS // UNIT) + column
    if MASKED:
        inside = tl.broadcast_to(column < columns // UNIT, (ROWS, COLUMNS // UNIT))
    else:
        # A mask that the compiler drops.
        inside = tl.full((ROWS, COLUMNS // UNIT), 1, tl.int1)
    return row * (columns // UNIT) + column, inside


@triton.jit
def _pairs_tile(
    x, along_rows, along_columns, codes, scale, columns, strip, tile,
    SCHEME: tl.constexpr, CODES: tl.constexpr, SATURATES: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of bfloat16 in words of two neighbours."""
    WORDS: tl.constexpr = tl.pointer_type(tl.int32)
    BLOCKS: tl.constexpr = COLUMNS // 32
    at, inside = _places(strip, tile, columns, MASKED, 2, ROWS, COLUMNS)
    first = strip * ROWS * columns
    w = tl.load((x + first).to(WORDS, bitcast=True) + at, mask=inside, other=0)
    magnitudes = w & MAGNITUDES

    blocks = tl.reshape(magnitudes, (ROWS, BLOCKS, 16))
    m, s, limits, signs = factors_of(_over_halves(tl.reduce(blocks, 2, larger_pair, keep_dims=True)), SCHEME)
    made = rounded_pairs(tl.reshape(w, (ROWS, BLOCKS, 16)), m, s, limits, signs, SATURATES, SCHEME)
    tl.store(
        (along_rows + first).to(WORDS, bitcast=True) + at, tl.reshape(made, (ROWS, COLUMNS // 2)), mask=inside
    )

    m, s, limits, signs = factors_of(tl.reduce(magnitudes, 0, larger_pair, keep_dims=True), SCHEME)
    if CODES:
        y = scaled_pairs(w, m, signs, SCHEME)
        low, high = low_float(y, True), high_float(y, True)
        _store_codes(codes + first, low, high, strip, tile, columns, SCHEME, MASKED, ROWS, COLUMNS)
        both = scale_codes(s)
        _store_scales(scale, both & 0xFF, both >> 16, strip, tile, columns, MASKED, COLUMNS)
    else:
        made = rounded_pairs(w, m, s, limits, signs, SATURATES, SCHEME)
        tl.store((along_columns + first).to(WORDS, bitcast=True) + at, made, mask=inside)


@triton.jit
def _over_halves(pairs):
    """The larger half of words in both halves."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; prmt.b32 t, $1, $1, 0x1032; max.u16x2 $0, $1, t; }", "=r,r", [pairs],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _floats_tile(
    x, along_rows, along_columns, codes, scale, columns, strip, tile,
    SCHEME: tl.constexpr, CODES: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile as float32."""
    BLOCKS: tl.constexpr = COLUMNS // 32
    at, inside = _places(strip, tile, columns, MASKED, 1, ROWS, COLUMNS)
    first = strip * ROWS * columns
    v = widened(tl.load(x + first + at, mask=inside, other=0.0))

    blocks = tl.reshape(v, (ROWS, BLOCKS, 32))
    made = _values(blocks, _largest(blocks, 2, SCHEME.has_ptx), SCHEME)
    tl.store(along_rows + first + at, tl.reshape(made, (ROWS, COLUMNS)), mask=inside)

    largest = _largest(v, 0, SCHEME.has_ptx)
    if CODES:
        code = power_scale(largest, SCHEME.level, True)
        y = v * inverse_power(code)
        if SCHEME.bits < 8:
            # Codes without NaN are 0 in blocks without a scale.
            y = tl.where(code == 255, 0.0, y)
        low, high = tl.split(tl.reshape(y, (ROWS, COLUMNS // 2, 2)))
        _store_codes(codes + first, low, high, strip, tile, columns, SCHEME, MASKED, ROWS, COLUMNS)
        low, high = tl.split(tl.reshape(code, (1, COLUMNS // 2, 2)))
        _store_scales(scale, low, high, strip, tile, columns, MASKED, COLUMNS)
    else:
        tl.store(along_columns + first + at, _values(v, largest, SCHEME), mask=inside)


@triton.jit
def _largest(v, AXIS: tl.constexpr, HAS_PTX: tl.constexpr):
    """Patterns of the largest magnitudes along an axis, which stays."""
    if HAS_PTX:
        return bits_of(tl.reduce(tl.abs(v), AXIS, larger, keep_dims=True)) & MAGNITUDE
    else:
        return tl.max(bits_of(v) & MAGNITUDE, axis=AXIS, keep_dims=True)


@triton.jit
def _values(v, largest, SCHEME: tl.constexpr):
    """Values of elements, in the tensor's dtype, from the patterns of their blocks' largest magnitudes."""
    code = power_scale(largest, SCHEME.level, True)
    s = power_value(code)
    return values_of(v, s, inverse_power(code), None, None, SCHEME, False, SCHEME.dtype)


@triton.jit
def _store_codes(
    codes, low, high, strip, tile, columns, SCHEME: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Codes of scaled elements, the even and the odd columns, as words of four neighbours: 8 bytes of a lane."""
    UNIT = unit_of(SCHEME)
    a, c = tl.split(tl.reshape(low * UNIT, (ROWS, COLUMNS // 4, 2)))
    b, d = tl.split(tl.reshape(high * UNIT, (ROWS, COLUMNS // 4, 2)))
    at, inside = _places(strip, tile, columns, MASKED, 4, ROWS, COLUMNS)
    words = codes.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store(words + at, word_of_codes(a, b, c, d, SCHEME), mask=inside)


@triton.jit
def _store_scales(scale, low, high, strip, tile, columns, MASKED: tl.constexpr, COLUMNS: tl.constexpr):
    """Codes of the scales of a strip's columns, the even and the odd ones, (1, COLUMNS / 2): words of four."""
    both = low | (high << 8)
    even, odd = tl.split(tl.reshape(both, (1, COLUMNS // 4, 2)))
    at, inside = _places(strip, tile, columns, MASKED, 4, 1, COLUMNS)
    words = (scale + strip * columns).to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store(words + at, even | (odd << 16), mask=inside)


__all__ = ["COLUMNS", "ROWS", "WARPS", "values_kernel"]
