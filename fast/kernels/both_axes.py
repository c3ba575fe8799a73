"""Blocks of 32 along rows and blocks of 32 down columns of a 16-bit matrix from one read, both in the matrix's layout.

A program is a warp with 32 rows of 64 columns; a lane has eight neighbouring columns of eight rows, 16 bytes of each:

    row  0      lane 0 | lane 1  | ... | lane 7        a row's block of 32: 4 lanes
    row  1      lane 8 | lane 9  | ... | lane 15       a column's block of 32: 4 lanes, 8 registers of each
    ...
    row  4      lane 0 | ...

So neither maximum leaves the warp, nothing is transposed, and no barrier or shared memory is needed. Two neighbours share a
register until they are stored: bfloat16 is rounded in pairs (`rounded_pairs`). float16 has more significant bits than that
takes and a range that scales leave; it goes through float32, and so does everything in the interpreter, which knows no
instructions.

Pairs of bfloat16 are rounded to float elements under powers of two by 16-bit arithmetic alone. A word has two neighbouring
elements. With a scale 2**e, and u the power of two of a scaled magnitude y (at least the format's smallest normal number), a
format of m mantissa bits keeps multiples of u * 2**-m. bfloat16 has 8 significant bits, so the sum y + u * 2**(7 - m), which
lies between that addend and twice it, is rounded to such a multiple, to nearest even; less the addend it is the rounded
element, exactly, and times 2**e its value, rounded once where it is subnormal. That is eight instructions for two elements,
and neither codes nor float32 in between.

What is scaled below 2**-126 is rounded on the way; it is far under half of the smallest element before and after, and becomes 0
with its sign.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from fast.kernels.bits import MAGNITUDE, bits_of, high_float, low_float, widened
from fast.kernels.hadamard import values_of
from fast.kernels.rowwise_colwise.mx import (
    EXPONENTS,
    LOW_BYTES,
    MAGNITUDES,
    inverse_power,
    unit_of,
    word_of_codes,
)
from fast.kernels.rules.scales import power_scale, power_value
from fast.kernels.rules.statistics import larger
from fast.kernels.scheme.constants import constants_of
from fast.kernels.scheme.fast_path_rules import OCP, fast_path_of
from fast.kernels.sm90.fp4_fp6 import larger_pair
from fast.launch.launcher import FLOAT_NAMES, Call, CompiledLaunch, interpreted
from reference import Quantized
from reference.schemes.schemes import Scheme, scheme_of

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
    result = rounded_pairs(tl.reshape(w, (ROWS, BLOCKS, 16)), m, s, limits, signs, SATURATES, SCHEME)
    tl.store(
        (along_rows + first).to(WORDS, bitcast=True) + at,
        tl.reshape(result, (ROWS, COLUMNS // 2)),
        mask=inside,
    )

    m, s, limits, signs = factors_of(tl.reduce(magnitudes, 0, larger_pair, keep_dims=True), SCHEME)
    if CODES:
        y = scaled_pairs(w, m, signs, SCHEME)
        low, high = low_float(y, True), high_float(y, True)
        _store_codes(codes + first, low, high, strip, tile, columns, SCHEME, MASKED, ROWS, COLUMNS)
        both = scale_codes(s)
        _store_scales(scale, both & 0xFF, both >> 16, strip, tile, columns, MASKED, COLUMNS)
    else:
        result = rounded_pairs(w, m, s, limits, signs, SATURATES, SCHEME)
        tl.store((along_columns + first).to(WORDS, bitcast=True) + at, result, mask=inside)


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
    result = _values(blocks, _largest(blocks, 2, SCHEME.has_ptx), SCHEME)
    tl.store(along_rows + first + at, tl.reshape(result, (ROWS, COLUMNS)), mask=inside)

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


def _rounding(saturates: str) -> tl.constexpr:
    """The value of a pair $1 under its blocks' multipliers $2, scales $3, limits $4 and signs $5.

    $6: the smallest normal number, $7: 2**(7 - m), $8: -2**(7 - m), $9: the largest number.
    """
    return tl.constexpr(
        f"""{{ .reg .b32 y, u;
        and.b32 y, $1, 0x7FFF7FFF; mul.rn.bf16x2 y, y, $2; {saturates}
        and.b32 u, y, 0x7F807F80; max.u16x2 u, u, $6;
        fma.rn.bf16x2 y, u, $7, y; fma.rn.bf16x2 y, u, $8, y;
        mul.rn.bf16x2 y, y, $3; min.u16x2 y, y, $4;
        lop3.b32 $0, $1, $5, y, 0xEA; }}"""
    )


INSIDE, SATURATING = _rounding(""), _rounding("min.u16x2 y, y, $9;")


@triton.jit
def factors_of(largest, SCHEME: tl.constexpr):
    """(multipliers, scales, limits, signs) of pairs of blocks, from pairs of their largest magnitudes; all pairs.

    Multiplier and scale are 2**-e and 2**e, NaN where the magnitude is not finite (0 times a finite one plus a number is that
    number). A limit is the largest finite number, or the NaN that leaves; signs are the sign bit, or 0 where NaN leaves. With E
    the exponent field of a magnitude after the record's carry, 2**-e has the field 254 + target - E, at most 254, and 2**e what
    is missing to 254, or is 2**-127.
    """
    CARRY: tl.constexpr = (SCHEME.level.carry >> 16) * 0x10001
    TOP: tl.constexpr = ((254 + SCHEME.level.target_exponent) << 7) * 0x10001
    SIGNED: tl.constexpr = TOP - 0x100000000 if TOP >= 0x80000000 else TOP
    return tl.inline_asm_elementwise(
        """{ .reg .b32 m, s, t, z;
        mov.b32 z, 0; mov.b32 t, 0x7F007F00; min.u16x2 m, $4, t; sub.u32 s, t, m;
        mov.b32 t, 0x00400040; max.u16x2 s, s, t;
        fma.rn.bf16x2 $0, $5, z, m; fma.rn.bf16x2 s, $5, z, s; mov.b32 $1, s;
        mov.b32 t, 0x7FC07FC0; min.u16x2 t, s, t; mov.b32 z, 0x7F7F7F7F; max.u16x2 $2, t, z;
        add.u32 s, s, 0x00010001; lop3.b32 $3, s, 0x80008000, 0, 0x0C; }""",
        "=&r,=&r,=&r,=&r,r,r", [SIGNED - ((largest + CARRY) & EXPONENTS), largest],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def scale_codes(scales):
    """Codes of pairs of scales in e8m0, each in a half of a word: exponent fields, 255 for NaN."""
    return (scales >> 7) & LOW_BYTES


@triton.jit
def rounded_pairs(words, multipliers, scales, limits, signs, SATURATES: tl.constexpr, SCHEME: tl.constexpr):
    """Values of pairs under the factors of their blocks. SATURATES: scaled elements may lie beyond the largest number."""
    E: tl.constexpr = SCHEME.element
    LEAST: tl.constexpr = ((E.emin + 127) << 7) * 0x10001
    UNIT: tl.constexpr = ((134 - E.mantissa) << 7) * 0x10001
    MINUS: tl.constexpr = UNIT - 0x7FFF8000
    TOP: tl.constexpr = (E.max_bits >> 16) * 0x10001
    text: tl.constexpr = SATURATING if SATURATES else INSIDE
    return tl.inline_asm_elementwise(
        text, "=r,r,r,r,r,r,r,r,r,r", [words, multipliers, scales, limits, signs, LEAST, UNIT, MINUS, TOP],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def scaled_pairs(words, multipliers, signs, SCHEME: tl.constexpr):
    """Pairs times the multipliers of their blocks; in blocks without a scale NaN, or 0 where the element has no NaN."""
    if SCHEME.bits == 8:
        return tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [words, multipliers], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        # Each half's sign bit in all of its bits.
        return tl.inline_asm_elementwise(
            "{ .reg .b32 y, m; prmt.b32 m, $3, $3, 0xBB99; mul.rn.bf16x2 y, $1, $2; and.b32 $0, y, m; }", "=r,r,r,r",
            [words, multipliers, signs], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


#: Elements of a block, which divide both sides of a matrix.
BLOCK = 32
HALVES = (torch.bfloat16, torch.float16)
#: Offsets inside a strip of rows are 32 bits.
LONGEST = 2**25
#: Rules by which the exponent field of a maximum decides.
RULES = ("floor", "ceil", "rceil", "even")
POINTERS = ("x", "rows", "columns", "codes", "scale")


def covers(x: torch.Tensor, scheme: Scheme) -> bool:
    """Whether the kernel serves: a contiguous matrix of 16-bit floats in whole blocks of 32 both ways, and MX floats."""
    if x.dtype not in HALVES or x.dim() != 2 or not x.is_contiguous() or not x.numel():
        return False
    whole = x.shape[0] % BLOCK == 0 and x.shape[1] % BLOCK == 0 and x.shape[1] <= LONGEST
    return whole and _serves(scheme)


@lru_cache(maxsize=256)
def _serves(scheme: Scheme) -> bool:
    """Whether elements are the OCP formats of default schemes, rounded to nearest, under e8m0 scales.

    From a target of 4 on no multiplier is subnormal.
    """
    scale, nearest = scheme.scale, scheme.rounding == "nearest_even" and scheme.overflow == "saturate"
    powers = scale.rule in RULES and scale.storage == "float8_e8m0fnu" and scale.block == BLOCK
    plain = scheme.dequantize == "float32" and scheme.outer is None and scheme.zero is None
    return powers and plain and scale.target >= 4 and fast_path_of(scheme, nearest) in OCP.values()


@lru_cache(maxsize=256)
def _saturates(scheme: Scheme) -> bool:
    """Whether scaled elements lie beyond the largest number: not under scales that are rounded up."""
    scale = scheme.scale
    return not (scale.rule in ("ceil", "rceil") and scale.target <= scheme.format.max)


def both_values(
    x: torch.Tensor, record: str | Scheme, key: Any = None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Values of the blocks along rows, and of those along columns, in x's dtype and layout; None where the kernel does not
    serve. key: of the call, see `dispatch`."""
    scheme = scheme_of(record)
    if not covers(x, scheme):
        return None
    call = _launched(x, scheme, codes=False)
    result: tuple[torch.Tensor, torch.Tensor] = call.result(("rows", "columns"), key, record)
    return result


