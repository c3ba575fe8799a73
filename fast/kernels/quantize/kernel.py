"""One kernel for every blocked tensor: choose scales, quantize, fake-quantize, dequantize, mask gradients.

A program takes a tile of P blocks with SIZE elements each. Where the elements lie is compile-time (`SHAPE`):

* ``flat``: block b is elements b * length ... of the flattened tensor (groups that divide the last axis, whole rows, the
  whole tensor). With CHUNKED a block is larger than a tile, and the second grid axis counts blocks.
* ``columns``: blocks run along an axis that is not the last; P neighbouring columns make a tile, so that memory is read in
  rows. See `columns`.
* ``tiles``: blocks of rows x INNER, and rows with a short last block.

With CHUNKED a block is larger than a tile, and neighbouring programs take its parts.

What happens is a `Job`: where scales come from (the tile, a statistic that an earlier pass left, the caller) and what is
written. Blocks too large for one tile take two passes: the first leaves statistics by atomic maximum on bit patterns, the
second reads x again, in reverse order, since the end of x is what the L2 cache still holds.
"""

import triton
import triton.language as tl

from fast.kernels.quantize.columns import column_places
from fast.kernels.quantize.saturation import clip_tile, note_clipped
from fast.kernels.rules.bits import bits_of, float_of, narrow, order_key, read, widened
from fast.kernels.rules.block_scales import choose
from fast.kernels.rules.dequantized import dequantize_tile
from fast.kernels.rules.packing import store_packed
from fast.kernels.rules.scaled import element_codes
from fast.kernels.rules.scales import floored, loaded_scale, outer_scale
from fast.kernels.rules.second_level import double_scale, leave_averages, quantize_groups
from fast.kernels.rules.statistics import absmax, block_absmax, bound, value_range
from fast.kernels.rules.values import combined, loaded_zero, passed_on, saturated, values
from fast.kernels.scheme.constants import Constant
from fast.kernels.sm90.bf16x2 import floats, set_aside
from fast.kernels.sm90.bit_tricks import inverse
from fast.kernels.sm90.fast_codes import (
    finished,
    kept_where,
    multiplier,
    rounded_values,
    store_codes,
    store_words,
)
from fast.kernels.sm90.fp4 import (
    larger_pair,
    largest_of_block,
    largest_of_pairs,
    load_pairs,
    side_by_side,
    words_of_pairs,
)
from fast.kernels.sm90.fp6 import store_sixes
from fast.kernels.sm90.int_asymmetric import load_segments, range_of_segments, store_segments
from fast.kernels.sm90.pack_32 import load_groups
from fast.kernels.sm90.stochastic_rounding import store_drawn


class Job(Constant):
    """What a launch does.

    source: "tile", "statistic" or "given" scales. outer: "", "statistic" or "given". codes, scales, statistic: what is
    written. output: dtype name of dequantized values, or "". gradient: y = g where the element did not saturate.
    dequantize: codes are read, not x. packed: codes are packed. words: stochastic rounding. tiled: scales are written in
    the tiles of `reference.quantize.tiled_scales`, and `stride` is the number of blocks in a row. pairs: x is read in
    pairs of bfloat16. level: "averages" or "groups", where scales that are quantized themselves are averaged, and
    quantized (`second_level`). exact: scales that are quantized themselves divide elements as they are, below the floor or
    not. clipped: "note": which blocks reach beyond the codes is written to `codes`; "gradient": g is masked in place by
    such notes. parts, share: the power of two above the number of averages, and 1 over that above the number of scales.
    """


def job(
    *, source: str = "tile", outer: str = "", codes: bool = False, scales: bool = False, statistic: bool = False,
    output: str = "", gradient: bool = False, dequantize: bool = False, packed: bool = False, exact: bool = False,
    reverse: bool = False, tiled: bool = False, pairs: bool = False, level: str = "", parts: int = 1, share: float = 1.0,
    clipped: str = "",
) -> Job:  # fmt: skip
    """A `Job` with the parts that a launch needs."""
    return Job(
        source=source, outer=outer, codes=codes, scales=scales, statistic=statistic, output=output, gradient=gradient,
        dequantize=dequantize, packed=packed, exact=exact, reverse=reverse,
        tiled=tiled, pairs=pairs, level=level, parts=parts, share=share, clipped=clipped,
    )  # fmt: skip


