"""What lanes of `mma_sparse_kernel` read of the weight: codes, metadata and scales, as they are stored.

A turn is 128 columns, of which a lane of four has 32: 8 bytes of codes of a row, of 16 of metadata. Wide, two turns are 256
columns, of which it has 64, the first half in the first turn: 16 bytes of codes, a scale for every 128 columns of both. That is
a read where there are two of half the width: of a lane's reads each is of as many lines of the cache as a warp has rows.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from fast.kernels.linear.gluon import as_words, axis_range

#: Columns of a turn of one warp, of a lane in it, and rows of an instruction.
TURN, PART, ROWS = gl.constexpr(128), gl.constexpr(32), gl.constexpr(16)
#: Indices 2, 3 in every group.
NOTHING_KEPT = gl.constexpr(-286331154)


@gluon.jit
def weight_pointers(
    codes, metadata, first, k, rows, LENGTH: gl.constexpr, FEW: gl.constexpr, TILE: gl.constexpr
):  # fmt: skip
    """Pointers to words of codes (0 and 1 of row g, of row g + 8), and to the four words of metadata of either row."""
    lane, which = axis_range(32, 1, 3, TILE), axis_range(4, 2, 3, TILE)
    row, one, other = lane // 4 + which // 2 * 8, lane // 4, lane // 4 + 8
    if FEW:
        row, one, other = gl.minimum(row, rows - 1), gl.minimum(one, rows - 1), gl.minimum(other, rows - 1)
    words = as_words(codes) + first.to(gl.int64) * (LENGTH // 16)
    indices = as_words(metadata) + first.to(gl.int64) * (LENGTH // 32)
    words += row * (LENGTH // 16) + (k // 16 + (lane % 4 * 2 + which % 2))
    at = k // 32 + which
    return words, indices + (one * (LENGTH // 32) + at), indices + (other * (LENGTH // 32) + at)


@gluon.jit
def read_weight(
    words, one, other, scale, first, rows, k, step, LENGTH: gl.constexpr, BLOCK: gl.constexpr, PARTS: gl.constexpr,
    WARPS_K: gl.constexpr, CHUNKS: gl.constexpr, TILES: gl.constexpr, WHOLE: gl.constexpr, EXISTS: gl.constexpr,
    FEW: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Codes, metadata of rows g and g + 8, and scales of a step, for each turn and row tile, all reads before anything else.
    EXISTS: the step and all of its columns do; WHOLE: all of them do if the step does."""
    STEP: gl.constexpr = TURN * CHUNKS * WARPS_K
    read = ()
    for chunk in gl.static_range(CHUNKS):
        beyond = LENGTH - TURN * chunk - step * STEP - k
        for tile in gl.static_range(TILES):
            w = step * (STEP // 16) + (TURN // 16 * chunk + ROWS * tile * (LENGTH // 16))
            m = step * (STEP // 32) + (TURN // 32 * chunk + ROWS * tile * (LENGTH // 32))
            c, m0, m1 = _loaded(words + w, one + m, other + m, beyond, WHOLE, EXISTS, TILE)
            s = _scales(
                scale, first, rows, step, TURN * chunk, ROWS * tile, LENGTH, BLOCK, PARTS, WARPS_K, TURN * CHUNKS, WHOLE,
                EXISTS, FEW, TILE,
            )  # fmt: skip
            read = read + (c, m0, m1, s)  # noqa: RUF005
    return read


@gluon.jit
def _loaded(words, one, other, beyond, WHOLE: gl.constexpr, EXISTS: gl.constexpr, TILE: gl.constexpr):
    """What `weight_pointers` points to. beyond: how far the turn is from the end of a row."""
    if EXISTS:
        c = gl.load(words, eviction_policy="evict_first")
        return c, gl.load(one, eviction_policy="evict_first"), gl.load(other, eviction_policy="evict_first")
    else:
        lane, which = axis_range(32, 1, 3, TILE), axis_range(4, 2, 3, TILE)
        has_codes = (0 if WHOLE else PART * (lane % 4)) + (lane + which) * 0 < beyond
        has_indices = (0 if WHOLE else PART * which) + (lane + which) * 0 < beyond
        c = gl.load(words, mask=has_codes, other=0, eviction_policy="evict_first")
        m0 = gl.load(one, mask=has_indices, other=NOTHING_KEPT, eviction_policy="evict_first")
        return c, m0, gl.load(other, mask=has_indices, other=NOTHING_KEPT, eviction_policy="evict_first")


@gluon.jit
def _scales(
    scale, first, rows, step, AT: gl.constexpr, ROW: gl.constexpr, LENGTH: gl.constexpr, BLOCK: gl.constexpr,
    PARTS: gl.constexpr, WARPS_K: gl.constexpr, SPAN: gl.constexpr, WHOLE: gl.constexpr, EXISTS: gl.constexpr,
    FEW: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """The scale of each sum of a lane: rows g and g + 8 from ROW on, columns 2 t and 2 t + 1."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 2, 2], [1, 32, 1, 1], [WARPS_K, 1, 1, 1], [3, 2, 1, 0])
    # Columns of a lane that have a scale each; blocks of a row.
    APART: gl.constexpr = 1 if PARTS == 1 else 2
    BLOCKS: gl.constexpr = LENGTH // BLOCK
    STEP: gl.constexpr = SPAN * WARPS_K
    lane, half = axis_range(32, 1, 4, LAYOUT), axis_range(2, 2, 4, LAYOUT)
    row = lane // 4 + half * 8
    if FEW:
        row = gl.minimum(row, rows - 1)
    part = (lane % 4 * 2 + axis_range(APART, 3, 4, LAYOUT)) % PARTS
    begin = axis_range(WARPS_K, 0, 4, LAYOUT) * SPAN + (TURN // PARTS * part + AT)
    blocks = scale + first.to(gl.int64) * BLOCKS
    if STEP % BLOCK == 0:
        blocks = blocks + (row * BLOCKS + begin // BLOCK) + (step * (STEP // BLOCK) + ROW * BLOCKS)
    else:
        blocks = blocks + (row * BLOCKS + (begin + step * STEP) // BLOCK + ROW * BLOCKS)
    if EXISTS:
        s = gl.load(blocks)
    else:
        s = gl.load(blocks, mask=begin + step * STEP + row * 0 < LENGTH, other=0.0)
    s = gl.broadcast(s.to(gl.float32), gl.zeros([WARPS_K, 32, 2, 2], gl.int32, LAYOUT))[0]
    return gl.convert_layout(gl.reshape(s, [WARPS_K, 32, 4]), TILE, assert_trivial=True)
