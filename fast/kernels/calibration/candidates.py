"""The best of several scales of each block, in one launch: `fast.calibration.search` of blocks along rows.

A program holds P blocks in registers and goes through the candidates: a weight is read once, whatever their number. Elements
are rounded by the record under a candidate's scale, as quantize and dequantize round them, and the weighted squares or cubes of
what that changes are summed in float64, each product and sum rounded by itself. Of two as good the earlier one is taken.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fast.kernels.bits import read, widened
from fast.kernels.rules.scales import floored
from fast.kernels.rules.values import combined, element_codes, loaded_zero, values
from fast.kernels.scheme.constants import constants_of
from fast.launch.launcher import CompiledLaunch, ceil_div, interpreted, power_above
from reference import Scheme

#: Elements of a program, a warp: 16 a lane, whose squares are float64.
TILE = 512


@triton.jit(do_not_specialize=["count", "across", "candidates"])
def candidates_kernel(
    w, weights, scale, zero, outer, index, count, across, candidates,
    LENGTH: tl.constexpr, SIZE: tl.constexpr, P: tl.constexpr, SCHEME: tl.constexpr, CUBES: tl.constexpr,
):  # fmt: skip
    """P of `count` blocks of LENGTH elements, `across` beside each other in a row. weights: float64 (across, LENGTH).

    scale, zero: (candidates, count), the scales decoded to float32. index: (count,) int32, the candidate of each block.
    """
    block = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)[:, None]
    exists = block < count
    i = tl.arange(0, SIZE)[None, :]
    inside = exists & (i < LENGTH)
    x = widened(read(w + block * LENGTH + i, inside), SCHEME.signs_nan)
    importance = tl.load(weights + (block % across) * LENGTH + i, mask=inside, other=0.0)
    g = tl.full((1, 1), 1.0, tl.float32)
    divisor_outer = g
    if SCHEME.has_outer:
        g = tl.load(outer + tl.zeros((1, 1), tl.int32))
        divisor_outer = g
        if SCHEME.block_nan:
            divisor_outer = floored(g, SCHEME.outer)
    least = tl.full((P, 1), float("inf"), tl.float64)
    best = tl.zeros((P, 1), tl.int32)
    at = block
    for c in range(0, candidates):
        s = tl.load(scale + at, mask=exists, other=1.0)
        e = s
        if SCHEME.block_nan and not SCHEME.power_of_two:
            e = floored(s, SCHEME.level)
        z = s
        if SCHEME.zero != "":
            z = loaded_zero(read(zero + at, exists), SCHEME)
        codes = element_codes(x, e, divisor_outer, z, None, SCHEME)
        q = values(codes, combined(s, g, SCHEME, "float32"), z, SCHEME, "float32")
        off = q.to(tl.float64) - x.to(tl.float64)
        power = off * off
        if CUBES:
            power *= tl.abs(off)
        error = tl.sum(power * importance, axis=1, keep_dims=True)
        closer = error < least
        best = tl.where(closer, c, best)
        least = tl.where(closer, error, least)
        at += count
    tl.store(index + block, best, mask=exists)


def best_candidates(
    w: torch.Tensor,
    weights: torch.Tensor,
    scheme: Scheme,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    outer: torch.Tensor | None,
    *,
    cubes: bool = False,
) -> torch.Tensor:
    """The candidate of each block, int64 (count,): of least squared error, or of least cubed.

    w: contiguous (N, K) of float32, bfloat16 or float16, in blocks along K that divide it. weights: float64 (K,). scale:
    float32 (candidates, count). zero: as stored, of that shape, or None.
    """
    length = int(scheme.scale.block)  # type: ignore[arg-type]
    candidates, count = scale.shape
    index = torch.empty(count, dtype=torch.int32, device=w.device)
    name = str(w.dtype).removeprefix("torch.")
    constants: Any = constants_of(scheme, name, not interpreted())
    size = power_above(length)
    each = max(TILE // size, 1)
    across = w.shape[1] // length
    tail = (count, across, candidates, length, size, each, constants, cubes)
    launch = CompiledLaunch(candidates_kernel, ceil_div(count, each), tail, max(size // TILE, 1))
    if count:
        pointers = (w, weights, scale, zero, outer if constants.has_outer else None, index)
        launch.run(pointers, w.get_device())
    return index.long()


__all__ = ["best_candidates", "candidates_kernel"]