def values_and_codes(
    x: torch.Tensor, record: str | Scheme, key: Any = None
) -> tuple[torch.Tensor, Quantized] | None:
    """Values of the blocks along rows, and codes of those along columns, as `quantize` has them for axis 0."""
    scheme = scheme_of(record)
    if not covers(x, scheme):
        return None
    call = _launched(x, scheme, codes=True)
    stored = Quantized("codes", "scale", None, None, tuple(x.shape), 0, scheme)  # type: ignore[arg-type]
    result: tuple[torch.Tensor, Quantized] = call.result(("rows", stored), key, record)
    return result


def _launched(x: torch.Tensor, scheme: Scheme, *, codes: bool) -> Call:
    """The call whose buffers are "rows", and "columns" or "codes" and "scale"."""
    call, (height, width) = Call({"x": x}, words=("x",)), x.shape
    call.allocate("rows", x.shape, x.dtype)
    if codes:
        call.allocate("codes", x.shape, torch.uint8)
        call.allocate("scale", (height // BLOCK, width), torch.uint8)
    else:
        call.allocate("columns", x.shape, x.dtype)
    rule = constants_of(scheme, FLOAT_NAMES[x.dtype], not interpreted())
    grid = height // ROWS * -(-width // COLUMNS)
    tail = (width, rule, codes, _saturates(scheme), width % COLUMNS != 0, ROWS, COLUMNS)
    call.launch(CompiledLaunch(values_kernel, grid, tail, WARPS), POINTERS)
    return call


__all__ = ["both_values", "covers", "values_and_codes"]
