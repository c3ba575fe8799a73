"""What lanes of `triton_sparse24_small_m_kernel` read of the weight: codes, metadata and scales, as they are stored.

A turn is 128 columns, of which a lane of four has 32: 8 bytes of codes of a row, of 16 of metadata. Wide, two turns are 256
columns, of which it has 64, the first half in the first turn: 16 bytes of codes, a scale for every 128 columns of both. That is
a read where there are two of half the width: of a lane's reads each is of as many lines of the cache as a warp has rows.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from fast.kernels.triton_gemv.gluon import as_words, axis_range

#: Columns of a turn of one warp, of a lane in it, and rows of an instruction.
TURN, PART, ROWS = gl.constexpr(128), gl.constexpr(32), gl.constexpr(16)
#: Indices 2, 3 in every group.
NOTHING_KEPT = gl.constexpr(-286331154)


@gluon.jit
def weight_pointers(
    codes, metadata, first, k, rows, LENGTH: gl.constexpr, FEW: gl.constexpr, WIDE: gl.constexpr, TILE: gl.constexpr
):  # fmt: skip
    """Pointers to words of codes (0 and 1 of row g, of row g + 8; wide 0 to 3), and to the four words of metadata of either row
    (wide eight). TILE: of four or eight elements a lane."""
    EACH: gl.constexpr = 4 if WIDE else 2
    lane, which = axis_range(32, 1, 3, TILE), axis_range(2 * EACH, 2, 3, TILE)
    row, one, other = lane // 4 + which // EACH * 8, lane // 4, lane // 4 + 8
    if FEW:
        row, one, other = gl.minimum(row, rows - 1), gl.minimum(one, rows - 1), gl.minimum(other, rows - 1)
    words = as_words(codes) + first.to(gl.int64) * (LENGTH // 16)
    indices = as_words(metadata) + first.to(gl.int64) * (LENGTH // 32)
    words += row * (LENGTH // 16) + (k // 16 + (lane % 4 * EACH + which % EACH))
    at = k // 32 + which
    return words, indices + (one * (LENGTH // 32) + at), indices + (other * (LENGTH // 32) + at)


@gluon.jit
def read_weight(
    words, one, other, scale, first, rows, k, step, LENGTH: gl.constexpr, BLOCK: gl.constexpr, PARTS: gl.constexpr,
    WARPS_K: gl.constexpr, CHUNKS: gl.constexpr, TILES: gl.constexpr, WHOLE: gl.constexpr, EXISTS: gl.constexpr,
    FEW: gl.constexpr, WIDE: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Codes, metadata of rows g and g + 8, and scales of a step, for each turn and row tile, all reads before anything else.
    EXISTS: the step and all of its columns do; WHOLE: all of them do if the step does."""
    STEP: gl.constexpr = TURN * CHUNKS * WARPS_K
    # Turns of a read.
    TWO: gl.constexpr = 2 if WIDE else 1
    READ: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32, 1], [WARPS_K, 1, 1], [2, 1, 0])
    read = ()
    for chunk in gl.static_range(0, CHUNKS, TWO):
        beyond = LENGTH - TURN * chunk - step * STEP - k
        second = ()
        for tile in gl.static_range(TILES):
            w = step * (STEP // 16) + (TURN // 16 * chunk + ROWS * tile * (LENGTH // 16))
            m = step * (STEP // 32) + (TURN // 32 * chunk + ROWS * tile * (LENGTH // 32))
            s = _scales(
                scale, first, rows, step, TURN * chunk, ROWS * tile, LENGTH, BLOCK, PARTS, WARPS_K, TURN * CHUNKS, WHOLE,
                EXISTS, FEW, WIDE, TILE,
            )  # fmt: skip
            if WIDE:
                c, m0, m1 = _loaded(words + w, one + m, other + m, beyond, True, EXISTS, WIDE, READ)
                c0, c1 = _halves(gl.reshape(c, [WARPS_K, 32, 2, 2, 2]), True, WARPS_K, TILE)
                m00, m01 = _halves(gl.reshape(m0, [WARPS_K, 32, 4, 2]), False, WARPS_K, TILE)
                m10, m11 = _halves(gl.reshape(m1, [WARPS_K, 32, 4, 2]), False, WARPS_K, TILE)
                read = read + (c0, m00, m10, s)  # noqa: RUF005
                second = second + (c1, m01, m11, s)  # noqa: RUF005
            else:
                c, m0, m1 = _loaded(words + w, one + m, other + m, beyond, WHOLE, EXISTS, WIDE, TILE)
                read = read + (c, m0, m1, s)  # noqa: RUF005
        read = read + second
    return read


@gluon.jit
def _halves(v, ARE_CODES: gl.constexpr, WARPS_K: gl.constexpr, TILE: gl.constexpr):
    """Of what a lane has of two turns that of each: of codes (row, turn, word), of metadata (lane of four, turn)."""
    if ARE_CODES:
        v = gl.permute(v, (0, 1, 2, 4, 3))
    one, other = gl.split(v)
    one, other = gl.reshape(one, [WARPS_K, 32, 4]), gl.reshape(other, [WARPS_K, 32, 4])
    return gl.convert_layout(one, TILE, assert_trivial=True), gl.convert_layout(
        other, TILE, assert_trivial=True
    )


@gluon.jit
def _loaded(
    words, one, other, beyond, WHOLE: gl.constexpr, EXISTS: gl.constexpr, WIDE: gl.constexpr, TILE: gl.constexpr
):  # fmt: skip
    """What `weight_pointers` points to. beyond: how far the turn is from the end of a row."""
    if EXISTS:
        c = gl.load(words, eviction_policy="evict_first")
        return c, gl.load(one, eviction_policy="evict_first"), gl.load(other, eviction_policy="evict_first")
    else:
        lane, which = axis_range(32, 1, 3, TILE), axis_range(8 if WIDE else 4, 2, 3, TILE)
        has_codes = (0 if WHOLE else PART * (lane % 4)) + (lane + which) * 0 < beyond
        has_indices = (0 if WHOLE else PART * which) + (lane + which) * 0 < beyond
        c = gl.load(words, mask=has_codes, other=0, eviction_policy="evict_first")
        m0 = gl.load(one, mask=has_indices, other=NOTHING_KEPT, eviction_policy="evict_first")
        return c, m0, gl.load(other, mask=has_indices, other=NOTHING_KEPT, eviction_policy="evict_first")


@gluon.jit
def _scales(
    scale, first, rows, step, AT: gl.constexpr, ROW: gl.constexpr, LENGTH: gl.constexpr, BLOCK: gl.constexpr,
    PARTS: gl.constexpr, WARPS_K: gl.constexpr, SPAN: gl.constexpr, WHOLE: gl.constexpr, EXISTS: gl.constexpr,
    FEW: gl.constexpr, WIDE: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """The scale of each sum of a lane: rows g and g + 8 from ROW on, columns 2 t and 2 t + 1."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 2, 2], [1, 32, 1, 1], [WARPS_K, 1, 1, 1], [3, 2, 1, 0])
    # Columns of a lane that have a scale each; blocks of a row.
    APART: gl.constexpr = 1 if PARTS == 1 else 2
    BLOCKS: gl.constexpr = LENGTH // BLOCK
    COLUMNS_OF_ALL: gl.constexpr = 2 * TURN if WIDE else TURN
    STEP: gl.constexpr = SPAN * WARPS_K
    lane, half = axis_range(32, 1, 4, LAYOUT), axis_range(2, 2, 4, LAYOUT)
    row = lane // 4 + half * 8
    if FEW:
        row = gl.minimum(row, rows - 1)
    part = axis_range(APART, 3, 4, LAYOUT) + lane * 0
    if PARTS > 2:
        part = part + lane % 2 * 2
    begin = axis_range(WARPS_K, 0, 4, LAYOUT) * SPAN + (COLUMNS_OF_ALL // PARTS * part + AT)
    blocks = scale + first.to(gl.int64) * BLOCKS
    if PARTS > 1:
        # Those of columns 2 t and 2 t + 1 are neighbours: one read.
        own = axis_range(WARPS_K, 0, 4, LAYOUT) * (SPAN // BLOCK) + part
        blocks = blocks + (row * BLOCKS + own) + (step * (STEP // BLOCK) + AT // BLOCK + ROW * BLOCKS)
    elif STEP % BLOCK == 0:
        blocks = blocks + (row * BLOCKS + begin // BLOCK) + (step * (STEP // BLOCK) + ROW * BLOCKS)
    else:
        blocks = blocks + (row * BLOCKS + (begin + step * STEP) // BLOCK + ROW * BLOCKS)
    if EXISTS:
        s = gl.load(blocks)
    else:
        s = gl.load(blocks, mask=begin + step * STEP + row * 0 < LENGTH, other=0.0)
    s = gl.broadcast(s.to(gl.float32), gl.zeros([WARPS_K, 32, 2, 2], gl.int32, LAYOUT))[0]
    return gl.convert_layout(gl.reshape(s, [WARPS_K, 32, 4]), TILE, assert_trivial=True)
