"""`layer_norm_quantize` for CUDA tensors; see `reference.layers.layer_norm` for every rounding.

A program holds whole rows in registers, as `norm_kernel` does: x is read once, codes and scales are written once. The mean is
subtracted where the row lies, so that the variance is the second of two sums over registers and no second pass over x. Elements
that fill a row up are no differences: they count as 0 in both sums.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fast.kernels.bits import read, read_once
from fast.kernels.layers.rms_norm import ELEMENTS, EVICT, PER_THREAD, SHORT, SHORT_ELEMENTS, SHORT_PER_THREAD
from fast.kernels.layers.tiles import Outputs, Tiles, outputs, quantize_rows, tile_of, tiles
from fast.kernels.quantize.plan import LARGEST_TILE
from fast.kernels.rules.statistics import tree_sum
from fast.kernels.sm90.bf16x2 import floats, rounded_once
from fast.launch.launcher import Call, CompiledLaunch, interpreted, power_above, same_device
from reference import Quantized
from reference.layers.layer_norm import checked_layer_norm
from reference.schemes.schemes import Scheme, scheme_of


@triton.jit
def layer_norm_kernel(
    x, weight, bias, codes, scale, zero, eps, rows, length, per_row, column_tiles,
    SCHEME: tl.constexpr, OP: tl.constexpr, DTYPE: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, HAS_PTX: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Normalize whole rows and quantize them; bias: None for none."""
    row, column, inside, block, exists = tile_of(
        rows, length, per_row, column_tiles, MASKED, WIDE, ROWS, SIZE, GROUP
    )
    at = row * length + column
    h = floats(read_once(x + at, inside, EVICT), HAS_PTX)
    d = h - tl.broadcast_to(_of_blocks(_mean(h, length, ROWS, SIZE), ROWS, SIZE, GROUP), h.shape)
    if MASKED:
        d = tl.where(inside, d, 0.0)
    variance = _mean(d * d, length, ROWS, SIZE)
    r = tl.div_rn(tl.zeros_like(variance) + 1.0, tl.sqrt_rn(variance + eps))
    # Weight and bias come from the L2, and later, so that they take no registers before.
    y = (d * tl.broadcast_to(_of_blocks(r, ROWS, SIZE, GROUP), h.shape)) * floats(
        read(weight + column, inside), HAS_PTX
    )
    if bias is not None:
        y += floats(read(bias + column, inside), HAS_PTX)
    v = rounded_once(y, DTYPE, HAS_PTX)
    quantize_rows(v, codes, scale, zero, at, inside, block, exists, SCHEME, OP)


@triton.jit
def _mean(v, length, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """The mean of each row of a tile, (ROWS, 1), or a scalar of one row."""
    total = tree_sum(tl.reshape(v, (ROWS, SIZE)))
    if ROWS == 1:
        # As a scalar it is in every thread.
        total = tl.sum(total)
    return tl.div_rn(total, tl.zeros_like(total) + length)


@triton.jit
def _of_blocks(v, ROWS: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr):
    """A value of each row for each of its blocks."""
    if ROWS > 1:
        return tl.reshape(tl.broadcast_to(v, (ROWS, SIZE // GROUP)), (ROWS * (SIZE // GROUP), 1))
    else:
        return v


def layer_norm_quantize(
    x: torch.Tensor, weight: Any, bias: Any, scheme: str | Scheme, eps: float, packed: bool, key: Any = None
) -> Quantized | None:
    """`fast.layer_norm_quantize` by one kernel, or None where none covers it."""
    _ns, x, name = checked_layer_norm(x, weight, bias, eps)
    if x.numel() == 0 or x.shape[-1] > LARGEST_TILE or not same_device(x, weight, bias):
        return None
    made = outputs(x, name, scheme_of(scheme), packed)
    if made is None:
        return None
    call, place = Call({"x": x, "weight": weight, "bias": bias}), _place(x, made)
    for part, buffer in made.buffers.items():
        call.allocate(part, *buffer)
    tail = (
        float(eps),
        *place.integers,
        made.rule,
        made.block_op,
        name,
        *place.constants.values(),
        not interpreted(),
        EVICT,
    )
    call.launch(
        CompiledLaunch(layer_norm_kernel, place.programs, tail, place.warps), layer_norm_kernel.arg_names[:6]
    )
    result: Quantized = call.result(made.quantized(), key, scheme)
    return result


def _place(x: torch.Tensor, made: Outputs) -> Tiles:
    """Short rows with one scale in smaller programs, as RMSNorm's."""
    length = x.shape[-1]
    short = length <= SHORT and made.length == length
    return tiles(
        x.numel() // length, length, made.length, size=power_above(length),
        elements=SHORT_ELEMENTS if short else ELEMENTS, stride=length,
        per_thread=SHORT_PER_THREAD if short else PER_THREAD,
    )  # fmt: skip
