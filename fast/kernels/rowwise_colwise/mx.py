"""`quantize_both`: the rows of a matrix and the rows of its transpose, quantized from one read.

A training step multiplies an activation along its columns in the forward GEMM and along its rows in that of the weight
gradient, and 8-bit GEMMs want both operands contiguous along the summed axis. So the second output is x.T in blocks along
x's rows: codes (K, M), scales of blocks of `n` rows.

Two kinds of schemes have such a kernel: MX with 8-bit floats (16-bit inputs: by pairs), and 8-bit floats under a given scale
for the whole tensor. Everything else is two calls of `quantize`, the same bits from two reads.

A program of the MX kernel takes 32 * WARPS rows and COLUMNS columns. Rows are permuted so that a group of 32 rows lies in the
registers of one warp (and of at most TURNS of its lanes): the maxima over rows need no shared memory, only the transposed codes
pass through it.

`untile`: tiled scales of two matrices to plain ones. A tile of codes has 4 scales in each row, and as many in each column.
Written row by row they fill an eighth of a 32-byte sector of memory (times: reports/LOG.md). In the tiled layout they lie side
by side, and putting them in rows afterwards moves a thirty-second of the bytes, in whole sectors.

16-bit matrices go two elements at a time (`mx_pairs_kernel`). Integer and comparison instructions run at half the rate of
float ones on Hopper, and two maxima for every element are most of what this kernel does. So x is read as words of two
neighbouring columns: magnitudes of 16-bit floats order like their patterns, and one `max.u16x2` compares two. Scales of
bfloat16 are made in pairs as well.

A warp has a patch of 32 rows by 64 columns. Lane 8 r + c (r from 0 to 3, c from 0 to 7) holds 8 rows by 8 columns of it:

    columns     0 .. 7 | 8 .. 15 | ... | 56 .. 63      a row's block of 32: 4 lanes (c = 0..3 or 4..7)
    rows  0- 7  lane 0 | lane 1  | ... | lane 7        a column's block of 32: 4 lanes (r = 0..3)
    rows  8-15  lane 8 | lane 9  | ... | lane 15
    rows 16-23  lane 16| lane 17 | ... | lane 23       registers: 8 rows of 4 words of two columns
    rows 24-31  lane 24| lane 25 | ... | lane 31

Neither maximum leaves the warp, and codes of four rows or four columns are packed in one word, so that shared memory carries
only the words of the transposed codes, and scales. A program has DOWN x ACROSS patches. Neighbouring programs go down a band of
rows first, then to the next columns: bytes of scales that share a sector of memory are written while it is in the L2 cache.

Elements are multiplied in float32, whose products with a power of two are exact from 2**-126 on; what is rounded below that is
far under half the smallest code (2**-10 for e4m3, 2**-17 for e5m2) before and after, and becomes 0 with its sign.

HAS_PTX is False in Triton's interpreter, which knows no instructions: there integer operations do the same.
"""

from __future__ import annotations

from math import gcd, prod
from typing import Any

import torch
import triton
import triton.language as tl

from fast.kernels.bits import NAN, bits_of, float_of, high_float, is_nan, low_float, widened
from fast.kernels.quantize.plan import tiled_buffer
from fast.kernels.rules.elements import encode
from fast.kernels.rules.scales import floored, loaded_scale, power_scale, scale_place
from fast.kernels.rules.statistics import absmax
from fast.kernels.scheme.constants import SchemeConstants
from fast.kernels.scheme.fast_path_rules import HARDWARE
from fast.kernels.sm90.bit_tricks import E2M3_BYTES, E3M2_BYTES, e2m1_floats
from fast.kernels.sm90.fp4_fp6 import larger_pair
from fast.launch.launcher import Call, CompiledLaunch

MAGNITUDES = tl.constexpr(0x7FFF7FFF)
EXPONENTS = tl.constexpr(0x7F807F80)
LOW_BYTES = tl.constexpr(0x00FF00FF)
LOW_HALF = tl.constexpr(0xFFFF)
# 254 with a bit above it, from which a subtraction may borrow.
CODES_254 = tl.constexpr(0x01FE01FE)


