"""Blocks of 16-bit floats mixed by a Hadamard transform, scaled, and rounded by words drawn in place, from one read.

Along rows, a number of a tile is a word of four neighbouring elements, which four random words of one counter round. So no
word moves, and two stages of the butterfly are arithmetic in registers; the others ask a neighbouring lane.

Down columns blocks stay where they lie, so that nothing is transposed. A thread has all elements of the columns that it works
on. So the butterfly and the maximum are arithmetic in registers, every row is read and written by neighbouring threads, and
four random words, which belong to four neighbouring elements of a row of the transposed matrix, are four rows of one column
here.

Elements come one tensor for each place in a block (or in a word), which has the shape of the scales or broadcasts with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod, sqrt
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from fast.kernels.bits import (
    INFINITY,
    MAGNITUDE,
    SIGN,
    bits_of,
    float_of,
    high_float,
    is_nan,
    low_float,
    narrow,
    read,
    widened,
)
from fast.kernels.rules.statistics import larger
from fast.kernels.rules.values import combined, element_codes, reciprocal, unscaled, values
from fast.kernels.scheme.constants import BlockOp, SchemeConstants, block_op, constants_of
from fast.kernels.scheme.fast_path_rules import is_fast_stochastic, is_under_outer
from fast.kernels.sm90.bf16x2 import rounded_once
from fast.kernels.tile.fast_codes import finished, multiplier, rounded_values
from fast.kernels.tile.quantize import load_outer, stochastic_codes
from fast.kernels.tile.scales import choose_scales
from fast.launch.launcher import FLOAT_NAMES, UNFUSED, interpreted
from reference import SCHEMES, Quantized
from reference.formats.storage import storage_dtype
from reference.layers.hadamard import signs
from reference.schemes.schemes import Scheme

# Random words where they are used: those of `reference.random_bits`, four neighbouring elements at a time.

FIRST, SECOND = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
WEYL_FIRST, WEYL_SECOND = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)


@triton.jit
def four_words(index, seed_low, seed_high, stream, WIDE: tl.constexpr):
    """The words of elements 4 index to 4 index + 3, four tensors. WIDE: index is int64 and may be 2**32 or more.

    `tl.philox` makes each product twice, for its high and its low half; here one instruction makes both.
    """
    c0 = index.to(tl.uint32)
    c3 = c0 * 0
    c1 = (index >> 32).to(tl.uint32) if WIDE else c3
    return philox_words(
        c0, c1, c3 + stream.to(tl.uint32), c3, seed_low.to(tl.uint32), seed_high.to(tl.uint32)
    )


@triton.jit
def philox_words(c0, c1, c2, c3, k0, k1):
    """Philox 4x32-10 of counters and a key, uint32: four words of each counter."""
    for _ in tl.static_range(10):
        first, second = c0.to(tl.uint64) * FIRST, c2.to(tl.uint64) * SECOND
        c0, c2 = (second >> 32).to(tl.uint32) ^ c1 ^ k0, (first >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = second.to(tl.uint32), first.to(tl.uint32)
        k0, k1 = k0 + WEYL_FIRST, k1 + WEYL_SECOND
    return c0, c1, c2, c3


@triton.jit
def beside(index, loaded, HAS_PTX: tl.constexpr):
    """The same int32 index, in the threads that have `loaded` (int32).

    What is computed of it is computed there too. Otherwise Triton computes words in the layout of `arange`, and moves each
    through shared memory.
    """
    if HAS_PTX:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r,r", [index, loaded], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return index


@triton.jit
def largest_of(v, COUNT: tl.constexpr, FINITE_ONLY: tl.constexpr, HAS_PTX: tl.constexpr):
    """Pattern of the largest magnitude of a tuple, element by element. FINITE_ONLY: NaN and infinity count as 0."""
    if HAS_PTX and not FINITE_ONLY:
        result = tl.abs(v[0])
        for i in tl.static_range(1, COUNT):
            result = larger(result, tl.abs(v[i]))
        return bits_of(result) & MAGNITUDE
    else:
        largest = _magnitude(v[0], FINITE_ONLY)
        for i in tl.static_range(1, COUNT):
            largest = tl.maximum(largest, _magnitude(v[i], FINITE_ONLY))
        return largest


@triton.jit
def _magnitude(v, FINITE_ONLY: tl.constexpr):
    result = bits_of(v) & MAGNITUDE
    if FINITE_ONLY:
        result = tl.where(result < INFINITY, result, 0)
    return result


@triton.jit
def factor_of(s, scale_code, prepared, outer, SCHEME: tl.constexpr):
    """What elements are multiplied by before they are rounded."""
    if SCHEME.power_of_two or SCHEME.under_outer:
        return multiplier(s, scale_code, prepared, SCHEME)
    else:
        return reciprocal(s, outer, SCHEME)


@triton.jit
def codes_of(v, s, factor, outer, bits, SCHEME: tl.constexpr, DRAWS: tl.constexpr):
    """int32 codes. DRAWS: scaled elements are rounded stochastically by `stochastic_codes`; else by the rules."""
    if DRAWS:
        result = stochastic_codes(v * factor, bits, SCHEME.element)
        return tl.where(is_nan(s), SCHEME.poison_code, result)
    else:
        return element_codes(v, s, outer, None, bits, SCHEME)


@triton.jit
def values_of(v, s, factor, outer, bits, SCHEME: tl.constexpr, DRAWS: tl.constexpr, DTYPE: tl.constexpr):
    """What the codes stand for, in a dtype; NaN in poisoned blocks."""
    c = combined(s, outer, SCHEME, "float32")
    if not SCHEME.has_ptx:
        result = codes_of(v, s, factor, outer, bits, SCHEME, DRAWS)
        return narrow(values(result, c, None, SCHEME, "float32"), DTYPE, True)
    elif SCHEME.fast_path != "" and not DRAWS:
        value = rounded_values(v, factor, s, None, SCHEME)
    else:
        value = unscaled(codes_of(v, s, factor, outer, bits, SCHEME, DRAWS), None, SCHEME)
    return finished(value * c, c, DTYPE)


# The butterfly of `reference.layers.hadamard` on float32 values in registers: every addition in the declared order.


@triton.jit
def mixed_tuple(v, LENGTH: tl.constexpr, SIGNS: tl.constexpr, FACTOR: tl.constexpr):
    """A tuple of LENGTH tensors, the elements of blocks one by one: sums and differences, times FACTOR.

    SIGNS: bit i where element i is negated first.
    """
    result = ()
    for i in tl.static_range(LENGTH):
        result += (negated(v[i], (SIGNS >> i) & 1),)
    for stage in tl.static_range(16):
        if (1 << stage) < LENGTH:
            result = _stage(result, LENGTH, stage)
    out = ()
    for i in tl.static_range(LENGTH):
        out += (result[i] * FACTOR,)
    return out


@triton.jit
def _stage(v, LENGTH: tl.constexpr, STAGE: tl.constexpr):
    """Elements 2**STAGE apart by their sum and difference."""
    result = ()
    for i in tl.static_range(LENGTH):
        if (i >> STAGE) & 1:
            result += (v[i - (1 << STAGE)] - v[i],)
        else:
            result += (v[i] + v[i + (1 << STAGE)],)
    return result


@triton.jit
def side_by_side(v, LENGTH: tl.constexpr, P: tl.constexpr):
    """LENGTH tensors (P,) of a tuple as one (P, LENGTH): nothing leaves its thread, and the compiler sees one tensor."""
    for level in tl.static_range(8):
        if (1 << level) < LENGTH:
            v = _joined(v, LENGTH >> (level + 1), 2 << level, P)
    return v[0]


@triton.jit
def _joined(v, HALF: tl.constexpr, WIDTH: tl.constexpr, P: tl.constexpr):
    """Tensors i and i + HALF side by side, (P, WIDTH)."""
    result = ()
    for i in tl.static_range(HALF):
        result += (tl.reshape(tl.join(v[i], v[i + HALF]), (P, WIDTH)),)
    return result


@triton.jit
def one_by_one(tile, LENGTH: tl.constexpr, P: tl.constexpr):
    """The tuple of a tile of `side_by_side`."""
    v = (tile,)
    for level in tl.static_range(8):
        if (2 << level) <= LENGTH:
            v = _split(v, 1 << level, LENGTH >> (level + 1), P)
    return v


@triton.jit
def _split(v, COUNT: tl.constexpr, WIDTH: tl.constexpr, P: tl.constexpr):
    """Tensors (P, 2 WIDTH) as those of even columns, and then those of odd ones; (P,) for a WIDTH of 1."""
    low, high = (), ()
    for i in tl.static_range(COUNT):
        if WIDTH > 1:
            even, odd = tl.split(tl.reshape(v[i], (P, WIDTH, 2)))
        else:
            even, odd = tl.split(v[i])
        low += (even,)
        high += (odd,)
    return low + high


@triton.jit
def mixed_words(v, WORDS: tl.constexpr, SIGNS: tl.constexpr, FACTOR: tl.constexpr):
    """Four tensors (P, WORDS): element 4 w + j of a block is v[j][:, w]. Stages beyond the first two cross lanes."""
    w = tl.arange(0, WORDS)[None, :]
    result = ()
    for j in tl.static_range(4):
        result += (float_of(bits_of(v[j]) ^ _sign_of(w, j, SIGNS, WORDS)),)
    result = _stage(_stage(result, 4, 0), 4, 1)
    for stage in tl.static_range(14):
        if (1 << stage) < WORDS:
            result = _across(result, w, stage)
    out = ()
    for j in tl.static_range(4):
        out += (result[j] * FACTOR,)
    return out


@triton.jit
def _across(v, w, STAGE: tl.constexpr):
    """Sums and differences with the word 2**STAGE away: of the right one p - v, which is p + (-v)."""
    partner = tl.broadcast_to(w ^ (1 << STAGE), v[0].shape)
    flip = ((w >> STAGE) & 1) << 31
    result = ()
    for j in tl.static_range(4):
        result += (tl.gather(v[j], partner, 1) + float_of(bits_of(v[j]) ^ flip),)
    return result


@triton.jit
def _sign_of(w, J: tl.constexpr, SIGNS: tl.constexpr, WORDS: tl.constexpr):
    """The sign bit of elements 4 w + J, int32 (1, WORDS)."""
    result = w * 0
    for i in tl.static_range(WORDS):
        if (SIGNS >> (4 * i + J)) & 1:
            result = result | tl.where(w == i, SIGN, 0)
    return result


@triton.jit
def negated(v, YES: tl.constexpr):
    """-v by its sign bit."""
    if YES:
        return float_of(bits_of(v) ^ SIGN)
    else:
        return v


@triton.jit
def in_dtype(v, COUNT: tl.constexpr, DTYPE: tl.constexpr, HAS_PTX: tl.constexpr):
    """A tuple of float32 tensors rounded to the input's dtype."""
    result = ()
    for i in tl.static_range(COUNT):
        if DTYPE == "float32":
            result += (v[i],)
        else:
            result += (rounded_once(v[i], DTYPE, HAS_PTX),)
    return result


