"""8-bit floats (and MX floats below) of a matrix and of its transpose, or of the transpose alone, from one read of each tile.

KIND says what has one scale, along rows in the first copy and along columns in the second:

* ``"vectors"``: a row, and a column. `maxima_kernel` has found their largest magnitudes before.
* ``"tensor"``: the matrix. `statistic` holds its largest magnitude.
* ``"blocks"``: BLOCK neighbours. Tiles hold whole blocks (but for short last ones), so x is read once.
* ``"square"``: BLOCK x BLOCK elements, one tile, the same scale in both copies.
* ``"spread"``: the matrix, but its scale stands at each column. `statistic` holds its largest magnitude.

"vectors", "tensor" and "spread" read x twice, the second time from the end, which is what the L2 cache still holds. Codes turn
as bytes in shared memory, and scales and codes are those of `tile.scales` and `tile.fast_codes`.

`maxima_kernel`: the largest magnitudes of rows and columns from one read, where each has one scale. Magnitudes of floats order
as their patterns do, NaN above all, so 16-bit floats are compared in pairs of neighbouring columns (`max.u16x2`) and become
patterns of float32 at the end. A program goes down a strip of columns: a thread keeps the maxima of its columns in registers,
while those of each turn's rows leave, over the lanes of a warp, by atomic maximum.

`pairs_kernel`: 16-bit floats in whole tiles, two elements at a time, in the patches of `mx`. A warp has 32 rows by 64 columns,
eight rows by eight columns in each lane, so that codes of four rows or of four columns are packed in one word, and shared
memory carries words of the transposed codes. Blocks have 128 elements.
"""

from __future__ import annotations

from math import prod

import torch
import triton
import triton.language as tl

from fast.kernels.bits import (
    INFINITY,
    MAGNITUDE,
    MANTISSA,
    NAN,
    bits_of,
    float_of,
    high_float,
    low_float,
    widened,
)
from fast.kernels.rowwise_colwise.mx import (
    LOW_HALF,
    MAGNITUDES,
    crossed,
    larger_halves,
    largest_halves,
    patchwise,
    word_of_codes,
    words_of_rows,
)
from fast.kernels.rules.elements import encode
from fast.kernels.rules.scales import exact_scale, power_scale, power_value, stored_scale
from fast.kernels.rules.statistics import larger
from fast.kernels.rules.values import element_codes
from fast.kernels.scheme.constants import SchemeConstants
from fast.kernels.tile.fast_codes import multiplier
from fast.launch.launcher import Call, CompiledLaunch, ceil_div

# Rows of a warp in a turn, words of a row (128: what the lanes of a warp read at once), turns, and warps.
ROWS, WORDS, TURNS, WARPS = 8, 128, 8, 4
# Neighbours that a thread has of a row: 16 bytes of 16-bit floats.
TOGETHER = tl.constexpr(8)
HALF_MAGNITUDE = tl.constexpr(0x7FFF)
INT32 = 2**31


@triton.jit
def tile_places(row, column, rows, columns, MASKED: tl.constexpr, WIDE: tl.constexpr):
    """(offsets of a tile in a row-major matrix, which of them exist: a mask that the compiler drops unless MASKED)."""
    wide = row.to(tl.int64) if WIDE else row
    at = wide[:, None] * columns + column[None, :]
    if not MASKED:
        inside = tl.full(at.shape, 1, tl.int1)
    else:
        inside = (row[:, None] < rows) & (column[None, :] < columns)
    return at, inside


@triton.jit
def largest_along(v, AXIS: tl.constexpr, HAS_PTX: tl.constexpr):
    """Patterns of the largest magnitudes along an axis, which goes; HAS_PTX: by float maxima, see `absmax`."""
    if HAS_PTX:
        return bits_of(tl.reduce(tl.abs(v), AXIS, larger)) & MAGNITUDE
    else:
        return tl.max(bits_of(v) & MAGNITUDE, axis=AXIS)