@triton.jit
def larger_plain(a, b):
    """`fp4.larger_pair` for halves below 2**15."""
    return tl.maximum(a & LOW_HALF, b & LOW_HALF) | (tl.maximum(a >> 16, b >> 16) << 16)


@triton.jit
def larger_halves(a, b, HAS_PTX: tl.constexpr):
    """The larger halves of two words."""
    if HAS_PTX:
        return larger_pair(a, b)
    else:
        return larger_plain(a, b)


@triton.jit
def largest_halves(pairs, AXIS: tl.constexpr, HAS_PTX: tl.constexpr):
    """Maxima of halves along an axis."""
    if HAS_PTX:
        return tl.reduce(pairs, AXIS, larger_pair)
    else:
        return tl.reduce(pairs, AXIS, larger_plain)


@triton.jit
def crossed(a, b, HAS_PTX: tl.constexpr):
    """The larger half of a as the low half, that of b as the high half."""
    if HAS_PTX:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 l, h;
            prmt.b32 l, $1, $2, 0x5410; prmt.b32 h, $1, $2, 0x7632; max.u16x2 $0, l, h; }""",
            "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.maximum(a & LOW_HALF, a >> 16) | (tl.maximum(b & LOW_HALF, b >> 16) << 16)


@triton.jit
def _stopped(multiplier, largest, HAS_PTX: tl.constexpr):
    """Pairs of bfloat16 multipliers, at most 2**127, and 0x7fff (NaN) where the largest magnitude is not finite.

    0 times a finite element plus m is m; 0 times infinity or NaN is the instruction's NaN.
    """
    if HAS_PTX:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 m, t, z;
            mov.b32 t, 0x7F007F00; mov.b32 z, 0; min.u16x2 m, $1, t; fma.rn.bf16x2 $0, $2, z, m; }""",
            "=r,r,r", [multiplier, largest], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low = tl.minimum(multiplier & LOW_HALF, 0x7F00)
        high = tl.minimum((multiplier >> 16) & LOW_HALF, 0x7F00)
        low = tl.where((largest & LOW_HALF) >= 0x7F80, 0x7FFF, low)
        return low | (tl.where((largest >> 16) >= 0x7F80, 0x7FFF, high) << 16)


@triton.jit
def _scales(largest, IS_BF16: tl.constexpr, SCHEME: tl.constexpr):
    """Pairs of magnitudes as (multiplier of the low halves, of the high halves, their codes, those of the high halves).

    Multipliers are float32, codes int32 whose low byte counts. This is `power_scale`, for bfloat16 on pairs: with E the
    exponent field of a maximum after the record's carry (of which the upper half is left, as the lower halves of widened
    maxima are 0), the code is max(E - target, 0) and the multiplier's field 254 - code = min(254 + target - E, 254).
    """
    if IS_BF16:
        CARRY: tl.constexpr = (SCHEME.level.carry >> 16) * 0x10001
        TOP: tl.constexpr = (254 + SCHEME.level.target_exponent) * 0x800080
        SIGNED: tl.constexpr = TOP - 0x100000000 if TOP >= 0x80000000 else TOP
        m = _stopped(SIGNED - ((largest + CARRY) & EXPONENTS), largest, SCHEME.has_ptx)
        # NaN has the field 255, and 254 - 255 is 255 in a byte.
        code = CODES_254 - ((m >> 7) & LOW_BYTES)
        return low_float(m, True), high_float(m, True), code, code >> 16
    else:
        low = power_scale(bits_of(low_float(largest, False)), SCHEME.level, True)
        high = power_scale(bits_of(high_float(largest, False)), SCHEME.level, True)
        return inverse_power(low), inverse_power(high), low, high


@triton.jit
def inverse_power(code):
    """2**(127 - code), NaN for 255; codes of 8-bit float elements end far below 254."""
    return float_of(tl.where(code == 255, NAN, (254 - code) << 23))


@triton.jit
def unit_of(SCHEME: tl.constexpr):
    """What `word_of_codes` wants scaled elements multiplied by: 8-bit codes of these have the exponents of 6-bit ones."""
    if SCHEME.has_ptx and SCHEME.fast_path == "e2m3":
        return 0.015625
    elif SCHEME.has_ptx and SCHEME.fast_path == "e3m2":
        return 0.000244140625
    else:
        return 1.0