@triton.jit
def all_of(SIZE: tl.constexpr, P: tl.constexpr):
    """A mask that the compiler drops."""
    return tl.full((P, SIZE), 1, tl.int1)


@triton.jit
def in_block(SIZE: tl.constexpr, INNER: tl.constexpr, TURNED: tl.constexpr):
    """Paths in a block, (1, SIZE), row by row; TURNED: of a rectangle with rows of INNER, column by column."""
    i = tl.arange(0, SIZE)[None, :]
    if TURNED:
        HEIGHT: tl.constexpr = SIZE // INNER
        i = i % HEIGHT * INNER + i // HEIGHT
    return i


@triton.jit
def block_places(
    count, columns, rows, length, limit, chunks, lead_stride, row_stride, column_stride, inner_row, inner_column,
    SHAPE: tl.constexpr, CHUNKED: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr, REVERSE: tl.constexpr,
    SIZE: tl.constexpr, INNER: tl.constexpr, P: tl.constexpr, TURNED: tl.constexpr = False,
):  # fmt: skip
    """(offsets (P, SIZE), which exist, block number (P, 1), which exist, first chunk). TURNED: see `in_block`."""
    program = tl.program_id(0)
    if REVERSE:
        program = tl.num_programs(0) - 1 - program
    i = in_block(SIZE, INNER, TURNED)
    p = tl.arange(0, P)[:, None]
    chunk = 0
    if CHUNKED and SHAPE == "flat":
        chunk, program = program % chunks, program // chunks
        i = i + (chunk.to(tl.int64) if WIDE else chunk) * SIZE
    if SHAPE == "flat":
        block = p + program * P
        at = (block.to(tl.int64) if WIDE else block) * length + i
        inside = all_of(SIZE, P)
        if MASKED:
            inside = (block < count) & (i < length) & (at < limit)
        return at, inside, block, block < count, chunk == 0
    elif SHAPE == "columns":
        return column_places(
            program, columns, rows, length, limit, chunks, lead_stride, row_stride, inner_row,
            CHUNKED, MASKED, WIDE, SIZE, INNER, P,
        )  # fmt: skip
    else:
        block = p + program * P
        column, rest = block % columns, block // columns
        row, lead = rest % rows, rest // rows
        base = (lead.to(tl.int64) if WIDE else lead) * lead_stride
        base += (row.to(tl.int64) if WIDE else row) * row_stride + column * column_stride
        r, c = i // INNER, i % INNER
        at = base + (r.to(tl.int64) if WIDE else r) * inner_row + c * inner_column
        height: tl.constexpr = SIZE // INNER
        inside = all_of(SIZE, P)
        if MASKED:
            inside = (block < count) & (row * height + r < limit) & (column * INNER + c < length)
        return at, inside, block, block < count, chunk == 0


