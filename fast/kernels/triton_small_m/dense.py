"""The dense weight of an arranged one, for products of more rows than `linear_small` takes: one reading, one writing.

Elements less zero points are exact in bfloat16 and float16 (`decode`); times the scale in float32, rounded once: the bits of
`dequantize` of the codes that were stored, which need not be restored first. So factors are no factors here: an outer scale
rounds them first.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from fast.kernels.bits import narrow
from fast.kernels.triton_small_m.decode import (
    half_elements,
    has_factors,
    own_scale,
    row_factors,
    spread,
    tile_codes,
    tile_elements,
    word_halves,
    words_before,
    words_of,
)
from fast.kernels.triton_small_m.product import lacking, zero_points_of
from fast.launch.launcher import FLOAT_NAMES, INT32, Call, CompiledLaunch, ceil_div, interpreted
from fast.scale_factors import ArrangedWeight, filled

#: Rows and columns of a program's tile, and its warps.
BLOCK_N, BLOCK_K, WARPS = 64, 128, 4
#: Programs along the last axis of a grid, at most.
GRID = 65535


@triton.jit
def _store(y, t, s, n, k, N: tl.constexpr, LENGTH: tl.constexpr, SIZE: tl.constexpr, OUT: tl.constexpr):
    """SIZE columns from k on of rows n: elements times scales that go with them."""
    column = k + tl.arange(0, SIZE)[None, :]
    result = narrow(t.to(tl.float32) * s, OUT, False)
    tl.store(
        y + (n[:, None].to(tl.int64) * LENGTH + column), result, mask=(n < N)[:, None] & (column < LENGTH)
    )


@triton.jit
def _scales(
    scale, n, k, ROWS: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, ELEMENT: tl.constexpr
):  # fmt: skip
    """Scales of SIZE columns from k on of rows n, of factors times the weight's own: rounded, as `dequantize` rounds them."""
    BLOCKS: tl.constexpr = SIZE // GROUP
    ADDED: tl.constexpr = lacking(ELEMENT, GROUP)
    block = k // GROUP + tl.arange(0, BLOCKS)[None, :]
    s = row_factors(scale + ROWS // 2, n[:, None], block, ROWS, GROUP) * ADDED[0] * own_scale(scale)
    s = tl.broadcast_to(s[:, :, None], (n.shape[0], BLOCKS, GROUP))
    return tl.reshape(s, (n.shape[0], SIZE))


@triton.jit
def arranged_dense_kernel(
    codes, scale, zero, y,
    N: tl.constexpr, LENGTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    ELEMENT: tl.constexpr, OUT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EXPERTS: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """A tile of y (N, LENGTH), of EXPERTS of (experts, N, LENGTH). Other arguments as of `triton_small_m_kernel`."""
    NB: tl.constexpr = BLOCK_N // 64
    KB: tl.constexpr = 2 if GROUP == 0 or GROUP >= 128 or has_factors(ELEMENT) else 1
    WORDS: tl.constexpr = words_of(ELEMENT)
    SPAN: tl.constexpr = 64 * KB
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    atoms = (tl.program_id(0) * NB + tl.arange(0, NB)).to(tl.int64)[:, None] * (COLUMNS // 64 * WORDS)
    words = codes + atoms + tl.arange(0, KB * WORDS)[None, :]
    if EXPERTS:
        expert = tl.program_id(2).to(tl.int64)
        BLOCKS: tl.constexpr = 1 if GROUP == 0 else (COLUMNS + GROUP - 1) // GROUP
        words += expert * (ROWS // 64 * (COLUMNS // 64 * WORDS))
        scale += expert * (
            ROWS // 2 * words_before(COLUMNS, GROUP) if has_factors(ELEMENT) else BLOCKS * ROWS
        )
        if zero is not None:
            zero += expert * (BLOCKS * ROWS // 2)
        y += expert * (N * LENGTH)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for piece in tl.static_range(BLOCK_K // SPAN):
        k = tl.program_id(1) * BLOCK_K + piece * SPAN
        w = tl.load(words + k // 64 * WORDS)
        if has_factors(ELEMENT):
            t = tile_elements(w, None, NB, KB, ELEMENT, "bfloat16")
            _store(y, t, _scales(scale, n, k, ROWS, SPAN, GROUP, ELEMENT), n, k, N, LENGTH, SPAN, OUT)
        elif ELEMENT == "nf4":
            # Levels are behind the scales; lanes that look up 16 neighbours do so at once.
            t = tl.load(scale + (COLUMNS // GROUP * ROWS) + tile_codes(w, NB, KB)).to(
                tl.float32, bitcast=True
            )
            s = tl.load(scale + k // GROUP * ROWS + n).to(tl.float32, bitcast=True)
            _store(y, t, s[:, None], n, k, N, LENGTH, SPAN, OUT)
        elif GROUP == 32:
            parts = word_halves(w, NB, ELEMENT)
            for half in tl.static_range(2):
                block = k // 32 + half
                less = None
                if zero is not None:
                    pairs = zero_points_of(zero, block, ROWS, NB, ELEMENT, "bfloat16")
                    less = spread(pairs, NB, 1, WORDS // 64)
                t = half_elements(parts[half], less, NB, ELEMENT, "bfloat16")
                _store(y, t, tl.load(scale + block * ROWS + n)[:, None], n, k + 32 * half, N, LENGTH, 32, OUT)
        else:
            block = 0 if GROUP == 0 else k // GROUP
            less = None
            if zero is not None:
                pairs = zero_points_of(zero, block, ROWS, NB, ELEMENT, "bfloat16")
                less = spread(pairs, NB, KB * WORDS // 512, 16)
            t = tile_elements(w, less, NB, KB, ELEMENT, "bfloat16")
            _store(y, t, tl.load(scale + block * ROWS + n)[:, None], n, k, N, LENGTH, SPAN, OUT)


def arranged_dense(w: ArrangedWeight, dtype: torch.dtype, *, key: Any = None) -> torch.Tensor | None:
    """The weight (N, K) in bfloat16, float16 or float32: `dequantize` of what `arrange` was given, bit for bit, but for NaN.

    Of parts with an axis of experts in front all, (experts, N, K). None for other dtypes, for more than 2**31 words of one, and
    for NF4 of experts. key: see `dispatch`.
    """
    experts = w.words.shape[0] if w.words.dim() == 4 else 0
    each = w.words.numel() // max(experts, 1)
    refused = experts > GRID or (experts and w.element == "nf4")
    if dtype not in FLOAT_NAMES or each > INT32 or refused:
        return None
    call = Call({"codes": w.words, "scale": w.scale, "zero": w.zero})
    call.allocate("y", (experts, *w.shape) if experts else w.shape, dtype)
    launch = _launch(w.shape, w.element, w.group, FLOAT_NAMES[dtype], experts)
    call.launch(launch, ("codes", "scale", "zero", "y"))
    y: torch.Tensor = call.result("y", key)
    return y


@lru_cache(maxsize=1024)
def _launch(shape: tuple[int, int], element: str, group: int, dtype: str, experts: int) -> CompiledLaunch:
    (n, length), (rows, columns) = shape, map(filled, shape)
    tail = (
        n, length, rows, columns, group, element, dtype, BLOCK_N, BLOCK_K, experts > 0, not interpreted(),
    )  # fmt: skip
    grid = (ceil_div(rows, BLOCK_N), ceil_div(columns, BLOCK_K), max(experts, 1))
    return CompiledLaunch(arranged_dense_kernel, grid, tail, WARPS, launch_pdl=True)


__all__ = ["arranged_dense"]