#: Columns of a program, two in a thread: 4 bytes of 16-bit floats, and a block of 32 in 64 registers.
COLUMNS, COLUMN_WARPS = 256, 4


@triton.jit(do_not_specialize=["seed_low", "seed_high", "stream"])
def columns_kernel(
    x, codes, scale, outer, statistic, y, rows, columns, seed_low, seed_high, stream,
    SCHEME: tl.constexpr, OP: tl.constexpr, LENGTH: tl.constexpr, MIXED: tl.constexpr, SIGNS: tl.constexpr,
    FACTOR: tl.constexpr, BARE: tl.constexpr, DRAWS: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """x (rows, columns) in blocks of LENGTH rows: the statistic, or codes and scales, or values y, as the operation says.

    BARE: y is what was mixed, and nothing is quantized.
    """
    tiles = tl.cdiv(columns, C)
    strip, column = tl.program_id(0) // tiles, tl.program_id(0) % tiles * C + tl.arange(0, C)
    inside = column < columns if MASKED else None
    exists = column < columns
    at = strip.to(tl.int64) * (LENGTH * columns) + column
    v = ()
    for i in tl.static_range(LENGTH):
        v += (widened(read(x + (at + i * columns), inside)),)
    if MIXED:
        v = in_dtype(mixed_tuple(v, LENGTH, SIGNS, FACTOR), LENGTH, SCHEME.dtype, SCHEME.has_ptx)
    if BARE:
        for i in tl.static_range(LENGTH):
            tl.store(y + (at + i * columns), narrow(v[i], SCHEME.dtype, False), mask=inside)
    elif OP.statistic:
        largest = largest_of(v, LENGTH, SCHEME.block_nan, SCHEME.has_ptx)
        tl.atomic_max(statistic, tl.max(largest, axis=0), sem="relaxed")
    else:
        g_outer = load_outer(outer, statistic, SCHEME, OP)
        largest = largest_of(v, LENGTH, False, SCHEME.has_ptx)[:, None]
        block = (strip.to(tl.int64) * columns + column)[:, None]
        _, s, scale_code, prepared, _ = choose_scales(
            largest, largest, largest, g_outer, scale, scale, block, exists[:, None], 1, SCHEME, OP
        )
        factor = factor_of(s, scale_code, prepared, g_outer, SCHEME)
        words = None
        if SCHEME.rounding == "stochastic":
            place = beside(column, bits_of(v[0]), SCHEME.has_ptx)
            words = _words(place, strip, rows, seed_low, seed_high, stream, LENGTH, WIDE, C)
        tile = side_by_side(v, LENGTH, C)
        if OP.codes:
            result = codes_of(tile, s, factor, g_outer, words, SCHEME, DRAWS).to(tl.uint8)
            target = codes
        else:
            result = values_of(tile, s, factor, g_outer, words, SCHEME, DRAWS, OP.output)
            target = y
        result = one_by_one(result, LENGTH, C)
        for i in tl.static_range(LENGTH):
            tl.store(target + (at + i * columns), result[i], mask=inside)


@triton.jit
def _words(
    place, strip, rows, seed_low, seed_high, stream, LENGTH: tl.constexpr, WIDE: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Random words of a block of each column, (C, LENGTH): its rows are neighbours in a row of the transposed matrix."""
    quarter = rows // 4
    if WIDE:
        first = place.to(tl.int64) * quarter + strip.to(tl.int64) * (LENGTH // 4)
    else:
        first = place * quarter + strip * (LENGTH // 4)
    counters = ()
    for i in tl.static_range(LENGTH // 4):
        counters += (first + i,)
    a, b, c, d = four_words(side_by_side(counters, LENGTH // 4, C), seed_low, seed_high, stream, WIDE)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (C, LENGTH))


#: Words of a program: four or eight of a thread.
TILE, ROW_WARPS = 512, 4


@triton.jit(do_not_specialize=["seed_low", "seed_high", "stream"])
def rows_kernel(
    x, codes, scale, outer, statistic, y, count, seed_low, seed_high, stream,
    SCHEME: tl.constexpr, OP: tl.constexpr, WORDS: tl.constexpr, MIXED: tl.constexpr, SIGNS: tl.constexpr,
    FACTOR: tl.constexpr, BARE: tl.constexpr, DRAWS: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    """x, `count` blocks of 4 * WORDS elements one after the other: as `columns.columns_kernel` does.

    BARE: y is what was mixed, and nothing is quantized.
    """
    block = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)[:, None]
    at = block * WORDS + tl.arange(0, WORDS)[None, :]
    exists = block < count
    inside = tl.broadcast_to(exists, (P, WORDS)) if MASKED else None
    v = _elements(x, at, inside, SCHEME.dtype)
    if MIXED:
        v = in_dtype(mixed_words(v, WORDS, SIGNS, FACTOR), 4, SCHEME.dtype, SCHEME.has_ptx)
    if BARE:
        result = ()
        for i in tl.static_range(4):
            result += (narrow(v[i], SCHEME.dtype, False),)
        _store_words(y, at, inside, result)
    elif OP.statistic:
        largest = tl.max(tl.max(largest_of(v, 4, SCHEME.block_nan, SCHEME.has_ptx), axis=1), axis=0)
        tl.atomic_max(statistic, largest, sem="relaxed")
    else:
        g_outer = load_outer(outer, statistic, SCHEME, OP)
        largest = tl.max(largest_of(v, 4, False, SCHEME.has_ptx), axis=1, keep_dims=True)
        _, s, scale_code, prepared, _ = choose_scales(
            largest, largest, largest, g_outer, scale, scale, block, exists, 1, SCHEME, OP
        )
        factor = factor_of(s, scale_code, prepared, g_outer, SCHEME)
        words = (None, None, None, None)
        if SCHEME.rounding == "stochastic":
            words = four_words(at, seed_low, seed_high, stream, WIDE)
        _quantized(v, s, factor, g_outer, words, codes, y, at, inside, SCHEME, OP, DRAWS)


@triton.jit
def _quantized(
    v, s, factor, outer, words, codes, y, at, inside, SCHEME: tl.constexpr, OP: tl.constexpr, DRAWS: tl.constexpr
):  # fmt: skip
    """Codes or values of four elements a word, stored."""
    if OP.codes:
        result = codes_of(v[0], s, factor, outer, words[0], SCHEME, DRAWS)
        for i in tl.static_range(1, 4):
            result = result | (codes_of(v[i], s, factor, outer, words[i], SCHEME, DRAWS) << (8 * i))
        tl.store(codes.to(tl.pointer_type(tl.int32), bitcast=True) + at, result, mask=inside)
    else:
        values = ()
        for i in tl.static_range(4):
            values += (values_of(v[i], s, factor, outer, words[i], SCHEME, DRAWS, OP.output),)
        _store_words(y, at, inside, values)


@triton.jit
def _elements(x, at, inside, DTYPE: tl.constexpr):
    """float32 of four neighbours of each word, a tuple."""
    word = tl.load(x.to(tl.pointer_type(tl.int64), bitcast=True) + at, mask=inside)
    low, high = word.to(tl.int32), (word >> 32).to(tl.int32)
    BF16: tl.constexpr = DTYPE == "bfloat16"
    return low_float(low, BF16), high_float(low, BF16), low_float(high, BF16), high_float(high, BF16)


@triton.jit
def _store_words(y, at, inside, v):
    """Four 16-bit floats side by side."""
    low, high = _pair(v[0], v[1]), _pair(v[2], v[3])
    word = low.to(tl.uint32, bitcast=True).to(tl.int64) | (high.to(tl.int64) << 32)
    tl.store(y.to(tl.pointer_type(tl.int64), bitcast=True) + at, word, mask=inside)


@triton.jit
def _pair(a, b):
    """Two 16-bit floats as one int32, the first in the low half."""
    return a.to(tl.uint16, bitcast=True).to(tl.int32) | (b.to(tl.uint16, bitcast=True).to(tl.int32) << 16)


#: Lengths of blocks down columns, which a thread holds, and along rows, which a warp holds.
LONGEST_COLUMN, LONGEST_ROW = 32, 128
#: What the kernel is told of a scheme where nothing is quantized.
NO_SCHEME = "mxfp4"


@dataclass(frozen=True)
class Rule:
    """What is done with the blocks of a matrix: mixed over `hadamard` elements (0: not), quantized by a scheme (None: not)."""

    scheme: Scheme | None
    hadamard: int
    axis: int

    @property
    def length(self) -> int:
        """Elements of a block; 0 where they are no plain blocks."""
        if self.scheme is None:
            return self.hadamard
        block = self.scheme.scale.block
        plain = isinstance(block, int) and block > 0 and self.hadamard in (0, block)
        return int(block) if plain else 0  # type: ignore[call-overload]


def covers(x: torch.Tensor, rule: Rule) -> bool:
    """Whether the kernels serve a contiguous matrix: whole blocks of a power of two, float elements, no zero points."""
    length, name = rule.length, FLOAT_NAMES.get(x.dtype)
    if name is None or x.dim() != 2 or not x.is_contiguous() or not x.numel() or x.data_ptr() % 16:
        return False
    if length < 4 or length & (length - 1) or x.shape[rule.axis] % length or max(x.shape) >= 2**30:
        return False
    if length > (LONGEST_ROW if rule.axis else LONGEST_COLUMN) or (rule.axis and name == "float32"):
        return False
    return rule.scheme is None or _quantizes(rule.scheme)


@lru_cache(maxsize=256)
def _quantizes(scheme: Scheme) -> bool:
    """Whether elements are those of default float schemes: each is multiplied by one reciprocal and stored as it is."""
    default = (
        scheme.nan,
        scheme.apply,
        scheme.arithmetic,
        scheme.overflow,
        scheme.dequantize,
        scheme.codes_from,
    )
    plain = default == ("block", "reciprocal", "float32", "saturate", "float32", "stored")
    fmt = scheme.format
    floats = (
        fmt.kind == "float" and fmt.bits <= 8 and scheme.zero is None and scheme.scale.statistic == "absmax"
    )
    outer = scheme.outer is None or scheme.outer.statistic == "absmax_elements"
    return plain and floats and outer and scheme.scale.stored == "decode" and fmt.specials != "ieee"


def mixed(x: torch.Tensor, rule: Rule) -> torch.Tensor:
    """Blocks of a matrix transformed; where `covers` says so."""
    y = torch.empty_like(x)
    _run(x, rule, block_op(output=FLOAT_NAMES[x.dtype]), {"y": y})
    return y


def quantized_values(x: torch.Tensor, rule: Rule, seed: int, stream: int) -> torch.Tensor:
    """What the codes of a matrix stand for, in its dtype and layout; where `covers` says so."""
    y = torch.empty_like(x)
    outer = _outer(x, rule)
    op = block_op(output=FLOAT_NAMES[x.dtype], outer="statistic" if outer else "")
    _run(x, rule, op, {"y": y, **outer}, seed, stream)
    return y


def quantized(x: torch.Tensor, rule: Rule, seed: int, stream: int) -> Quantized:
    """Codes and scales of a matrix, in its layout; where `covers` says so."""
    scheme = rule.scheme
    assert scheme is not None
    shape = list(x.shape)
    shape[rule.axis] //= rule.length
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    stored = getattr(torch, storage_dtype(scheme.scale.storage))
    scale = torch.empty(shape, dtype=stored, device=x.device)
    outer = _outer(x, rule)
    op = block_op(codes=True, scales=True, outer="statistic" if outer else "")
    _run(x, rule, op, {"codes": codes, "scale": scale, **outer}, seed, stream)
    return Quantized(codes, scale, outer.get("outer"), None, tuple(x.shape), rule.axis, scheme)


def _outer(x: torch.Tensor, rule: Rule) -> dict[str, torch.Tensor]:
    """The statistic of the outer scale, and memory for it; nothing where there is none."""
    if rule.scheme is None or rule.scheme.outer is None:
        return {}
    statistic = torch.zeros((), dtype=torch.int32, device=x.device)
    _run(x, rule, block_op(statistic=True, outer="statistic"), {"statistic": statistic})
    return {"statistic": statistic, "outer": torch.empty((), dtype=torch.float32, device=x.device)}


def _run(
    x: torch.Tensor, rule: Rule, op: BlockOp, tensors: dict[str, torch.Tensor], seed: int = 0, stream: int = 0
) -> None:
    constants, draws = _constants(rule.scheme, FLOAT_NAMES[x.dtype], not interpreted())
    pointers = (x, *(tensors.get(name) for name in ("codes", "scale", "outer", "statistic", "y")))
    drawn = (seed & 0xFFFFFFFF, seed >> 32, stream)
    length, (rows, columns) = rule.length, x.shape
    mix = (rule.hadamard > 0, _sign_bits(length), _factor(length), rule.scheme is None, draws)
    wide = prod(x.shape) >= 2**33
    if rule.axis:
        p, count = TILE * 4 // length, x.numel() // length
        grid, sizes, warps = -(-count // p), (count,), ROW_WARPS
        tail = (constants, op, length // 4, *mix, count % p != 0, wide, p)
        kernel: Any = rows_kernel
    else:
        grid, sizes, warps = rows // length * -(-columns // COLUMNS), (rows, columns), COLUMN_WARPS
        tail = (constants, op, length, *mix, columns % COLUMNS != 0, wide, COLUMNS)
        kernel = columns_kernel
    options = {} if interpreted() else {"num_warps": warps, **UNFUSED}
    with torch.cuda.device(x.get_device()):
        kernel[(grid,)](*pointers, *sizes, *drawn, *tail, **options)


@lru_cache(maxsize=256)
def _constants(scheme: Scheme | None, dtype: str, hardware: bool) -> tuple[SchemeConstants, bool]:
    """Constants of the kernel, and whether scaled elements are rounded stochastically without the general rules."""
    scheme = SCHEMES[NO_SCHEME] if scheme is None else scheme
    draws = scheme.rounding == "stochastic" and (is_fast_stochastic(scheme) or is_under_outer(scheme))
    return constants_of(scheme, dtype, hardware), draws


@lru_cache(maxsize=16)
def _sign_bits(length: int) -> int:
    """Bit i where element i of a block is negated."""
    return sum(1 << at for at, sign in enumerate(signs(length)) if sign < 0)


@lru_cache(maxsize=16)
def _factor(length: int) -> float:
    return float(np.float32(1 / sqrt(length)))


__all__ = ["COLUMNS", "Rule", "covers", "mixed", "quantized", "quantized_values"]
