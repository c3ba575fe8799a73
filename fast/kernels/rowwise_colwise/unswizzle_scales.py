"""Tiled scales of two matrices to plain ones: the second half of `both.mx_both` for plain scales.

A tile of codes has 4 scales in each row, and as many in each column. Written row by row they fill an eighth of a 32-byte sector
of memory (times: reports/LOG.md). In the tiled layout they lie side
by side, and putting them in rows afterwards moves a thirty-second of the bytes, in whole sectors.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.launch.call import Call
from fast.launch.launcher import CompiledLaunch

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