@triton.jit
def largest_of_rows(v, HAS_PTX: tl.constexpr):
    """The same of rows: over a thread's neighbours, then over lanes, which one instruction does for integers."""
    ROWS: tl.constexpr = v.shape[0]
    COLUMNS: tl.constexpr = v.shape[1]
    parts = largest_along(tl.reshape(v, (ROWS, COLUMNS // TOGETHER, TOGETHER)), 2, HAS_PTX)
    return tl.max(parts, axis=1)


@triton.jit
def _magnitudes(x, at, inside, PAIRS: tl.constexpr):
    """Patterns of magnitudes as int32: of two 16-bit floats (PAIRS), or of one float of any size."""
    if PAIRS:
        words = x.to(tl.pointer_type(tl.int32), bitcast=True)
        return tl.load(words + at, mask=inside, other=0) & MAGNITUDES
    elif x.dtype.element_ty == tl.float32:
        return bits_of(tl.load(x + at, mask=inside, other=0)) & MAGNITUDE
    else:
        return tl.load(x + at, mask=inside, other=0).to(tl.int16, bitcast=True).to(tl.int32) & HALF_MAGNITUDE


@triton.jit
def as_float32(pattern, element: tl.constexpr):
    """Patterns of float32 of the same magnitudes."""
    if element == tl.float32:
        return pattern
    elif element == tl.bfloat16:
        return pattern << 16
    else:
        return bits_of(pattern.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)) & MAGNITUDE


@triton.jit
def _over_rows(m, AXIS: tl.constexpr, PAIRS: tl.constexpr, HAS_PTX: tl.constexpr):
    """Maxima of words along an axis; of pairs for each half."""
    if PAIRS:
        return largest_halves(m, AXIS, HAS_PTX)
    else:
        return tl.max(m, axis=AXIS)


@triton.jit
def _over_words(m, PAIRS: tl.constexpr, HAS_PTX: tl.constexpr):
    """Maxima of all numbers of a row: in a thread, then over lanes."""
    SIZE: tl.constexpr = m.shape[1]
    parts = tl.reshape(m, (m.shape[0], SIZE // 4, 4))
    if PAIRS:
        word = largest_halves(parts, 2, HAS_PTX)
        return tl.max(tl.maximum(word & LOW_HALF, word >> 16), axis=1)
    else:
        return tl.max(tl.max(parts, axis=2), axis=1)


@triton.jit
def maxima_kernel(
    x, statistic, rows, columns,
    OF_ROWS: tl.constexpr, PAIRS: tl.constexpr, HAS_PTX: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, TURNS: tl.constexpr, WARPS: tl.constexpr, COLUMNS: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """statistic: patterns of the columns' largest magnitudes, then (OF_ROWS) of the rows'; all 0 before.

    BATCH: of the columns of each matrix; the grid's second axis goes over matrices.
    """
    element: tl.constexpr = x.dtype.element_ty
    if BATCH:
        matrix = tl.program_id(1).to(tl.int64)
        x += matrix * rows * columns
        statistic += matrix * columns
    WORDS: tl.constexpr = COLUMNS // 2 if PAIRS else COLUMNS
    words = columns // 2 if PAIRS else columns
    across = tl.cdiv(words, WORDS)
    down = tl.program_id(0) // across * (TURNS * ROWS)
    word = tl.program_id(0) % across * WORDS + tl.arange(0, WORDS)
    top = tl.zeros((WARPS, WORDS), tl.int32)
    for turn in range(TURNS):
        row = down + turn * ROWS + tl.arange(0, ROWS)
        at, inside = tile_places(row, word, rows, words, MASKED, WIDE)
        m = _magnitudes(x, at, inside, PAIRS)
        own = _over_rows(tl.reshape(m, (ROWS // WARPS, WARPS, WORDS)), 0, PAIRS, HAS_PTX)
        top = larger_halves(top, own, HAS_PTX) if PAIRS else tl.maximum(top, own)
        if OF_ROWS:
            largest = as_float32(_over_words(m, PAIRS, HAS_PTX), element)
            tl.atomic_max(statistic + columns + row, largest, mask=row < rows, sem="relaxed")
    top = _over_rows(top, 0, PAIRS, HAS_PTX)
    if PAIRS:
        low, high = as_float32(top & LOW_HALF, element), as_float32(top >> 16, element)
        tl.atomic_max(statistic + 2 * word, low, mask=word < words, sem="relaxed")
        tl.atomic_max(statistic + 2 * word + 1, high, mask=word < words, sem="relaxed")
    else:
        tl.atomic_max(statistic + word, as_float32(top, element), mask=word < words, sem="relaxed")


def leave_maxima(
    call: Call, rule: SchemeConstants, of_rows: bool, rows: int = ROWS, words: int = WORDS, turns: int = TURNS,
    warps: int = WARPS,
) -> None:  # fmt: skip
    """Allocate `statistic`, and fill it with the maxima of the matrix `x`, or of the columns of each of a batch.

    rows: of a warp in a turn.
    """
    x = call.tensors["x"]
    *batch, height, width = x.shape
    call.allocate("statistic", (prod(batch) * width + of_rows * height,), torch.int32, (0,))
    pairs = x.element_size() == 2 and width % 2 == 0
    columns, tall = words * (1 + pairs), rows * warps * turns
    masked = bool(height % tall or width % columns)
    tail = (
        height, width, of_rows, pairs, bool(rule.has_ptx), masked, height * width >= INT32, rows * warps, turns, warps,
        columns, bool(batch),
    )  # fmt: skip
    grid = (ceil_div(height, tall) * ceil_div(width, columns), prod(batch), 1)
    call.launch(CompiledLaunch(maxima_kernel, grid, tail, warps), ("x", "statistic"))


@triton.jit
def scales_of(largest, SCHEME: tl.constexpr):
    """(what is stored, the scale, what elements are multiplied by) of patterns of largest magnitudes."""
    L: tl.constexpr = SCHEME.level
    if SCHEME.power_of_two:
        stored = power_scale(largest, L, SCHEME.block_nan)
        scale = power_value(stored)
        factor = multiplier(scale, stored, scale, SCHEME)
    elif SCHEME.power_ratio:
        # The fraction of largest / target rounds up to a power of two exactly if that of `largest` is above the target's.
        field = ((largest + (MANTISSA - L.target_fraction)) >> 23) - L.target_exponent
        b = tl.maximum(field << 23, L.floor)
        stored = float_of(tl.where(largest >= INFINITY, NAN, b))
        scale = stored
        factor = float_of(tl.where(largest >= INFINITY, NAN, (254 << 23) - b))
    else:
        f = float_of(largest)
        stored, scale = stored_scale(exact_scale(largest, f, f, None, SCHEME), L)
        factor = multiplier(scale, stored, scale, SCHEME)
    return stored, scale, factor


@triton.jit
def scaled_codes(v, scale, factor, SCHEME: tl.constexpr):
    """uint8 codes of float32 elements under scales and their multipliers of a shape that broadcasts to theirs."""
    if SCHEME.bits < 8:
        return element_codes(v, scale, None, None, None, SCHEME).to(tl.uint8)
    elif not SCHEME.has_ptx:
        return encode(v * factor, None, SCHEME.element).to(tl.uint8)
    elif SCHEME.fast_path == "e4m3":
        return (v * factor).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return (v * factor).to(tl.float8e5).to(tl.uint8, bitcast=True)


@triton.jit
def _along_rows(
    v, codes, scale, largest, at, inside, row, across, rows, columns,
    SCHEME: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Codes and scales of a tile along its rows. largest: of each row, for "vectors"."""
    ROWS: tl.constexpr = v.shape[0]
    COLUMNS: tl.constexpr = v.shape[1]
    if KIND == "blocks":
        MANY: tl.constexpr = COLUMNS // BLOCK
        if MANY == 1:
            largest = largest_of_rows(v, SCHEME.has_ptx)[:, None]
        else:
            largest = largest_along(tl.reshape(v, (ROWS, MANY, BLOCK)), 2, SCHEME.has_ptx)
        stored, s, factor = scales_of(largest, SCHEME)
        block = across * MANY + tl.arange(0, MANY)
        blocks = tl.cdiv(columns, BLOCK)
        place = row.to(tl.int64)[:, None] * blocks + block[None, :]
        exists = (row[:, None] < rows) & (block[None, :] < blocks)
        tl.store(scale + place, stored.to(scale.dtype.element_ty), mask=exists)
        result = scaled_codes(tl.reshape(v, (ROWS, MANY, BLOCK)), s[:, :, None], factor[:, :, None], SCHEME)
        result = tl.reshape(result, (ROWS, COLUMNS))
    else:
        stored, s, factor = scales_of(largest, SCHEME)
        if across == 0:
            tl.store(scale + row, stored.to(scale.dtype.element_ty), mask=row < rows)
        result = scaled_codes(v, s[:, None], factor[:, None], SCHEME)
    tl.store(codes + at, result, mask=inside)


@triton.jit
def _along_columns(
    v, transposed, scale, largest, column, down, rows, columns,
    SCHEME: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(codes, not yet turned) along a tile's columns, whose scales are stored."""
    ROWS: tl.constexpr = v.shape[0]
    COLUMNS: tl.constexpr = v.shape[1]
    if KIND == "blocks":
        MANY: tl.constexpr = ROWS // BLOCK
        largest = largest_along(tl.reshape(v, (MANY, BLOCK, COLUMNS)), 1, SCHEME.has_ptx)
        stored, s, factor = scales_of(largest, SCHEME)
        block = down * MANY + tl.arange(0, MANY)
        blocks = tl.cdiv(rows, BLOCK)
        place = column.to(tl.int64)[None, :] * blocks + block[:, None]
        exists = (column[None, :] < columns) & (block[:, None] < blocks)
        tl.store(scale + place, stored.to(scale.dtype.element_ty), mask=exists)
        result = scaled_codes(
            tl.reshape(v, (MANY, BLOCK, COLUMNS)), s[:, None, :], factor[:, None, :], SCHEME
        )
        return tl.reshape(result, (ROWS, COLUMNS))
    else:
        stored, s, factor = scales_of(largest, SCHEME)
        if down == 0:
            tl.store(scale + column, stored.to(scale.dtype.element_ty), mask=column < columns)
        return scaled_codes(v, s[None, :], factor[None, :], SCHEME)


@triton.jit
def _single_scale(
    v, scale, transposed_scale, statistic, down, across, rows, columns,
    SCHEME: tl.constexpr, KIND: tl.constexpr, BOTH: tl.constexpr,
):  # fmt: skip
    """Codes of a tile under the scale that it or the matrix has, which is stored for both copies."""
    if KIND == "square":
        COLUMNS: tl.constexpr = v.shape[1]
        largest = tl.max(largest_of_rows(v, SCHEME.has_ptx), axis=0)
        at = down.to(tl.int64) * tl.cdiv(columns, COLUMNS) + across
        at_turned = across.to(tl.int64) * tl.cdiv(rows, v.shape[0]) + down
        mine = True
    else:
        largest = tl.load(statistic)
        at, at_turned, mine = 0, 0, (down == 0) & (across == 0)
    stored, s, factor = scales_of(tl.full((1, 1), 0, tl.int32) + largest, SCHEME)
    if mine:
        stored = stored.to(transposed_scale.dtype.element_ty)
        tl.store(transposed_scale + at_turned + tl.zeros((1, 1), tl.int32), stored)
        if BOTH:
            tl.store(scale + at + tl.zeros((1, 1), tl.int32), stored)
    return scaled_codes(v, s, factor, SCHEME)


@triton.jit
def matrix_of(REVERSE: tl.constexpr):
    """The number of a program's matrix in a batch, which is the grid's second axis; REVERSE: from the end."""
    matrix = tl.program_id(1)
    if REVERSE:
        matrix = tl.num_programs(1) - 1 - matrix
    return matrix.to(tl.int64)


@triton.jit
def first_scale(matrix, rows, columns, KIND: tl.constexpr, BLOCK: tl.constexpr, SQUARE: tl.constexpr):
    """Where a transposed matrix's scales begin in a batch. BLOCK, SQUARE: the length of "blocks" and of "square"."""
    if KIND == "blocks":
        return matrix * columns * tl.cdiv(rows, BLOCK)
    elif KIND == "square":
        return matrix * tl.cdiv(columns, SQUARE) * tl.cdiv(rows, SQUARE)
    else:
        return matrix * columns


@triton.jit
def tiles_kernel(
    x, statistic, codes, scale, transposed, transposed_scale, rows, columns, tall,
    SCHEME: tl.constexpr, KIND: tl.constexpr, BOTH: tl.constexpr, REVERSE: tl.constexpr, MASKED: tl.constexpr,
    WIDE: tl.constexpr, BAND: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BATCH: tl.constexpr,
):  # fmt: skip
    """codes (rows, columns) with scales along columns (BOTH), transposed (columns, rows) with scales along rows.

    Grid: programs go down BAND tiles first (which write the same lines of the transposed codes), then to the next columns, then
    to the next band; REVERSE: from the end. tall: tiles of a column. BATCH: the second axis goes over matrices; not with BOTH.
    """
    program = tl.program_id(0)
    if REVERSE:
        program = tl.num_programs(0) - 1 - program
    if BATCH:
        matrix = matrix_of(REVERSE)
        x += matrix * rows * columns
        transposed += matrix * rows * columns
        transposed_scale += first_scale(matrix, rows, columns, KIND, BLOCK, COLUMNS)
        if KIND == "vectors":
            statistic += matrix * columns
        elif KIND == "spread":
            statistic += matrix
    wide = tl.cdiv(columns, COLUMNS)
    band, rest = program // (BAND * wide), program % (BAND * wide)
    high = tl.minimum(tall - band * BAND, BAND)
    down, across = band * BAND + rest % high, rest // high
    row = down * ROWS + tl.arange(0, ROWS)
    column = across * COLUMNS + tl.arange(0, COLUMNS)
    at, inside = tile_places(row, column, rows, columns, MASKED, WIDE)
    v = widened(tl.load(x + at, mask=inside, other=0))
    if KIND == "square" or KIND == "tensor":
        result = _single_scale(
            v, scale, transposed_scale, statistic, down, across, rows, columns, SCHEME, KIND, BOTH
        )
        if BOTH:
            tl.store(codes + at, result, mask=inside)
    else:
        of_rows, of_columns = None, None
        if KIND == "vectors":
            of_columns = tl.load(statistic + column, mask=column < columns, other=0)
            if BOTH:
                of_rows = tl.load(statistic + columns + row, mask=row < rows, other=0)
        elif KIND == "spread":
            of_columns = tl.load(statistic + tl.zeros((1,), tl.int32))
        if BOTH:
            _along_rows(v, codes, scale, of_rows, at, inside, row, across, rows, columns, SCHEME, KIND, BLOCK)
        result = _along_columns(
            v, transposed, transposed_scale, of_columns, column, down, rows, columns, SCHEME, KIND, BLOCK
        )
    turned, inside = tile_places(column, row, columns, rows, MASKED, WIDE)
    tl.store(transposed + turned, tl.trans(result), mask=inside)


@triton.jit
def _patterns(half, IS_BF16: tl.constexpr):
    """float32 patterns of magnitudes in the low halves of words, whose high halves are 0."""
    return bits_of(low_float(half, IS_BF16)) & MAGNITUDE


@triton.jit
def _largest_of_rows(
    magnitudes, IS_BF16: tl.constexpr, HAS_PTX: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr
):
    """Patterns of the rows' largest magnitudes in the order of memory, (32 DOWN,): over words, lanes and warps."""
    WARPS: tl.constexpr = DOWN * ACROSS
    own = largest_halves(tl.reshape(magnitudes, (32 * WARPS, 8, 4)), 2, HAS_PTX)
    first, second = tl.split(tl.permute(tl.reshape(own, (2, 4, 4 * WARPS, 8)), (1, 2, 3, 0)))
    both = largest_halves(crossed(first, second, HAS_PTX), 2, HAS_PTX)
    both = largest_halves(tl.reshape(both, (4, DOWN, ACROSS, 4)), 2, HAS_PTX)
    rows = tl.join(_patterns(both & LOW_HALF, IS_BF16), _patterns(both >> 16, IS_BF16))
    # (4 registers, DOWN, 4 lanes, 2 of a register) -> (DOWN, lanes, 2, 4).
    return tl.reshape(tl.permute(rows, (1, 2, 3, 0)), (32 * DOWN,))


@triton.jit
def largest_of_columns(
    magnitudes, IS_BF16: tl.constexpr, HAS_PTX: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr
):
    """The same of columns, (64 ACROSS,)."""
    own = largest_halves(patchwise(magnitudes, DOWN * ACROSS), 1, HAS_PTX)
    both = largest_halves(tl.reshape(own, (DOWN, 32 * ACROSS)), 0, HAS_PTX)
    columns = tl.join(_patterns(both & LOW_HALF, IS_BF16), _patterns(both >> 16, IS_BF16))
    return tl.reshape(columns, (64 * ACROSS,))


@triton.jit
def _row_codes(low, high, by, SCHEME: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """Words of four codes along rows, (32 WARPS, 16); by: multipliers of rows (32 DOWN,), or one, (1, 1)."""
    LEAD: tl.constexpr = 32 * DOWN * ACROSS
    if len(by.shape) == 1:
        by = tl.permute(tl.reshape(by, (DOWN, 4, 8)), (2, 0, 1))
        by = tl.broadcast_to(by[:, :, None, :], (8, DOWN, ACROSS, 4))
        by = tl.reshape(by, (LEAD, 1))
    a, c = tl.split(tl.reshape(low * by, (LEAD, 16, 2)))
    b, d = tl.split(tl.reshape(high * by, (LEAD, 16, 2)))
    return word_of_codes(a, b, c, d, SCHEME)


@triton.jit
def column_codes(low, high, by, SCHEME: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """Words of four codes along columns, (64 ACROSS, 8 DOWN); by: multipliers of columns (64 ACROSS,), or one, (1, 1)."""
    WARPS: tl.constexpr = DOWN * ACROSS
    low, high = patchwise(low, WARPS), patchwise(high, WARPS)
    if len(by.shape) == 1:
        of_low, of_high = tl.split(tl.reshape(by, (ACROSS, 32, 2)))
        low *= tl.reshape(tl.broadcast_to(of_low[None, :, :], (DOWN, ACROSS, 32)), (WARPS, 1, 32))
        high *= tl.reshape(tl.broadcast_to(of_high[None, :, :], (DOWN, ACROSS, 32)), (WARPS, 1, 32))
    else:
        low *= by[None, :, :]
        high *= by[None, :, :]
    return turned_words(low, high, SCHEME, DOWN, ACROSS)


@triton.jit
def turned_words(low, high, SCHEME: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """The same of scaled elements as `patchwise` has them."""
    WARPS: tl.constexpr = DOWN * ACROSS
    words = tl.join(words_of_rows(low, WARPS, SCHEME), words_of_rows(high, WARPS, SCHEME))
    words = tl.reshape(words, (DOWN, ACROSS, 8, 64))
    return tl.reshape(tl.permute(words, (1, 3, 0, 2)), (64 * ACROSS, 8 * DOWN))


@triton.jit
def pairs_kernel(
    x, statistic, codes, scale, transposed, transposed_scale, rows, columns,
    SCHEME: tl.constexpr, KIND: tl.constexpr, BOTH: tl.constexpr, REVERSE: tl.constexpr, BAND: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """As `tiles_kernel`, rows a multiple of 32 DOWN * BAND and columns of 64 ACROSS; num_warps is DOWN * ACROSS."""
    WARPS: tl.constexpr = DOWN * ACROSS
    WORDS: tl.constexpr = tl.pointer_type(tl.int32)
    IS_BF16: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    program = tl.program_id(0)
    if REVERSE:
        program = tl.num_programs(0) - 1 - program
    if BATCH:
        matrix = matrix_of(REVERSE)
        x += matrix * rows * columns
        transposed += matrix * rows * columns
        transposed_scale += first_scale(matrix, rows, columns, KIND, 128, 128)
        if KIND == "vectors":
            statistic += matrix * columns
        elif KIND == "spread":
            statistic += matrix
    wide = columns // (64 * ACROSS)
    tile_row = program // (BAND * wide) * BAND + program % BAND
    tile_column = program % (BAND * wide) // BAND
    row, column = tile_row.to(tl.int64) * (32 * DOWN), tile_column.to(tl.int64) * (64 * ACROSS)
    # Offsets inside a program fit 32 bits; those of its registers are multiples of one stride.
    i = tl.arange(0, 32 * WARPS)
    patch = (i // 4) % WARPS
    across = patch % ACROSS * 64
    lane = i % 4 * 8 + patch // ACROSS * 32
    turn = (i // (4 * WARPS)).to(tl.int64)
    pairs, quads = columns // 2, columns // 4
    at = (x + (row * columns + column)).to(WORDS, bitcast=True)
    at = at + (lane * pairs + across // 2)[:, None] + tl.arange(0, 32)[None, :] + (turn * pairs)[:, None]
    own_row, own_column = row + tl.arange(0, 32 * DOWN), column + tl.arange(0, 64 * ACROSS)
    if KIND == "vectors":
        of_columns = tl.load(statistic + own_column)
        if BOTH:
            of_rows = tl.load(statistic + columns + own_row)
    elif KIND == "spread":
        of_columns = tl.load(statistic + tl.zeros((1,), tl.int32))
    w = tl.load(at)
    magnitudes, low, high = w & MAGNITUDES, low_float(w, IS_BF16), high_float(w, IS_BF16)
    if KIND == "blocks":
        of_columns = largest_of_columns(magnitudes, IS_BF16, SCHEME.has_ptx, DOWN, ACROSS)
        if BOTH:
            of_rows = _largest_of_rows(magnitudes, IS_BF16, SCHEME.has_ptx, DOWN, ACROSS)

    if KIND == "tensor" or KIND == "square":
        if KIND == "square":
            pair = largest_halves(magnitudes, 0, SCHEME.has_ptx)
            largest = tl.max(tl.maximum(pair & LOW_HALF, pair >> 16), axis=0)
            largest = _patterns(largest, IS_BF16)
        else:
            largest = tl.load(statistic)
        stored, _, by_row = scales_of(tl.full((1, 1), 0, tl.int32) + largest, SCHEME)
        by_column = by_row
        one = tl.zeros((1, 1), tl.int32)
        if KIND == "square":
            tl.store(transposed_scale + (tile_column.to(tl.int64) * (rows // 128) + tile_row + one), stored)
            if BOTH:
                tl.store(scale + (tile_row.to(tl.int64) * (columns // 128) + tile_column + one), stored)
        elif program == 0:
            tl.store(transposed_scale + one, stored)
            if BOTH:
                tl.store(scale + one, stored)
    else:
        stored, _, by_column = scales_of(of_columns, SCHEME)
        if KIND == "blocks":
            tl.store(transposed_scale + own_column * (rows // 128) + tile_row, stored)
        elif tile_row == 0:
            tl.store(transposed_scale + own_column, stored)
        if KIND == "spread":
            by_column = by_column[None, :]
        if BOTH:
            stored, _, by_row = scales_of(of_rows, SCHEME)
            if KIND == "blocks":
                tl.store(scale + own_row * (columns // 128) + tile_column, stored)
            elif tile_column == 0:
                tl.store(scale + own_row, stored)
    if BOTH:
        # Stores of 8 bytes, as lanes have them: wider ones would go through shared memory.
        to = (codes + (row * columns + column)).to(WORDS, bitcast=True)
        to = to + (lane * quads + across // 4)[:, None] + tl.max_contiguous(tl.arange(0, 16), [2])[None, :]
        tl.store(to + (turn * quads)[:, None], _row_codes(low, high, by_row, SCHEME, DOWN, ACROSS))
    to = (transposed + (column * rows + row)).to(WORDS, bitcast=True)
    to = to + tl.arange(0, 64 * ACROSS)[:, None] * (rows // 4) + tl.arange(0, 8 * DOWN)[None, :]
    tl.store(to, column_codes(low, high, by_column, SCHEME, DOWN, ACROSS))
