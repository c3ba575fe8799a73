"""`swiglu_vjp` for CUDA tensors: dgate and dup in one kernel, which reads g, gate and up once.

dup is the forward kernel's own arithmetic, with g in place of up. silu' has to be the correctly rounded 16-bit float for every
gate (`reference.layers.swiglu` has the table), computed in float32 by operations that are the same everywhere: all
65,536 inputs of a dtype are tried in Triton's interpreter and on a GPU. With e = exp(-v) as in `fast.kernels.layers.swiglu`,
d = 1 + e and n = 1 + e (1 + v), all scaled by 2**-32: silu' = n / d / d, divisions by products with approximate reciprocals.

bfloat16 needs degree 5, and reciprocals may be wrong by two units. float16 needs degree 6 and a step of Newton's; one input,
-1.4550781, whose result lies too near a tie for float32, is moved by a few places of float32. For small v, where the result is
1/2 + v/2 - v**3/12 and 1/2 + v/2 may be a tie, the place below or above decides.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fast.kernels.bits import bits_of, float_of, read
from fast.kernels.layers.swiglu import (
    HALVES,
    LOG2E,
    LOG2E_REST,
    SCALE,
    SCALED_ONE,
    TO_INTEGER,
    approximate_reciprocal,
    covers,
    matrices,
    place_of,
    power_of_fraction,
    row_strides,
    silu,
)
from fast.kernels.layers.tiles import tile_of
from fast.kernels.sm90.bf16x2 import clamped_gate, floats, gated, narrowed, rounded_once
from fast.launch.call import Call
from fast.launch.launcher import CompiledLaunch, interpreted

SMALL, HARD = tl.constexpr(2.0**-6), tl.constexpr(-1.455078125)


@triton.jit
def exponential(z, f, DTYPE: tl.constexpr):
    """(2**-32 exp(-v), as a power of two and a factor)."""
    power = float_of((bits_of(z) << 23) + SCALED_ONE)
    if DTYPE == "bfloat16":
        p = tl.fma(f, 0.0013400171, 0.00961845)
        p = tl.fma(p, f, 0.055503294)
        p = tl.fma(p, f, 0.24022648)
        p = tl.fma(p, f, 0.6931472)
        p = tl.fma(p, f, 1.0)
    else:
        p = power_of_fraction(f, DTYPE)
    return power, p


@triton.jit
def silu_slope(v, DTYPE: tl.constexpr, HAS_PTX: tl.constexpr):
    """silu'(v) between the bounds of `clamped_gate`, on the right side of every tie of 16-bit floats."""
    z = tl.fma(v, -LOG2E, TO_INTEGER)
    k = z - TO_INTEGER
    f = tl.fma(v, -LOG2E, -k)
    if DTYPE == "float16":
        f = tl.fma(v, -LOG2E_REST, f)
    power, p = exponential(z, f, DTYPE)
    d = tl.fma(power, p, SCALE)
    r = approximate_reciprocal(d, HAS_PTX)
    if DTYPE == "float16":
        r = tl.fma(tl.fma(-d, r, 1.0), r, r)
    n = tl.fma(power * p, v + 1.0, SCALE)
    slope = (n * r) * r * SCALE
    if DTYPE == "float16":
        slope = tl.where(v == HARD, float_of(bits_of(slope) + 8), slope)
    line = bits_of(tl.fma(v, 0.5, 0.5))
    line = float_of(tl.where(v > 0, line - 1, line + 1))
    return tl.where(tl.abs(v) < SMALL, line, slope)


@triton.jit
def swiglu_gradient_kernel(
    g, gate, up, dgate, dup, rows, length, per_row, column_tiles, gate_stride, up_stride,
    DTYPE: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
    GROUP: tl.constexpr, HAS_PTX: tl.constexpr,
):  # fmt: skip
    """A tile of both gradients; g has no gaps between its rows."""
    row, column, inside, block, exists = tile_of(
        rows, length, per_row, column_tiles, MASKED, WIDE, ROWS, SIZE, GROUP
    )
    at = row * length + column
    d = read(g + at, inside)
    a = read(gate + (row * gate_stride + column), inside)
    b = read(up + (row * up_stride + column), inside)
    v = clamped_gate(a, DTYPE, HAS_PTX)
    tl.store(dup + at, gated(silu(v, DTYPE, HAS_PTX), a, d, DTYPE, False, HAS_PTX), mask=inside)
    slope = rounded_once(silu_slope(v, DTYPE, HAS_PTX), DTYPE, HAS_PTX)
    wide = floats(a, HAS_PTX)
    # The clamp made a NaN a number.
    slope = tl.where(wide == wide, slope, wide)
    product = (floats(d, HAS_PTX) * (slope * 0.5)) * floats(b, HAS_PTX)
    tl.store(dgate + at, narrowed(product + product, DTYPE, HAS_PTX), mask=inside)


def swiglu_vjp(
    g: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, key: Any = None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`fast.layers.gradients.swiglu_vjp` by a kernel, or None where the reference has to answer."""
    if not (covers(gate, up) and covers(gate, g)):
        return None
    call = Call({"g": g.contiguous(), "gate": gate, "up": up}, strided=True)
    rows, others = matrices(call.tensors["gate"], call.tensors["up"], None)
    strides = row_strides(rows, others)
    place = place_of(*rows.shape, None, max(strides))
    for name in ("dgate", "dup"):
        call.allocate(name, gate.shape, gate.dtype)
    constants = (HALVES[gate.dtype], *place.constants.values(), not interpreted())
    tail = (*place.integers, *strides, *constants)
    launch = CompiledLaunch(swiglu_gradient_kernel, place.programs, tail, place.warps)
    # Not remembered where a copy is read.
    views = {"gate": rows, "up": others}
    call.repeatable &= g.is_contiguous()
    call.launch(launch, ("g", "gate", "up", "dgate", "dup"), views)
    made: tuple[torch.Tensor, torch.Tensor] = call.result(("dgate", "dup"), key)
    return made