@triton.jit
def _four_bits(a, b, c, d):
    """Codes of float4_e2m1fn of four elements in the bytes of a word: numbers by `e2m1_floats`, signs from the elements."""
    return tl.inline_asm_elementwise(
        """{ .reg .b32 n, m, s, t;
        prmt.b32 n, $1, $2, 0x0040; prmt.b32 m, $3, $4, 0x0040; prmt.b32 n, n, m, 0x5410;
        prmt.b32 s, $5, $6, 0x0073; prmt.b32 t, $7, $8, 0x0073; prmt.b32 s, s, t, 0x5410;
        shr.u32 s, s, 4; lop3.b32 $0, s, 0x08080808, n, 0xEA; }""",
        "=r,f,f,f,f,f,f,f,f",
        [e2m1_floats(a, 0.5), e2m1_floats(b, 0.5), e2m1_floats(c, 0.5), e2m1_floats(d, 0.5), a, b, c, d],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def word_of_codes(a, b, c, d, SCHEME: tl.constexpr):
    """Codes of four scaled elements of a block in a word; NaN becomes 0x7f, or 0 below 8 bits, where all four are NaN."""
    if not SCHEME.has_ptx:
        low = encode(a, None, SCHEME.element) | (encode(b, None, SCHEME.element) << 8)
        word = low | (encode(c, None, SCHEME.element) << 16) | (encode(d, None, SCHEME.element) << 24)
        return word if SCHEME.bits == 8 else tl.where(is_nan(a), 0, word)
    elif SCHEME.fast_path == "e2m1":
        return tl.where(is_nan(a), 0, _four_bits(a, b, c, d))
    elif SCHEME.fast_path == "e2m3":
        word = tl.inline_asm_elementwise(
            E2M3_BYTES, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1
        )
        return tl.where(is_nan(a), 0, word)
    elif SCHEME.fast_path == "e3m2":
        word = tl.inline_asm_elementwise(
            E3M2_BYTES, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1
        )
        return tl.where(is_nan(a), 0, word)
    elif SCHEME.fast_path == "e4m3":
        return tl.inline_asm_elementwise(
            """{ .reg .b16 l, h;
            cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; mov.b32 $0, {l, h}; }""",
            "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b16 l, h;
            cvt.rn.satfinite.e5m2x2.f32 l, $2, $1; cvt.rn.satfinite.e5m2x2.f32 h, $4, $3; mov.b32 $0, {l, h}; }""",
            "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _along_rows(magnitudes, low, high, WARPS: tl.constexpr, IS_BF16: tl.constexpr, SCHEME: tl.constexpr):
    """(words of codes (32 WARPS, 16), codes of scales (32 WARPS, 2)) of blocks of 32 columns.

    The first axis is (8 registers, WARPS, 4 lanes). Two of a lane's rows make a pair before lanes are compared.
    """
    LEAD: tl.constexpr = 32 * WARPS
    own = largest_halves(tl.reshape(magnitudes, (LEAD, 2, 4, 4)), 3, SCHEME.has_ptx)
    first, second = tl.split(tl.permute(tl.reshape(own, (2, 4, 4 * WARPS, 2, 4)), (1, 2, 3, 4, 0)))
    largest = largest_halves(crossed(first, second, SCHEME.has_ptx), 3, SCHEME.has_ptx)
    by_first, by_second, code, other = _scales(largest, IS_BF16, SCHEME)
    by = tl.reshape(tl.permute(tl.join(by_first, by_second), (3, 0, 1, 2)), (LEAD, 2, 1)) * unit_of(SCHEME)
    code = tl.reshape(tl.permute(tl.join(code, other), (3, 0, 1, 2)), (LEAD, 2))
    a, c = tl.split(tl.reshape(tl.reshape(low, (LEAD, 2, 16)) * by, (LEAD, 16, 2)))
    b, d = tl.split(tl.reshape(tl.reshape(high, (LEAD, 2, 16)) * by, (LEAD, 16, 2)))
    return word_of_codes(a, b, c, d, SCHEME), code


@triton.jit
def patchwise(tile, WARPS: tl.constexpr):
    """(8 registers, WARPS, 4 lanes) x 32 as (WARPS, rows of a patch, 32): nothing moves."""
    return tl.reshape(tl.permute(tl.reshape(tile, (8, WARPS, 4, 32)), (1, 2, 0, 3)), (WARPS, 32, 32))


@triton.jit
def words_of_rows(v, WARPS: tl.constexpr, SCHEME: tl.constexpr):
    """Codes of four neighbouring rows in a word: (WARPS, 32, 32) -> (WARPS, 8, 32)."""
    even, odd = tl.split(tl.permute(tl.reshape(v, (WARPS, 8, 2, 2, 32)), (0, 1, 4, 2, 3)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return word_of_codes(a, b, c, d, SCHEME)


@triton.jit
def along_columns(magnitudes, low, high, WARPS: tl.constexpr, IS_BF16: tl.constexpr, SCHEME: tl.constexpr):
    """(words of codes (WARPS, 8, 64), codes of scales (WARPS, 64)) of blocks of 32 rows."""
    largest = largest_halves(patchwise(magnitudes, WARPS), 1, SCHEME.has_ptx)
    by_low, by_high, code, other = _scales(largest, IS_BF16, SCHEME)
    by_low, by_high = by_low * unit_of(SCHEME), by_high * unit_of(SCHEME)
    even = words_of_rows(patchwise(low, WARPS) * by_low[:, None, :], WARPS, SCHEME)
    odd = words_of_rows(patchwise(high, WARPS) * by_high[:, None, :], WARPS, SCHEME)
    words = tl.reshape(tl.join(even, odd), (WARPS, 8, 64))
    return words, tl.reshape(tl.join(code, other), (WARPS, 64))


@triton.jit
def _store_scales(
    scale, code, row, block, blocks, ROWS: tl.constexpr, BLOCKS: tl.constexpr, TILED: tl.constexpr
):
    """Codes (ROWS, BLOCKS) from a row and a block on."""
    rows = row + tl.arange(0, ROWS)[:, None]
    columns = block + tl.arange(0, BLOCKS)[None, :]
    tl.store(scale + scale_place(rows, columns, blocks, TILED), code.to(tl.uint8))


@triton.jit
def mx_pairs_kernel(
    x, codes, scale, transposed, transposed_scale, rows, columns,
    SCHEME: tl.constexpr, TILED: tl.constexpr, BOTH: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    BATCH: tl.constexpr,
):  # fmt: skip
    """As `mx_both_kernel`, for bfloat16 and float16, and for elements below 8 bits too; without BOTH the transpose alone.

    Grid: rows of a band, columns, bands; num_warps is DOWN * ACROSS. BATCH: bands of one matrix after the other; neither with
    BOTH nor TILED.
    """
    WARPS: tl.constexpr = DOWN * ACROSS
    band = tl.program_id(2)
    if BATCH:
        bands = rows // (32 * DOWN * tl.num_programs(0))
        matrix = (band // bands).to(tl.int64)
        band = band % bands
        x += matrix * rows * columns
        transposed += matrix * rows * columns
        transposed_scale += matrix * columns * (rows // 32)
    row = (band * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * (32 * DOWN)
    column = tl.program_id(1).to(tl.int64) * (64 * ACROSS)
    # Offsets inside a program fit 32 bits; those of its registers are multiples of one stride.
    i = tl.arange(0, 32 * WARPS)
    patch = (i // 4) % WARPS
    across = patch % ACROSS * 64
    lane = i % 4 * 8 + patch // ACROSS * 32
    turn = (i // (4 * WARPS)).to(tl.int64)
    pairs = columns // 2
    at = (x + (row * columns + column)).to(tl.pointer_type(tl.int32), bitcast=True)
    at = at + (lane * pairs + across // 2)[:, None] + tl.arange(0, 32)[None, :] + (turn * pairs)[:, None]
    _both_of_tile(
        tl.load(at), codes, scale, transposed, transposed_scale, row, column, lane, across, turn, rows, columns,
        x.dtype.element_ty == tl.bfloat16, SCHEME, TILED, BOTH, DOWN, ACROSS,
    )  # fmt: skip


@triton.jit
def _both_of_tile(
    w, codes, scale, transposed, transposed_scale, row, column, lane, across, turn, rows, columns,
    IS_BF16: tl.constexpr, SCHEME: tl.constexpr, TILED: tl.constexpr, BOTH: tl.constexpr, DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
):  # fmt: skip
    """Both outputs of a tile of words; without BOTH the second alone."""
    WARPS: tl.constexpr = DOWN * ACROSS
    WORDS: tl.constexpr = tl.pointer_type(tl.int32)
    quads = columns // 4
    magnitudes, low, high = w & MAGNITUDES, low_float(w, IS_BF16), high_float(w, IS_BF16)

    if BOTH:
        result, code = _along_rows(magnitudes, low, high, WARPS, IS_BF16, SCHEME)
        # Stores of 8 bytes, as lanes have them: wider ones would go through shared memory.
        to = (codes + (row * columns + column)).to(WORDS, bitcast=True)
        to = to + (lane * quads + across // 4)[:, None] + tl.max_contiguous(tl.arange(0, 16), [2])[None, :]
        tl.store(to + (turn * quads)[:, None], result)
        code = tl.permute(tl.reshape(code, (8, DOWN, ACROSS, 4, 2)), (1, 3, 0, 2, 4))
        code = tl.reshape(code, (32 * DOWN, 2 * ACROSS))
        _store_scales(scale, code, row, column // 32, columns // 32, 32 * DOWN, 2 * ACROSS, TILED)

    result, code = along_columns(magnitudes, low, high, WARPS, IS_BF16, SCHEME)
    result = tl.reshape(
        tl.permute(tl.reshape(result, (DOWN, ACROSS, 8, 64)), (1, 3, 0, 2)), (64 * ACROSS, 8 * DOWN)
    )
    to = (transposed + (column * rows + row)).to(WORDS, bitcast=True)
    to = to + tl.arange(0, 64 * ACROSS)[:, None] * (rows // 4) + tl.arange(0, 8 * DOWN)[None, :]
    tl.store(to, result)
    code = tl.trans(tl.reshape(code, (DOWN, 64 * ACROSS)))
    _store_scales(transposed_scale, code, column, row // 32, rows // 32, 64 * ACROSS, DOWN, TILED)


# Scales of a program: 128 rows of 8 words.
TILE = 4096
ROWS, WORDS = tl.constexpr(128), tl.constexpr(8)


@triton.jit
def untile_kernel(tiled, plain, tiled2, plain2, rows, words, rows2, words2, first, TILE: tl.constexpr):
    """Scales of `rows` x 4 * `words`, then of the second matrix: `first` programs for the first one, of TILE scales each."""
    program = tl.program_id(0)
    if program < first:
        _untile(tiled, plain, rows, words, program)
    else:
        _untile(tiled2, plain2, rows2, words2, program - first)


@triton.jit
def _untile(tiled, plain, rows, words, program):
    """128 rows of 8 words of four scales; rows are a multiple of 128."""
    across = tl.cdiv(words, WORDS)
    row = program // across * ROWS + tl.arange(0, ROWS)[:, None]
    word = program % across * WORDS + tl.arange(0, WORDS)[None, :]
    inside = word < words
    source = tiled.to(tl.pointer_type(tl.int32), bitcast=True)
    target = plain.to(tl.pointer_type(tl.int32), bitcast=True)
    # Word (row % 32) * 4 + row // 32 of the tile; see `scale_places`.
    at = ((row >> 7) * words + word) * 128 + (row & 31) * 4 + ((row >> 5) & 3)
    tl.store(target + (row * words + word), tl.load(source + at, mask=inside, other=0), mask=inside)


def untile(call: Call, tiled: str, plain: str, tiled2: str, plain2: str) -> None:
    """Fill two plain matrices of scales, sides multiples of 128 and 4, from tiled ones of the same size."""
    (rows, blocks), (rows2, blocks2) = shapes = [call.tensors[name].shape for name in (plain, plain2)]
    programs = [rows // 128 * -(-blocks // 32) for rows, blocks in shapes]
    tail = (rows, blocks // 4, rows2, blocks2 // 4, programs[0], TILE)
    call.launch(CompiledLaunch(untile_kernel, sum(programs), tail, 4), (tiled, plain, tiled2, plain2))


GROUP = tl.constexpr(32)


@triton.jit
def _codes8(y, SCHEME: tl.constexpr):
    """uint8 codes of scaled float32 by the conversion instruction, which the interpreter does not have."""
    if not SCHEME.has_ptx:
        return encode(y, None, SCHEME.element).to(tl.uint8)
    elif SCHEME.fast_path == "e4m3":
        return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return y.to(tl.float8e5).to(tl.uint8, bitcast=True)


@triton.jit
def mx_both_kernel(
    x, codes, scale, transposed, transposed_scale, rows, columns,
    SCHEME: tl.constexpr, TILED: tl.constexpr, WIDE: tl.constexpr, WARPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """codes (rows, columns) with scales along columns, transposed (columns, rows) with scales along rows.

    TILED: scales lie in the tiles of `reference.quantize.stored`.
    """
    TURNS: tl.constexpr = 512 // COLUMNS
    REGISTERS: tl.constexpr = GROUP // TURNS
    ROWS: tl.constexpr = GROUP * WARPS
    tiles = columns // COLUMNS
    down, across = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    i = tl.arange(0, ROWS)
    row = down * ROWS + ((i // TURNS) % WARPS) * GROUP + (i % TURNS) * REGISTERS + i // (TURNS * WARPS)
    column = across * COLUMNS + tl.arange(0, COLUMNS)
    wide_row = row.to(tl.int64) if WIDE else row
    at = wide_row[:, None] * columns + column[None, :]
    v = widened(tl.load(x + at))

    groups = tl.reshape(v, (ROWS * COLUMNS // GROUP, GROUP))
    code = power_scale(absmax(groups, False, SCHEME.has_ptx), SCHEME.level, True)
    result = _codes8(groups * inverse_power(code), SCHEME)
    tl.store(codes + at, tl.reshape(result, (ROWS, COLUMNS)))
    block = across * (COLUMNS // GROUP) + tl.arange(0, COLUMNS // GROUP)
    place = scale_place(wide_row[:, None], block[None, :], columns // GROUP, TILED)
    tl.store(scale + place, tl.reshape(code, (ROWS, COLUMNS // GROUP)).to(tl.uint8))

    # (registers, warps, lanes, columns) -> (warps, rows of a group, columns): nothing moves.
    w = tl.reshape(
        tl.permute(tl.reshape(v, (REGISTERS, WARPS, TURNS, COLUMNS)), (1, 2, 0, 3)), (WARPS, GROUP, COLUMNS)
    )
    largest = bits_of(tl.reduce(tl.abs(w), 1, _nan_max)) & 0x7FFFFFFF
    code_t = power_scale(largest, SCHEME.level, True)
    made_t = _codes8(w * inverse_power(code_t)[:, None, :], SCHEME)
    made_t = tl.reshape(tl.permute(made_t, (2, 0, 1)), (COLUMNS, ROWS))
    wide_column = column.to(tl.int64) if WIDE else column
    out = wide_column[:, None] * rows + (down * ROWS + tl.arange(0, ROWS))[None, :]
    tl.store(transposed + out, made_t)
    block_t = down * WARPS + tl.arange(0, WARPS)
    place_t = scale_place(wide_column[None, :], block_t[:, None], rows // GROUP, TILED)
    tl.store(transposed_scale + place_t, code_t.to(tl.uint8))


@triton.jit
def _nan_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def given_both_kernel(
    x, codes, transposed, scale, transposed_scale, rows, columns,
    SCHEME: tl.constexpr, ONE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Codes in both layouts, under a given scale each; ONE: it is the same scale. Programs go down a band of rows first."""
    down, across = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0), tl.program_id(1)
    row, column = down * ROWS + tl.arange(0, ROWS), across * COLUMNS + tl.arange(0, COLUMNS)
    wide_row = row.to(tl.int64) if WIDE else row
    wide_column = column.to(tl.int64) if WIDE else column
    at = wide_row[:, None] * columns + column[None, :]
    v = widened(tl.load(x + at))
    result = _codes8(v * _inverse_of(scale, SCHEME), SCHEME)
    tl.store(codes + at, result)
    if not ONE:
        result = _codes8(v * _inverse_of(transposed_scale, SCHEME), SCHEME)
    tl.store(transposed + wide_column[:, None] * rows + row[None, :], tl.trans(result))


