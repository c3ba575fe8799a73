"""A product of 8-bit floats whose epilogue normalises blocks of 256 columns, applies hard swish and quantizes along rows.

A tile has 256 columns, so a block never leaves its program, and a row of the tile stays in four lanes: the sum of squares is
one reduction, without a barrier. Scales of 128 columns (`fp8_1x128`) come from the same registers. Products are those of
`triton_scaled_mm`; squares are added in the order of the registers, so that results lie within the roundings of 256 additions
of `reference.linear_block_norm`, and are its bits where sums are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from fast.kernels.bits import MAGNITUDE, bits_of, float_of, is_nan
from fast.kernels.rules.elements import encode
from fast.kernels.rules.scales import exact_scale, stored_scale
from fast.kernels.scheme.constants import constants_of
from fast.kernels.sm90.bf16x2 import narrowed
from fast.kernels.triton_scaled_mm.host import ELEMENTS, INTEGER, STEP
from fast.launch.cuda import MULTIPROCESSORS
from fast.launch.launcher import (
    FLOAT_NAMES,
    UNFUSED,
    DescriptorLaunch,
    Matrix,
    ceil_div,
    interpreted,
    same_device,
)
from reference.layers.block_norm import SIXTH
from reference.quantize.stored import Quantized
from reference.schemes.schemes import SCHEMES

#: Columns of a block of the norm, and of a scale.
BLOCK, GROUP = 256, 128
SCHEME_NAME = "fp8_1x128"
GATE = tl.constexpr(SIXTH)


@dataclass(frozen=True)
class Variant:
    """How tiles are made, the same bits by each. rows: of a tile; length: elements along K in a step; stages: steps in flight.

    along: tiles along M that programs at work at a time have. persistent: programs on a multiprocessor, each of which makes one
    tile after the other and reads the next one's first steps beside an epilogue; 0: a program a tile.
    """

    rows: int = 128
    length: int = 128
    stages: int = 4
    warps: int = 8
    along: int = 8
    persistent: int = 0


#: The quickest of ten at three shapes (times: reports/LOG.md).
USUAL = Variant(stages=3, persistent=1)
#: Of results in float32, whose tile of 131 kB has no room in shared memory beside the next one's steps, of 49 kB each.
WIDE = Variant()


@triton.jit
def _first(tile, m_size, n_size, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALONG: tl.constexpr):
    """First row and column of a tile by its number: ALONG tiles of rows, column by column."""
    across, down = tl.cdiv(n_size, BLOCK_N), tl.cdiv(m_size, BLOCK_M)
    first = tile // (ALONG * across) * ALONG
    height = tl.minimum(down - first, ALONG)
    place = tile % (ALONG * across)
    return (first + place % height) * BLOCK_M, place // height * BLOCK_N


@triton.jit
def _normal(total, gain, eps, BLOCK_N: tl.constexpr, HARD_SWISH: tl.constexpr):
    """Rows (M, BLOCK_N) normalised, times the gain (1, BLOCK_N), through the activation."""
    squares = tl.sum(total * total, axis=1, keep_dims=True)
    r = tl.div_rn(squares * 0 + 1.0, tl.sqrt_rn(squares * (1.0 / BLOCK_N) + eps))
    y = total * r * gain
    if HARD_SWISH:
        gate = tl.clamp(y + 3.0, 0.0, 6.0, propagate_nan=tl.PropagateNan.ALL)
        y = (y * gate) * GATE
    return y


@triton.jit
def _scale_of(y, inside, SCHEME: tl.constexpr):
    """(stored scale, reciprocal) of the columns that are inside, (M, 1)."""
    magnitude = tl.where(inside, bits_of(y) & MAGNITUDE, 0)
    largest = tl.max(magnitude, axis=1, keep_dims=True)
    exact = exact_scale(largest, largest, largest, float_of(largest), SCHEME)
    _, scale = stored_scale(exact, SCHEME.level)
    return scale, tl.div_rn(scale * 0 + 1.0, scale)


@triton.jit
def _codes(v, SCHEME: tl.constexpr):
    """e4m3 codes of scaled values, uint8: saturated, NaN 0x7f."""
    if SCHEME.has_ptx:
        code = v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = encode(v, None, SCHEME.element).to(tl.uint8)
    return tl.where(is_nan(v), tl.full((), 0x7F, tl.uint8), code)


@triton.jit
def _tile(
    tile, a, b, scale_a, scale_b, bias, gain, y, codes, scale, m_size, n_size, k_size, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ALONG: tl.constexpr, PROMOTE: tl.constexpr,
    EACH_A: tl.constexpr, EACH_B: tl.constexpr, HARD_SWISH: tl.constexpr, SCHEME: tl.constexpr, DTYPE: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, HAS_PTX: tl.constexpr,
):  # fmt: skip
    """One tile by its number."""
    first_m, first_n = _first(tile, m_size, n_size, BLOCK_M, BLOCK_N, ALONG)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(0, k_size, BLOCK_K, num_stages=STAGES):
        v, w = a.load([first_m, k]), b.load([first_n, k])
        if PROMOTE:
            total += tl.dot(v, w.T)
        else:
            total = tl.dot(v, w.T, total)
    m, n = first_m + tl.arange(0, BLOCK_M)[:, None], first_n + tl.arange(0, BLOCK_N)[None, :]
    exists = m < m_size
    total = total * tl.load(scale_a + (m if EACH_A else m * 0), mask=exists, other=0.0)
    total = total * tl.load(scale_b + (n if EACH_B else n * 0))
    if bias is not None:
        total += tl.load(bias + n)
    v = _normal(total, tl.load(gain + n), eps, BLOCK_N, HARD_SWISH)
    at = m.to(tl.int64) * n_size + n
    if SCHEME is None:
        tl.store(y + at, narrowed(v, DTYPE, HAS_PTX), mask=exists)
    else:
        left = tl.arange(0, BLOCK_N)[None, :] < COLUMNS
        scale_0, inverse_0 = _scale_of(v, left, SCHEME)
        scale_1, inverse_1 = _scale_of(v, ~left, SCHEME)
        code = _codes(v * tl.where(left, inverse_0, inverse_1), SCHEME)
        tl.store(codes + at, code, mask=exists)
        place = m.to(tl.int64) * (n_size // COLUMNS) + first_n // COLUMNS
        tl.store(scale + place, scale_0, mask=exists)
        tl.store(scale + place + 1, scale_1, mask=exists)


@triton.jit(do_not_specialize=["m_size"])
def scaled_mm_block_norm_kernel(
    a, b, scale_a, scale_b, bias, gain, y, codes, scale, m_size, n_size, k_size, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ALONG: tl.constexpr, PROMOTE: tl.constexpr,
    EACH_A: tl.constexpr, EACH_B: tl.constexpr, HARD_SWISH: tl.constexpr, SCHEME: tl.constexpr, DTYPE: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, HAS_PTX: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    """Tiles of y (M, N), or of codes (M, N) and scales (M, N / COLUMNS): one, or PERSISTENT those of a program in turn.

    a, b: descriptors of blocks (BLOCK_M, BLOCK_K) and (BLOCK_N, BLOCK_K). gain (N,), float32.
    """
    if PERSISTENT:
        tiles = tl.cdiv(m_size, BLOCK_M) * tl.cdiv(n_size, BLOCK_N)
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES, flatten=True):
            _tile(
                tile, a, b, scale_a, scale_b, bias, gain, y, codes, scale, m_size, n_size, k_size, eps, BLOCK_M, BLOCK_N,
                BLOCK_K, ALONG, PROMOTE, EACH_A, EACH_B, HARD_SWISH, SCHEME, DTYPE, COLUMNS, STAGES, HAS_PTX,
            )  # fmt: skip
    else:
        _tile(
            tl.program_id(0), a, b, scale_a, scale_b, bias, gain, y, codes, scale, m_size, n_size, k_size, eps, BLOCK_M,
            BLOCK_N, BLOCK_K, ALONG, PROMOTE, EACH_A, EACH_B, HARD_SWISH, SCHEME, DTYPE, COLUMNS, STAGES, HAS_PTX,
        )  # fmt: skip


def refusal(x: Quantized, w: Quantized, scheme: str, dtype: torch.dtype, block: int) -> str | None:
    """Why the kernel does not take a product; None where it does."""
    if any((len(side.shape), side.axis) != (2, 1) for side in (x, w)):
        return "both operands are matrices with scales along K"
    (m, k), n = x.shape, w.shape[0]
    if (
        x.scheme.element not in ELEMENTS
        or w.scheme.element not in ELEMENTS
        or INTEGER in (x.scheme.element, w.scheme.element)
    ):
        return "both operands are 8-bit floats"
    if x.scheme.scale.block not in (-1, "tensor") or w.scheme.scale.block not in (-1, "tensor"):
        return "scales are of rows or of a tensor"
    if block != BLOCK or n % BLOCK or k % STEP or not m or not k:
        return f"blocks have {BLOCK} columns, N is whole blocks of them, K a multiple of {STEP}"
    if scheme not in ("", SCHEME_NAME) or dtype not in FLOAT_NAMES:
        return f"results are floats, or {SCHEME_NAME}"
    return None


def linear_block_norm(
    x: Quantized,
    w: Quantized,
    gain: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    hard_swish: bool,
    scheme: str,
    dtype: torch.dtype,
    fast_sums: bool = True,
    variant: Variant | None = None,
) -> list[torch.Tensor] | None:
    """[y], or [codes, scale], of operands that `refusal` lets through; None of others and of several devices. variant: None
    for the quickest that fits."""
    if refusal(x, w, scheme, dtype, BLOCK) is not None or not same_device(
        x.codes, x.scale, w.codes, w.scale, gain, bias
    ):
        return None
    (m, k), n = x.shape, w.shape[0]
    made = (
        [x.codes.new_empty((m, n)), x.scale.new_empty((m, n // GROUP))]
        if scheme
        else [x.codes.new_empty((m, n), dtype=dtype)]
    )
    y, codes, scale = (None, *made) if scheme else (*made, None, None)
    variant = variant or (WIDE if not scheme and dtype is torch.float32 else USUAL)
    launch = launch_of(x.scheme.element, w.scheme.element, (m, n, k), (x.scheme.scale.block == -1, w.scheme.scale.block == -1),
                       float(eps), hard_swish, scheme, dtype, fast_sums, variant)  # fmt: skip
    device = x.codes.get_device()
    launch.run([x.codes, w.codes, x.scale, w.scale, bias, gain, y, codes, scale], device)
    return made


@lru_cache(maxsize=1024)
def launch_of(
    x: str, w: str, shape: tuple[int, int, int], each: tuple[bool, bool], eps: float, hard_swish: bool, scheme: str,
    dtype: torch.dtype, fast_sums: bool, variant: Variant,
) -> DescriptorLaunch:  # fmt: skip
    """The launch of a shape."""
    (m, n, k), v = shape, variant
    matrices = Matrix(ELEMENTS[x], (m, k), (v.rows, v.length)), Matrix(ELEMENTS[w], (n, k), (BLOCK, v.length))
    rule = constants_of(SCHEMES[scheme], "float32", not interpreted()) if scheme else None
    tail: tuple[Any, ...] = (
        m, n, k, eps, v.rows, BLOCK, v.length, v.along, not fast_sums, *each, hard_swish, rule, FLOAT_NAMES[dtype], GROUP,
        v.stages, not interpreted(), v.persistent > 0,
    )  # fmt: skip
    tiles = ceil_div(m, v.rows) * (n // BLOCK)
    programs = min(tiles, v.persistent * MULTIPROCESSORS) if v.persistent else tiles
    return DescriptorLaunch(scaled_mm_block_norm_kernel, (programs, 1, 1), tail, v.warps, matrices, **UNFUSED)


__all__ = ["BLOCK", "USUAL", "WIDE", "Variant", "linear_block_norm", "refusal", "scaled_mm_block_norm_kernel"]
