"""`swiglu`, `swiglu_quantize` and `swiglu_vjp` for CUDA tensors.

silu has to be the correctly rounded 16-bit float for every input (`reference.swiglu` has the table). It is computed in
float32 by operations that are the same everywhere, so that the 65,536 inputs of a dtype can be tried without a GPU
(`tests/fast/kernels/test_layers.py`) and on one (`tests/gpu/kernels/fused.py`). With v the gate between two bounds:

* exp(-v) = 2**k * 2**f, k = rint(-v log2(e)): 2**k as a pattern, 2**f by a polynomial.
* d = (1 + exp(-v)) * 2**-32, which float32 holds down to the last input whose result is not zero; v times an approximate
  reciprocal of d; times 2**-32. float16 needs a step of Newton's, after which it hardly matters how good the reciprocal was.
* For tiny v the result lies just above v / 2, a tie where that is subnormal; a tiny number is added.

bfloat16 needs degree 4. The minimax polynomial misses one input by one place, so its coefficients were moved a little at random
until all inputs were right. They stay right where the reciprocals are wrong by up to two units in the last place, but for
one: silu(5.9375) needs a reciprocal that is not too large. float16 needs degree 6, and log2(e) in two parts.

The rest, and the product with up, is done on pairs of 16-bit floats: see `bf16x2.gated`.

`swiglu_vjp`: dgate and dup in one kernel, which reads g, gate and up once.

dup is the forward kernel's own arithmetic, with g in place of up. silu' has to be the correctly rounded 16-bit float for every
gate (`reference.layers.swiglu` has the table), computed in float32 by operations that are the same everywhere: all
65,536 inputs of a dtype are tried in Triton's interpreter and on a GPU. With e = exp(-v) as above,
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
from fast.kernels.layers.tiles import (
    Outputs,
    Tiles,
    outputs,
    pieces,
    quantize_row,
    quantize_rows,
    takes_row_pieces,
    tile_of,
    tiles,
)
from fast.kernels.quantize.plan import LARGEST_TILE
from fast.kernels.sm90.bf16x2 import clamped_gate, floats, gated, narrowed, rounded_once
from fast.launch.launcher import INT32, Call, CompiledLaunch, interpreted, power_above
from reference import Quantized
from reference.schemes.schemes import Scheme, scheme_of

HALVES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
# Elements of a program, unless a block is larger, and of a thread: four 16-byte loads of 16-bit floats.
ELEMENTS = 4096
PER_THREAD = 32

# 1.5 * 2**23: a sum with it is rounded to an integer, which a shift of its pattern by 23 leaves alone.
TO_INTEGER = tl.constexpr(12582912.0)
LOG2E, LOG2E_REST = tl.constexpr(1.4426950216293335), tl.constexpr(1.925963033500e-8)
# Whether bfloat16 takes the step of Newton's too; see the module.
REFINED = tl.constexpr(False)
SCALE, SCALED_ONE = tl.constexpr(2.0**-32), tl.constexpr((127 - 32) << 23)


@triton.jit
def power_of_fraction(f, DTYPE: tl.constexpr):
    """2**f for |f| <= 0.5, by Horner's rule."""
    if DTYPE == "bfloat16":
        p = tl.fma(f, 0.009561853, 0.05590428)
        p = tl.fma(p, f, 0.24025892)
        p = tl.fma(p, f, 0.6931105)
    else:
        p = tl.fma(f, 0.00015352316, 0.0013400171)
        p = tl.fma(p, f, 0.00961845)
        p = tl.fma(p, f, 0.055503294)
        p = tl.fma(p, f, 0.24022648)
        p = tl.fma(p, f, 0.6931472)
    return tl.fma(p, f, 1.0)


@triton.jit
def approximate_reciprocal(d, HAS_PTX: tl.constexpr):
    """1 / d, to a unit in the last place."""
    if HAS_PTX:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [d], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.div_rn(tl.full(d.shape, 1.0, tl.float32), d)


@triton.jit
def _exponent(v, DTYPE: tl.constexpr):
    """(z, f) with -v log2(e) = z - TO_INTEGER + f: an integer, and at most one half."""
    z = tl.fma(v, -LOG2E, TO_INTEGER)
    k = z - TO_INTEGER
    f = tl.fma(v, -LOG2E, -k)
    if DTYPE == "float16":
        f = tl.fma(v, -LOG2E_REST, f)
    return z, f