@triton.jit
def blocks_kernel(
    x, g, words, statistic, outer_statistic, outer, scale, zero, codes, y,
    count, columns, rows, length, limit, chunks, lead_stride, row_stride, column_stride, inner_row, inner_column, stride,
    RULE: tl.constexpr, JOB: tl.constexpr, SHAPE: tl.constexpr, CHUNKED: tl.constexpr, MASKED: tl.constexpr,
    WIDE: tl.constexpr, SIZE: tl.constexpr, INNER: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Run a job on a tile; see the module."""
    at, inside, block, exists, first = block_places(
        count, columns, rows, length, limit, chunks, lead_stride, row_stride, column_stride, inner_row, inner_column,
        SHAPE, CHUNKED, MASKED, WIDE, JOB.reverse, SIZE, INNER, P,
    )  # fmt: skip
    if WIDE and (JOB.packed or JOB.pairs):
        # Packed codes of many blocks are more bytes than int32 counts, and pairs of numbers may be more than that.
        block = block.to(tl.int64)
    if JOB.level == "averages":
        leave_averages(x, statistic, at, inside, block, exists, RULE)
    elif JOB.level == "groups":
        quantize_groups(x, statistic, scale, outer, zero, at, inside, block, exists, limit, rows, RULE, JOB)
    elif JOB.dequantize:
        dequantize_tile(codes, scale, outer, zero, y, at, inside, block, exists, RULE, JOB, SIZE)
    elif JOB.pairs and RULE.ranged:
        _segments_tile(x, codes, scale, zero, block, exists, stride, RULE, JOB, SIZE)
    elif JOB.pairs:
        _pairs_tile(
            x, codes, scale, outer, outer_statistic, at, inside, block, exists, stride, RULE, JOB, SIZE
        )
    elif JOB.clipped == "gradient":
        clip_tile(x, g, codes, at, inside, block, exists, stride, RULE, JOB)
    else:
        # Packed integers and stretched levels leave as words of 32 codes, which a thread makes if it has their numbers.
        GROUPS: tl.constexpr = JOB.packed and RULE.digits != "" and not MASKED and SIZE % 32 == 0
        tile = load_groups(x, block, SIZE) if GROUPS else read(x + at, inside)
        if SHAPE == "columns":
            # Neighbours in a register are not of one block.
            tile = widened(tile, RULE.signs_nan)
        if JOB.statistic:
            _leave_statistic(tile, inside, statistic, block, exists, stride, RULE, JOB)
        else:
            quantize_tile(
                tile, g, words, codes, scale, outer, zero, statistic, outer_statistic, y, at, inside, block, exists,
                first, stride, RULE, JOB,
            )  # fmt: skip


@triton.jit
def _leave_statistic(tile, inside, statistic, block, exists, stride, RULE: tl.constexpr, JOB: tl.constexpr):
    """Atomic maxima of what this tile sees: magnitudes, and for ranges the keys of minimum and maximum."""
    v = widened(tile, RULE.signs_nan)
    if JOB.outer == "statistic":
        # Over all elements: one number, and in house schemes only finite ones count.
        largest = tl.max(absmax(v, RULE.house, RULE.native), axis=0)
        tl.atomic_max(statistic + tl.zeros_like(largest), largest, sem="relaxed")
    elif RULE.level.statistic == "absmax":
        tl.atomic_max(statistic + block, absmax(v, False, RULE.native), mask=exists, sem="relaxed")
    else:
        largest, low, high = value_range(tile, inside, RULE.signs_nan, RULE.with_zero, RULE.native)
        tl.atomic_max(statistic + block, largest, mask=exists, sem="relaxed")
        tl.atomic_min(statistic + stride + block, order_key(low), mask=exists, sem="relaxed")
        tl.atomic_max(statistic + 2 * stride + block, order_key(high), mask=exists, sem="relaxed")


@triton.jit
def _range(tile, inside, statistic, block, exists, stride, RULE: tl.constexpr, JOB: tl.constexpr):
    """(pattern of the largest magnitude, minimum, maximum) of each block."""
    MINMAX: tl.constexpr = RULE.level.statistic != "absmax"
    if JOB.source == "statistic":
        largest = read(statistic + block, exists)
        if MINMAX:
            low = order_key(tl.load(statistic + stride + block, mask=exists, other=0))
            high = order_key(tl.load(statistic + 2 * stride + block, mask=exists, other=0))
    elif MINMAX:
        largest, low, high = value_range(tile, inside, RULE.signs_nan, RULE.with_zero, RULE.native)
    else:
        largest = block_absmax(widened(tile, RULE.signs_nan), RULE.native)
    if RULE.ranged:
        return largest, float_of(low), float_of(high)
    elif MINMAX:
        return largest, bound(low, largest, RULE.with_zero, True), bound(high, largest, RULE.with_zero, False)
    else:
        return largest, float_of(largest), float_of(largest)


@triton.jit
def quantize_tile(
    tile, g, words, codes, scale, outer, zero, statistic, outer_statistic, y, at, inside, block, exists, first, stride,
    RULE: tl.constexpr, JOB: tl.constexpr,
):  # fmt: skip
    """Scales of a tile's blocks as the job says, then what it writes of the tile. g: gradients, where it is about those."""
    VALUED: tl.constexpr = JOB.output != "" and RULE.same_values
    if RULE.has_same and JOB.source != "given" and (JOB.codes or VALUED):
        _tile_of_ordinary_blocks(
            tile, g, words, codes, scale, outer, zero, statistic, outer_statistic, y, at, inside, block, exists, first, stride,
            RULE, JOB,
        )  # fmt: skip
    else:
        _tile(
            tile, g, words, codes, scale, outer, zero, statistic, outer_statistic, y, at, inside, block, exists, first, stride,
            RULE, JOB,
        )  # fmt: skip


@triton.jit
def _tile_of_ordinary_blocks(
    tile, g, words, codes, scale, outer, zero, statistic, outer_statistic, y, at, inside, block, exists, first, stride,
    RULE: tl.constexpr, JOB: tl.constexpr,
):  # fmt: skip
    """A tile by the sequences of `RULE.same` where all of its blocks are ordinary, else by the rules of the record."""
    later = set_aside(tile, RULE.native and RULE.zero != "")
    g_outer = _outer(outer, outer_statistic, RULE, JOB)
    largest, low, high = _range(tile, inside, statistic, block, exists, stride, RULE, JOB)
    if are_ordinary(largest, g_outer, exists, RULE):
        _, s, z, kept = choose(
            largest, low, high, g_outer, scale, zero, block, exists & first, stride, RULE.same, JOB
        )
        v = floats(later, RULE.native) if RULE.zero != "" else widened(tile)
        _store_hot(codes, y, at, inside, block, exists, v, g_outer, s, z, kept, RULE.same, JOB)
    else:
        e, s, z, kept = choose(
            largest, low, high, g_outer, scale, zero, block, exists & first, stride, RULE, JOB
        )
        v = widened(tile, RULE.signs_nan)
        _general_tile(v, g, words, codes, y, at, inside, block, exists, e, s, z, g_outer, g_outer, RULE, JOB)


@triton.jit
def are_ordinary(largest, outer, exists, RULE: tl.constexpr):
    """Whether all blocks of a tile are ordinary (`scheme.ordinary_blocks`), by the patterns of their largest magnitudes."""
    S: tl.constexpr = RULE.same
    beyond = largest - S.least
    if S.zero_blocks:
        beyond = tl.where(largest == 0, 0, beyond)
    beyond = tl.where(exists, beyond, 0).to(tl.uint32, bitcast=True)
    made = tl.max(tl.reshape(beyond, (beyond.numel,)), axis=0) <= S.span
    if RULE.has_outer:
        made = made & ((bits_of(outer) - S.outer_least).to(tl.uint32, bitcast=True) <= S.outer_span)
    return made


@triton.jit
def _store_hot(
    codes, y, at, inside, block, exists, v, outer, s, z, kept, RULE: tl.constexpr, JOB: tl.constexpr
):
    """Codes and values by the sequences of `fast_codes`, under scales that come from the tensor."""
    divisor, m = s, multiplier(s, kept, z, RULE)
    if RULE.on_ordinary and RULE.has_outer and RULE.outer_order == "encode":
        divisor, m = z, inverse(z)
    if JOB.codes:
        store_codes(codes, at, inside, block, exists, v, m, divisor, z, RULE, JOB.packed)
    if JOB.output != "":
        c = combined(s, outer, RULE, "float32")
        value = rounded_values(v, m, divisor, z, RULE)
        tl.store(y + at, finished(value * c, c, JOB.output), mask=inside)


@triton.jit
def _tile(
    tile, g, words, codes, scale, outer, zero, statistic, outer_statistic, y, at, inside, block, exists, first, stride,
    RULE: tl.constexpr, JOB: tl.constexpr,
):  # fmt: skip
    """A tile by the sequences of the record for any block, or by its rules."""
    later = set_aside(tile, RULE.native and RULE.zero != "")
    g_outer = _outer(outer, outer_statistic, RULE, JOB)
    if JOB.source == "given" and RULE.two_level:
        s = double_scale(scale, outer, zero, block, exists, RULE, "float32")
        divisor_outer, kept, z, e = g_outer, s, s, s
        if RULE.house and RULE.codes_from != "exact" and not JOB.exact:
            e = floored(s, RULE.level)
    elif JOB.source == "given":
        s, e, divisor_outer, z = loaded_scales(scale, zero, g_outer, block, exists, RULE)
        if RULE.codes_from == "exact":
            e = s
        kept = s
    else:
        divisor_outer = g_outer
        largest, low, high = _range(tile, inside, statistic, block, exists, stride, RULE, JOB)
        e, s, z, kept = choose(
            largest, low, high, g_outer, scale, zero, block, exists & first, stride, RULE, JOB
        )
        if JOB.clipped == "note":
            note_clipped(codes, low, high, s, z, kept, block, exists & first, RULE)
    # After the range, which is taken of pairs: floats would wait for it in twice the registers.
    if RULE.zero != "" and not RULE.signs_nan:
        v = floats(later, RULE.native)
    else:
        v = widened(tile, RULE.signs_nan)
    # The sequences make values as the house does.
    VALUES: tl.constexpr = JOB.output != "" and RULE.dequantize == "float32"
    if RULE.hot != "" and JOB.source != "given" and (JOB.codes or VALUES):
        _store_hot(codes, y, at, inside, block, exists, v, g_outer, s, z, kept, RULE, JOB)
    elif RULE.drawn and JOB.source != "given" and JOB.codes:
        m = multiplier(s, kept, z, RULE)
        drawn = read(words + at, inside)
        store_drawn(codes, at, inside, block, exists, v, m, drawn, s, RULE, JOB.packed)
    elif JOB.codes or JOB.output != "" or JOB.gradient:
        _general_tile(
            v, g, words, codes, y, at, inside, block, exists, e, s, z, divisor_outer, g_outer, RULE, JOB
        )


@triton.jit
def _pairs_tile(
    x, codes, scale, outer, outer_statistic, at, inside, block, exists, stride, RULE: tl.constexpr, JOB: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """4-bit and packed 6-bit floats of bfloat16 in blocks of 16 or 32, each in one thread; see `fours` and `sixes`."""
    PARTS: tl.constexpr = SIZE // 8
    g_outer = _outer(outer, outer_statistic, RULE, JOB)
    a, b = load_pairs(x, block, SIZE, 0, PARTS), load_pairs(x, block, SIZE, 1, PARTS)
    top = larger_pair(largest_of_pairs(a), largest_of_pairs(b))
    if PARTS == 4:
        c, d = load_pairs(x, block, SIZE, 2, PARTS), load_pairs(x, block, SIZE, 3, PARTS)
        top = larger_pair(top, larger_pair(largest_of_pairs(c), largest_of_pairs(d)))
    largest = largest_of_block(top)
    if PARTS == 2:
        c, d = a, b
    if not RULE.has_same:
        _store_pairs(codes, a, b, c, d, largest, g_outer, scale, block, exists, stride, RULE, JOB, PARTS)
    elif are_ordinary(largest, g_outer, exists, RULE):
        _store_pairs(codes, a, b, c, d, largest, g_outer, scale, block, exists, stride, RULE.same, JOB, PARTS)
    else:
        e, s, z, _ = choose(
            largest,
            float_of(largest),
            float_of(largest),
            g_outer,
            scale,
            None,
            block,
            exists,
            stride,
            RULE,
            JOB,
        )
        v = widened(read(x + at, inside), RULE.signs_nan)
        _general_tile(
            v, None, None, codes, None, at, inside, block, exists, e, s, z, g_outer, g_outer, RULE, JOB
        )


@triton.jit
def _store_pairs(
    codes, a, b, c, d, largest, outer, scale, block, exists, stride, RULE: tl.constexpr, JOB: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Codes of the parts of blocks, as words."""
    _, s, z, kept = choose(largest, largest, largest, outer, scale, None, block, exists, stride, RULE, JOB)
    divisor, m = s, multiplier(s, kept, z, RULE)
    if RULE.on_ordinary and RULE.has_outer and RULE.outer_order == "encode":
        divisor, m = z, inverse(z)
    if RULE.bits == 6:
        store_sixes(codes, a, b, c, d, m, s, block, exists, RULE)
    else:
        keep = kept_where(s, -1)
        words = words_of_pairs(a, b, m, divisor, keep, RULE, JOB.packed)
        if PARTS == 4:
            words = side_by_side(words, words_of_pairs(c, d, m, divisor, keep, RULE, JOB.packed))
        store_words(codes, words, block, exists)


@triton.jit
def _segments_tile(
    x, codes, scale, zero, block, exists, stride, RULE: tl.constexpr, JOB: tl.constexpr, SIZE: tl.constexpr
):
    """Packed 4-bit integers with zero points, of 16-bit numbers, 32 of a block in each thread; see `ranges`."""
    a, b = load_segments(x, block, SIZE, 0), load_segments(x, block, SIZE, 1)
    c, d = load_segments(x, block, SIZE, 2), load_segments(x, block, SIZE, 3)
    BRAIN: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    largest, low, high = range_of_segments(a, b, c, d, BRAIN, SIZE)
    _, s, z, m = choose(
        largest, float_of(low), float_of(high), None, scale, zero, block, exists, stride, RULE, JOB
    )
    store_segments(codes, a, b, c, d, m, s, z, block, BRAIN, SIZE)


@triton.jit
def loaded_scales(scale, zero, outer, block, exists, RULE: tl.constexpr):
    """(given scale, what elements are divided by, the same of the outer scale, zero point).

    Elements are divided by a scale that is raised to the floor, so that a scale of 0 makes no NaN.
    """
    s = loaded_scale(read(scale + block, exists), RULE.level)
    e, divisor_outer = s, outer
    if RULE.house and not RULE.power_of_two:
        e = floored(s, RULE.level)
        if RULE.has_outer:
            divisor_outer = floored(outer, RULE.outer)
    z = s
    if RULE.zero != "":
        z = loaded_zero(read(zero + block, exists), RULE)
    return s, e, divisor_outer, z


@triton.jit
def _general_tile(
    v, g, words, codes, y, at, inside, block, exists, e, s, z, divisor_outer, outer, RULE: tl.constexpr,
    JOB: tl.constexpr,
):  # fmt: skip
    """Codes, values or masked gradients by the rules of any record."""
    divisor = e if RULE.codes_from == "exact" or JOB.source == "given" else s
    drawn = None
    if RULE.rounding == "stochastic":
        drawn = read(words + at, inside)
    made = element_codes(v, divisor, divisor_outer, z, drawn, RULE)
    if JOB.packed:
        store_packed(codes, made, block, exists, RULE.bits)
    elif JOB.codes:
        tl.store(codes + at, made.to(codes.dtype.element_ty), mask=inside)
    if JOB.gradient:
        dy = read(g + at, inside)
        lost = saturated(v, made, divisor, divisor_outer, RULE)
        tl.store(y + at, passed_on(dy, lost, RULE.dtype), mask=inside)
    elif JOB.output != "":
        PRECISION: tl.constexpr = JOB.output if RULE.dequantize == "target" else "float32"
        value = values(made, combined(s, outer, RULE, PRECISION), z, RULE, PRECISION)
        tl.store(y + at, narrow(value, JOB.output, RULE.dequantize == "float32"), mask=inside)


@triton.jit
def _outer(outer, outer_statistic, RULE: tl.constexpr, JOB: tl.constexpr):
    """The scale over all elements, float32; 1 where there is none."""
    if not RULE.has_outer:
        return tl.full((), 1.0, tl.float32)
    elif JOB.outer == "statistic":
        made = outer_scale(tl.load(outer_statistic), RULE)
        if tl.program_id(0) == 0:
            tl.store(outer, made)
        return made
    else:
        return loaded_scale(tl.load(outer), RULE.outer)