@triton.jit
def _inverse_of(scale, SCHEME: tl.constexpr):
    """1 / scale as default schemes divide by a given scale."""
    return tl.div_rn(1.0, floored(loaded_scale(tl.load(scale), SCHEME.level), SCHEME.level))


# The MX kernel of float32, and that of pairs: warps down and across, programs down a band (which write the same lines of the
# transposed codes), registers of a thread by bits of a code (with 80 a multiprocessor has 24 warps; smaller codes take more).
WARPS, COLUMNS = 4, 64
DOWN, ACROSS, BAND = 4, 2, 2
REGISTERS = {8: 80, 6: 96, 4: 128}
# Elements below 8 bits.
SMALLER = ("e2m3", "e3m2", "e2m1")
PLAIN_ROWS, PLAIN_COLUMNS, PLAIN_WARPS, PLAIN_BAND = 64, 64, 2, 4
# Names of scales of rows and of columns, of their tiles, and of all that a caller's pair of scales may have.
SCALES, TILES = ("scale", "transposed_scale"), ("tiles", "transposed_tiles")
GIVEN = ("scale", "outer", "zero", "transposed_scale", "transposed_outer", "transposed_zero")
# Sides beyond this would overflow offsets and the grid of the MX kernels.
LONGEST = 2**22