@triton.jit
def silu(v, DTYPE: tl.constexpr, HAS_PTX: tl.constexpr):
    """v / (1 + exp(-v)) between the bounds, on the right side of every tie of 16-bit floats."""
    z, f = _exponent(v, DTYPE)
    power = float_of((bits_of(z) << 23) + SCALED_ONE)
    d = tl.fma(power, power_of_fraction(f, DTYPE), SCALE)
    r = approximate_reciprocal(d, HAS_PTX)
    q = v * r
    if REFINED or DTYPE == "float16":
        q = tl.fma(tl.fma(-q, d, v), r, q)
    # 2**-146 and 2**-48; a subnormal constant would be a float64.
    tiny = float_of(tl.cast(8 if DTYPE == "bfloat16" else (127 - 48) << 23, tl.int32))
    return tl.fma(q, SCALE, tiny)


@triton.jit
def swiglu_kernel(
    gate, up, y, codes, scale, zero, rows, length, per_row, column_tiles, gate_stride, up_stride,
    SCHEME: tl.constexpr, OP: tl.constexpr, DTYPE: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, HAS_PTX: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of a tile, quantized where there is a SCHEME."""
    row, column, inside, block, exists = tile_of(
        rows, length, per_row, column_tiles, MASKED, WIDE, ROWS, SIZE, GROUP
    )
    g = read(gate + (row * gate_stride + column), inside)
    u = read(up + (row * up_stride + column), inside)
    s = silu(clamped_gate(g, DTYPE, HAS_PTX), DTYPE, HAS_PTX)
    at = row * length + column
    if SCHEME is None:
        tl.store(y + at, gated(s, g, u, DTYPE, False, HAS_PTX), mask=inside)
    else:
        v = gated(s, g, u, DTYPE, True, HAS_PTX)
        quantize_rows(v, codes, scale, zero, at, inside, block, exists, SCHEME, OP)


@triton.jit
def swiglu_pieces_kernel(
    gate, up, codes, scale, length, gate_stride, up_stride,
    SCHEME: tl.constexpr, OP: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    C: tl.constexpr, THREADS: tl.constexpr, HAS_PTX: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of a row of A, B and C elements, quantized under one scale; see `tiles.quantize_row`."""
    row = tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)
    gates, ups = gate + row * gate_stride, up + row * up_stride
    a = _gated_piece(gates, ups, A, DTYPE, HAS_PTX)
    b = _gated_piece(gates + A, ups + A, B, DTYPE, HAS_PTX)
    c = b
    if C > 0:
        c = _gated_piece(gates + (A + B), ups + (A + B), C, DTYPE, HAS_PTX)
    quantize_row(a, b, c, codes, scale, row * length, row, SCHEME, OP, C, THREADS)


@triton.jit
def _gated_piece(gate, up, SIZE: tl.constexpr, DTYPE: tl.constexpr, HAS_PTX: tl.constexpr):
    i = tl.arange(0, SIZE)[None, :]
    g, u = tl.load(gate + i), tl.load(up + i)
    return gated(silu(clamped_gate(g, DTYPE, HAS_PTX), DTYPE, HAS_PTX), g, u, DTYPE, True, HAS_PTX)


def swiglu(gate: torch.Tensor, up: Any, key: Any = None) -> torch.Tensor | None:
    """`fast.swiglu` by a kernel, or None where the reference has to answer. key: of the call, see `dispatch`."""
    if not covers(gate, up):
        return None
    result: torch.Tensor = _launch(gate, up, None).result("y", key)
    return result


def swiglu_quantize(
    gate: torch.Tensor, up: Any, scheme: str | Scheme, packed: bool, key: Any = None
) -> Quantized | None:
    """`fast.swiglu_quantize` by one kernel, or None where none covers it."""
    if not covers(gate, up):
        return None
    output = outputs(gate, HALVES[gate.dtype], scheme_of(scheme), packed)
    if output is None or (output.length > LARGEST_TILE):
        return None
    result: Quantized = _launch(gate, up, output).result(output.quantized(), key, scheme)
    return result


def covers(gate: torch.Tensor, up: Any) -> bool:
    """Whether the arguments are right and not empty; what is wrong with them the reference says."""
    same = isinstance(up, torch.Tensor) and (up.dtype, up.shape, up.device) == (
        gate.dtype,
        gate.shape,
        gate.device,
    )
    return same and gate.dtype in HALVES and gate.numel() > 0


