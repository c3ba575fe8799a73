"""Rows of X in the order in which lanes of `triton_sparse24_small_m_kernel` have them, so that a warp reads 512 bytes in a row.

In place a lane's pairs of inputs lie 16 bytes apart, those of eight rows in eight lines of the cache: sixteen reads of up to
eight lines for 128 columns of eight rows, which a program repeats for every 16 or 32 rows of the weight. Arranged they are four
reads of four lines. A word is a pair of inputs:

    (column tiles, turns, 4 registers of B, 32 lanes, 4 instructions of a turn)

Columns without a row, other parts of a row (see `mma_sparse`) and what lies beyond K are zeros.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from fast.kernels.triton_gemv.gluon import as_words, axis_range, wait_for_previous
from fast.kernels.triton_sparse24_small_m.mma_sparse import COLUMNS, WORDS_OF_TURN
from fast.kernels.triton_sparse24_small_m.weight_reads import PART, TURN

WARPS = gl.constexpr(4)


@gluon.jit
def arrange_kernel(
    x, arranged, count, LENGTH: gl.constexpr, BLOCK: gl.constexpr, TURNS: gl.constexpr, USE_PDL: gl.constexpr
):  # fmt: skip
    """A column tile of a turn: 8 columns by 128 of X (count, LENGTH); BLOCK: columns of a scale; TURNS: of `arranged`, those
    beyond LENGTH too. A warp has a register."""
    TILE: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
    PARTS: gl.constexpr = 1 if BLOCK >= TURN else TURN // BLOCK
    turn, tile = gl.program_id(0), gl.program_id(1)
    register, lane, at = axis_range(4, 0, 3, TILE), axis_range(32, 1, 3, TILE), axis_range(4, 2, 3, TILE)
    column = COLUMNS * tile + lane // 4
    # The lane whose codes this input meets: it has 32 columns of the turn.
    reader = lane % 4 // 2 + register % 2 * 2
    pair = PART // 2 * reader + lane % 2 + 4 * at + register // 2 * 2
    own = (reader // (4 // PARTS) == column % PARTS) & (column // PARTS < count)
    own = own & (TURN * turn + PART * reader + at * 0 < LENGTH)
    wait_for_previous(USE_PDL)
    word = gl.load(
        as_words(x) + (column // PARTS * (LENGTH // 2) + TURN // 2 * turn + pair), mask=own, other=0
    )
    gl.store(
        as_words(arranged) + ((tile * TURNS + turn) * WORDS_OF_TURN + register * 128 + lane * 4 + at), word
    )