def covers_mx(x: torch.Tensor, rule: SchemeConstants) -> bool:
    """Whether an MX kernel serves: a scheme of `is_mx`, sides that tiles divide, whole words. x: a matrix, or a batch."""
    height, width = (32 * WARPS, COLUMNS) if x.dtype == torch.float32 else (32 * DOWN, 64)
    whole = x.shape[-2] % height == 0 and x.shape[-1] % width == 0
    whole &= max(prod(x.shape[:-1]), x.shape[-1]) <= LONGEST
    return whole and is_mx(x, rule) and x.data_ptr() % 4 == 0


def is_mx(x: torch.Tensor, rule: SchemeConstants) -> bool:
    """Whether scales are powers of two and elements 8-bit floats, or smaller ones of 16-bit inputs."""
    level = rule.level.value
    paths = (*HARDWARE, *SMALLER) if x.dtype != torch.float32 else HARDWARE
    mx = rule.power_of_two and rule.fast_path.value in paths and level.simple_power
    # From 2**2 on no multiplier is subnormal.
    return bool(mx) and level.target_exponent >= 2


def covers_given(x: torch.Tensor, rule: SchemeConstants) -> bool:
    """Whether the kernel for given scales serves: an 8-bit float, sides that tiles divide."""
    plain = rule.fast_path.value in ("e4m3", "e5m2") and not rule.power_of_two
    whole = x.shape[0] % PLAIN_ROWS == 0 and x.shape[1] % PLAIN_COLUMNS == 0
    return plain and whole and max(x.shape) < LONGEST