def _launch(gate: torch.Tensor, up: torch.Tensor, into: Outputs | None) -> Call:
    """The call that makes y, or codes and scales `into` blocks."""
    block = None if into is None else into.length
    call = Call({"gate": gate, "up": up.detach()}, strided=True)
    rows, others = matrices(call.tensors["gate"], call.tensors["up"], block)
    launch = _by_pieces(rows, others, into) or _by_tiles(rows, others, block, into)
    result = {"y": (gate.shape, gate.dtype)} if into is None else into.buffers
    for name, buffer in result.items():
        call.allocate(name, *buffer)
    pointers = launch.kernel.arg_names[: 4 if launch.kernel is swiglu_pieces_kernel else 6]
    # Not remembered where a copy is read.
    call.launch(launch, pointers, {"gate": rows, "up": others})
    return call


def row_strides(*parts: torch.Tensor) -> tuple[int, ...]:
    """The distances of rows of matrices."""
    return tuple(t.stride(0) if len(t) > 1 else t.shape[1] for t in parts)


def _by_tiles(
    gate: torch.Tensor, up: torch.Tensor, block: int | None, into: Outputs | None
) -> CompiledLaunch:
    """A launch over tiles of whole blocks."""
    strides = row_strides(gate, up)
    place = place_of(*gate.shape, block, max(strides))
    rule, do = (None, None) if into is None else (into.rule, into.block_op)
    constants = (rule, do, HALVES[gate.dtype], *place.constants.values(), not interpreted())
    return CompiledLaunch(swiglu_kernel, place.programs, (*place.integers, *strides, *constants), place.warps)


def _by_pieces(gate: torch.Tensor, up: torch.Tensor, into: Outputs | None) -> CompiledLaunch | None:
    """A launch over rows under one scale, where those come in pieces."""
    rows, length = gate.shape
    apart = pieces(length, None)
    # Rows of a power of two have been joined, and belong to several scales.
    if into is None or into.length != length or apart is None or not takes_row_pieces(into):
        return None
    strides = row_strides(gate, up)
    wide = rows * max(*strides, length) > INT32 - 2 * LARGEST_TILE
    shape = (wide, apart.a, apart.b, apart.c, 32 * apart.warps)
    constants = (into.rule, into.block_op, HALVES[gate.dtype], *shape, not interpreted())
    return CompiledLaunch(swiglu_pieces_kernel, rows, (length, *strides, *constants), apart.warps)


def matrices(gate: torch.Tensor, up: torch.Tensor, block: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """gate and up as matrices whose rows are whole blocks; without gaps between rows, rows as long as suits the kernel."""
    rows, others = _as_rows(gate), _as_rows(up)
    if block is None or block & (block - 1) == 0:
        return _joined(rows, others, max(ELEMENTS, block or 1))
    return rows, others


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as a matrix with contiguous rows, copied only where its rows are not evenly spaced."""
    length = tensor.shape[-1] if tensor.dim() else 1
    if tensor.dim() and tensor.stride(-1) == 1:
        try:
            return tensor.view(-1, length)
        except RuntimeError:
            pass  # leading axes that do not join
    return tensor.contiguous().view(-1, length)


def _joined(gate: torch.Tensor, up: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Matrices without gaps as rows of `size`, or as one row; others as they are."""
    if not (gate.is_contiguous() and up.is_contiguous()):
        return gate, up
    length = gate.numel() if gate.numel() % size else size
    return gate.view(-1, length), up.view(-1, length)


def place_of(rows: int, length: int, block: int | None, stride: int) -> Tiles:
    """Tiles of whole blocks."""
    if block is not None and block & (block - 1):
        size = power_above(block)
    else:
        least = 1 if block is None else block
        size = max(least, min(ELEMENTS, power_above(length)))
        # Without masks, where a power of two that is not much smaller divides the rows.
        divides = max(length & -length, least)
        if size // 4 <= divides < size:
            size = divides
    return tiles(rows, length, block, size=size, elements=ELEMENTS, stride=stride, per_thread=PER_THREAD)


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
    z, f = _exponent(v, DTYPE)
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
    """`fast.layers.swiglu.swiglu_vjp` by a kernel, or None where the reference has to answer."""
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
    result: tuple[torch.Tensor, torch.Tensor] = call.result(("dgate", "dup"), key)
    return result
