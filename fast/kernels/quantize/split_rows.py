"""Rows under one scale that are no power of two, quantized as the pieces of `pieces`: 14336 = 8192 + 4096 + 2048.

A mask over 16384 elements would let an eighth of all threads compute for nothing. Each thread finds the largest magnitude of
what it has of all pieces, so that threads wait for one another once for a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import MAGNITUDE, bits_of
from fast.kernels.quantize.outputs import Outputs
from fast.kernels.rules.statistics import larger
from fast.kernels.tile.block_scales import choose_scales
from fast.kernels.tile.fast_codes import multiplier, store_codes

# Neighbours that a thread has: as many as it stores bytes at a time.
TOGETHER = tl.constexpr(16)


@triton.jit
def quantize_row(
    a, b, c, codes, scale, start, row, SCHEME: tl.constexpr, OP: tl.constexpr, C: tl.constexpr, THREADS: tl.constexpr
):  # fmt: skip
    """Codes and scale of a row that begins at `start`: float32 pieces of shape (1, length), C the last one's or 0."""
    A: tl.constexpr = a.shape[1]
    B: tl.constexpr = b.shape[1]
    top = tl.maximum(_largest_of_threads(a, THREADS), _largest_of_threads(b, THREADS))
    if C > 0:
        top = tl.maximum(top, _largest_of_threads(c, THREADS))
    largest = tl.max(tl.reshape(top, (1, THREADS)), axis=1, keep_dims=True)
    exists = tl.full((1, 1), 1, tl.int1)
    block = row + tl.zeros((1, 1), tl.int32)
    outer = tl.full((), 1.0, tl.float32)
    _, s, scale_code, prepared, z = choose_scales(
        largest, largest, largest, outer, scale, None, block, exists, 0, SCHEME, OP
    )
    inv_scale = multiplier(s, scale_code, prepared, SCHEME)
    _store(a, codes, start, 0, block, inv_scale, s, z, SCHEME, OP)
    _store(b, codes, start, A, block, inv_scale, s, z, SCHEME, OP)
    if C > 0:
        _store(c, codes, start, A + B, block, inv_scale, s, z, SCHEME, OP)


@triton.jit
def _largest_of_threads(v, THREADS: tl.constexpr):
    """Patterns of the largest magnitudes that the threads have of a piece, (THREADS,)."""
    MANY: tl.constexpr = v.shape[1] // THREADS
    EACH: tl.constexpr = MANY if MANY < TOGETHER else TOGETHER
    top = tl.reduce(tl.reshape(tl.abs(v), (MANY // EACH, THREADS, EACH)), 2, larger)
    return bits_of(tl.reduce(top, 0, larger)) & MAGNITUDE


@triton.jit
def _store(v, codes, start, offset, block, inv_scale, s, z, SCHEME: tl.constexpr, OP: tl.constexpr):
    at = start + offset + tl.arange(0, v.shape[1])[None, :]
    inside, exists = tl.full(v.shape, 1, tl.int1), tl.full((1, 1), 1, tl.int1)
    store_codes(codes, at, inside, block, exists, v, inv_scale, s, z, SCHEME, OP.packed)


def takes_row_pieces(made: Outputs) -> bool:
    """Whether rows may be quantized in pieces: to 8-bit floats, which leave in the layout in which 16-bit floats came.

    Integers move through shared memory on their way, and so the pieces cost more than a mask does (measured).
    """
    rule, scale = made.rule, made.problem.scheme.scale
    one = made.length == made.problem.blocks.shape[-1] and scale.statistic == "absmax"
    return one and rule.fast_path.value in ("e4m3", "e5m2") and not rule.power_of_two and not made.packed