def mx_columns(x: torch.Tensor, rule: SchemeConstants) -> Call:
    """Run the kernel of pairs for the transposed codes and their plain scales alone; for a batch those of each matrix, one
    after the other in one matrix."""
    call, (*batch, rows, columns) = Call({"x": x}, words=("x",)), x.shape
    call.allocate("transposed", (prod(batch) * columns, rows), torch.uint8)
    call.allocate("transposed_scale", (prod(batch) * columns, rows // 32), torch.uint8)
    _mx_pairs(call, SCALES, rule, False, both=False)
    return call


def mx_both(x: torch.Tensor, rule: SchemeConstants, tiled: bool = False, **tuning: int) -> Call:
    """Run an MX kernel on a contiguous matrix; it makes codes, scale, transposed and transposed_scale.

    tiled: the scales are flat, in the layout of `reference.quantize.stored`. Plain scales are made of tiled ones where
    tiles have no padding; see `untile`. tuning: see `_mx_floats` and `_mx_pairs`; results do not depend on it.
    """
    call, (rows, columns) = Call({"x": x}, words=("x",)), x.shape
    _allocate_codes(call, x)
    for name, shape in zip(SCALES, ((rows, columns // 32), (columns, rows // 32)), strict=True):
        call.allocate(name, *(tiled_buffer(shape) if tiled else (shape, torch.uint8)))
    launch = _mx_floats if x.dtype == torch.float32 else _mx_pairs
    if tiled or x.shape[0] % 128 or x.shape[1] % 128:
        launch(call, SCALES, rule, tiled, **tuning)
        return call
    for name, tiles in zip(SCALES, TILES, strict=True):
        call.allocate(tiles, call.tensors[name].shape, torch.uint8)
    launch(call, TILES, rule, True, **tuning)
    untile(call, TILES[0], SCALES[0], TILES[1], SCALES[1])
    return call


def _mx_floats(
    call: Call, scales: tuple[str, str], rule: SchemeConstants, tiled: bool, warps: int = WARPS, columns: int = COLUMNS
) -> None:  # fmt: skip
    """float32 in tiles of 32 * warps rows and `columns` columns. scales: names of the tensors that get them."""
    x = call.tensors["x"]
    grid = (x.shape[0] // (32 * warps)) * (x.shape[1] // columns)
    tail = (*x.shape, rule, tiled, x.numel() >= 2**31, warps, columns)
    call.launch(
        CompiledLaunch(mx_both_kernel, grid, tail, warps), ("x", "codes", scales[0], "transposed", scales[1])
    )


def _mx_pairs(
    call: Call,
    scales: tuple[str, str],
    rule: SchemeConstants,
    tiled: bool,
    down: int = DOWN,
    across: int | None = None,
    band: int = BAND,
    registers: int | None = None,
    both: bool = True,
) -> None:
    """16-bit floats in tiles of 32 * down rows and 64 * across columns, down * across warps.

    band: programs that follow each other down the rows, at most. registers: of a thread, at most; else those of `REGISTERS`.
    """
    *batch, height, width = call.tensors["x"].shape
    across = across or gcd(width // 64, ACROSS)
    tall = height // (32 * down)
    band = gcd(tall, band)
    grid = (band, width // (64 * across), tall // band * prod(batch))
    tail = (height, width, rule, tiled, both, down, across, bool(batch))
    registers = registers or REGISTERS[rule.bits]
    kernel = CompiledLaunch(mx_pairs_kernel, grid, tail, down * across, maxnreg=registers)
    call.launch(kernel, ("x", "codes", scales[0], "transposed", scales[1]))


def _allocate_codes(call: Call, x: torch.Tensor) -> None:
    call.allocate("codes", x.shape, torch.uint8)
    call.allocate("transposed", x.shape[::-1], torch.uint8)


def given_both(x: torch.Tensor, rule: SchemeConstants, scales: tuple[Any, Any]) -> Call:
    """Run the kernel for given scales, which may be one tensor; it makes codes and transposed."""
    height, width = x.shape
    tall = height // PLAIN_ROWS
    band = gcd(tall, PLAIN_BAND)
    grid = (band, width // PLAIN_COLUMNS, tall // band)
    call = Call({"x": x, **dict.fromkeys(GIVEN), **dict(zip(SCALES, scales, strict=True))})
    _allocate_codes(call, x)
    # Codes of float32 that leave in both layouts: see `host._shares_codes`.
    one = scales[0] is scales[1] and x.dtype != torch.float32
    tail = (height, width, rule, one, x.numel() >= 2**31, PLAIN_ROWS, PLAIN_COLUMNS)
    pointers = ("x", "codes", "transposed", "scale", "transposed_scale")
    call.launch(CompiledLaunch(given_both_kernel, grid, tail, PLAIN_WARPS), pointers)
    return call
