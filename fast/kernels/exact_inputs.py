"""Inputs of a matmul as a scheme represents them, as 16-bit floats that are exact, and the matmul of these by an arranged
weight: the inputs' kernel, then `linear_small`'s or `sm90_w4a16_gemm`'s.

* `row_codes_kernel`: under one float32 scale for each row, decoded elements less the zero point, and the scales. The product
  multiplies its sums by them.
* `block_values_kernel`: under powers of two, the values themselves: `fake_quantize` of them is exact.

Both begin while the kernel in front of them ends, and let the product begin while they run: it asks for its weight meanwhile.
Scales and elements are chosen by the device functions of the block kernel, so they are `quantize`'s to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from fast.kernels.bits import float_of, narrow, read, widened
from fast.kernels.quantize import plan as plans
from fast.kernels.quantize.host import block_launch
from fast.kernels.quantize.kernel import all_of, blocks_kernel
from fast.kernels.quantize.plan import Geometry
from fast.kernels.rules.statistics import block_absmax, bound, value_range
from fast.kernels.rules.values import element_codes, unscaled
from fast.kernels.scheme.constants import block_op, constants_of
from fast.kernels.sm90_w4a16_gemm import host as sm90_w4a16_gemm
from fast.kernels.sm90_w4a16_gemv import host as sm90_w4a16_gemv
from fast.kernels.tile.fast_codes import multiplier, rounded_values
from fast.kernels.tile.scales import choose_scales
from fast.kernels.triton_small_m import host as product
from fast.launch.launcher import FLOAT_NAMES, INT32, Call, CompiledLaunch, interpreted, power_above
from fast.scale_factors import ArrangedWeight
from reference.quantize.blocks import Blocks
from reference.schemes.schemes import Scheme, record_of

# Elements of a row that stay in registers.
LONG = tl.constexpr(16384)


@triton.jit
def _wait(USE_PDL: tl.constexpr):
    """Until the kernel in front has ended; the one behind may begin."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _range_of_rows(tile, inside, SCHEME: tl.constexpr):
    """(pattern of the largest magnitude, minimum, maximum) of each row, as `choose_scales` takes them."""
    if SCHEME.level.statistic == "absmax":
        largest = block_absmax(widened(tile, SCHEME.signs_nan), SCHEME.has_ptx)
        return largest, float_of(largest), float_of(largest)
    else:
        largest, low, high = value_range(tile, inside, SCHEME.signs_nan, SCHEME.with_zero, SCHEME.has_ptx)
        if SCHEME.ranged:
            return largest, float_of(low), float_of(high)
        else:
            return (
                largest,
                bound(low, largest, SCHEME.with_zero, True),
                bound(high, largest, SCHEME.with_zero, False),
            )


@triton.jit
def _elements(tile, e, s, scale_code, prepared, z, SCHEME: tl.constexpr):
    """Decoded elements of a tile less their zero point, before scaling, float32; anything where the scale is NaN."""
    v = widened(tile, SCHEME.signs_nan)
    if SCHEME.fast_path != "":
        return rounded_values(v, multiplier(s, scale_code, prepared, SCHEME), s, z, SCHEME)
    else:
        divisor = e if SCHEME.codes_from == "exact" else s
        return unscaled(element_codes(v, divisor, divisor, z, None, SCHEME), z, SCHEME)


@triton.jit
def row_codes_kernel(
    x, y, scale, LENGTH: tl.constexpr, SIZE: tl.constexpr, SCHEME: tl.constexpr, OP: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """A row of x (M, LENGTH): its elements as y's dtype, and its scale in float32. SIZE: a power of two that holds LENGTH."""
    _wait(USE_PDL)
    row = tl.program_id(0)
    i = tl.arange(0, SIZE)[None, :]
    inside = all_of(SIZE, 1)
    if SIZE != LENGTH:
        inside = i < LENGTH
    at = row * LENGTH + i
    tile = read(x + at, inside)
    largest, low, high = _range_of_rows(tile, inside, SCHEME)
    block = row + tl.zeros((1, 1), tl.int32)
    e, s, scale_code, prepared, z = choose_scales(
        largest, low, high, 1.0, scale, scale, block, block >= 0, 1, SCHEME, OP
    )
    tl.store(scale + block, s)
    if SIZE > LONG or SCHEME.zero != "":
        # Again: a thread of a long row has no registers to keep it in, and a range is taken of other pairs. The store in front
        # keeps the two apart.
        tile = read(x + at, inside)
    value = _elements(tile, e, s, scale_code, prepared, z, SCHEME)
    tl.store(y + at, narrow(value, SCHEME.dtype, False), mask=inside)


@triton.jit
def block_values_kernel(
    x, g, words, statistic, outer_statistic, outer, scale, zero, codes, y,
    count, columns, rows, length, limit, chunks, lead_stride, row_stride, column_stride, inner_row, inner_column, stride,
    SCHEME: tl.constexpr, OP: tl.constexpr, SHAPE: tl.constexpr, CHUNKED: tl.constexpr, MASKED: tl.constexpr,
    WIDE: tl.constexpr, SIZE: tl.constexpr, INNER: tl.constexpr, P: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """`blocks_kernel` between two others."""
    _wait(USE_PDL)
    blocks_kernel(
        x, g, words, statistic, outer_statistic, outer, scale, zero, codes, y,
        count, columns, rows, length, limit, chunks, lead_stride, row_stride, column_stride, inner_row, inner_column, stride,
        SCHEME, OP, SHAPE, CHUNKED, MASKED, WIDE, SIZE, INNER, P,
    )  # fmt: skip


#: Columns of the longest row that a program takes.
LONGEST = 32768
#: Elements of a warp, 16 a thread; longer rows have more warps, and then more elements in each.
WARP = 512
#: Warps of a program at most.
MOST_WARPS = 32
#: A launch, with the names of its pointers.
InputsLaunch = tuple[CompiledLaunch, list[str | None]]


def linear_small_dynamic(
    x: torch.Tensor,
    scheme: Scheme,
    kind: str,
    w: ArrangedWeight,
    bias: torch.Tensor | None,
    families: Iterable[str],
    *,
    key: Any = None,
    record: Any = None,
) -> torch.Tensor | None:
    """x (..., K), quantized in a scheme, times the transpose of an arranged weight (N, K), plus bias (N), in x's dtype.

    kind: what of the inputs is exact in x's dtype, as `fast.matmul.preshuffled.dynamic.kind_of` says: "codes" under a scale
    for each row, or "values". families: names of those that may multiply, the quickest first (`fast.gemm.choose`); values are
    multiplied by those of few rows alone. None where no kernel takes it: inputs that are not bfloat16 or float16, no rows,
    values of more rows than `MOST_ROWS`, rows of codes longer than LONGEST. key, record: see `dispatch`. ValueError as
    `linear_small` raises it.
    """
    product.check_operands(x, w, bias)
    count, length = x.numel() // w.shape[1], w.shape[1]
    if x.dtype not in product.INPUTS or not count or (bias is not None and bias.dtype not in FLOAT_NAMES):
        return None
    first = _launch(scheme.key, kind, count, length, FLOAT_NAMES[x.dtype])
    named = {**OF_FEW_ROWS, **OF_CODES} if kind == "codes" else OF_FEW_ROWS
    products = [named[name] for name in families if name in named]
    if first is None or not products:
        return None
    call = Call({"x": x, "codes": w.words, "scale": w.scale, "zero": w.zero, "bias": bias})
    _add_inputs(call, first, kind, (count, length), x.dtype)
    if not any(add(call, w) for add in products):
        return None
    y: torch.Tensor = call.result("y", key, record)
    return y


def _add_small_m(call: Call, w: ArrangedWeight) -> bool:
    """The product of a call's "values" by `linear_small`; whether it takes it."""
    x, values = call.tensors["x"], call.tensors["values"]
    launches = product.launches_for(w, len(values), x.dtype, x.dtype)
    if launches is not None:
        product.add_product(call, launches, (*x.shape[:-1], w.shape[0]), x.dtype, "values")
    return launches is not None


def _add_gemv(call: Call, w: ArrangedWeight) -> bool:
    """The same by `sm90_w4a16_gemv`."""
    x, values = call.tensors["x"], call.tensors["values"]
    launch = sm90_w4a16_gemv.launch_for(w, len(values), x.dtype, x.dtype)
    if launch is None:
        return False
    call.allocate("y", (*x.shape[:-1], w.shape[0]), x.dtype)
    call.launch(launch, ("values", *launch.names[1:]))
    return True


def _add_gemm(call: Call, w: ArrangedWeight) -> bool:
    """The same by `sm90_w4a16_gemm`, its sums times "x_scale"."""
    x, bias = call.tensors["x"], call.tensors.get("bias")
    launch = sm90_w4a16_gemm.launch_for(call.tensors["values"], w, bias, call.tensors["x_scale"])
    if launch is None:
        return False
    call.allocate("y", (*x.shape[:-1], w.shape[0]), x.dtype)
    call.launch(launch, ("values", *launch.names[1:]))
    return True


#: By the names of families: those of few rows, and of any number of rows of codes.
OF_FEW_ROWS: dict[str, Callable[[Call, ArrangedWeight], bool]] = {
    "sm90_w4a16_gemv": _add_gemv,
    "triton_small_m": _add_small_m,
}
OF_CODES = {"sm90_w4a16_gemm": _add_gemm}


def exact_inputs(
    x: torch.Tensor, scheme: Scheme, kind: str
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """What such a product multiplies of inputs (M, K): in x's dtype, and for "codes" the scales (M); None where no kernel
    makes it."""
    count, length = x.shape
    launch = _launch(scheme.key, kind, count, length, FLOAT_NAMES[x.dtype])
    if launch is None:
        return None
    call = Call({"x": x})
    _add_inputs(call, launch, kind, (count, length), x.dtype)
    result: tuple[torch.Tensor, torch.Tensor | None] = call.result(
        ("values", "x_scale" if kind == "codes" else None)
    )
    return result


def _add_inputs(
    call: Call, launch: InputsLaunch, kind: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Make "values" of a call's "x", and "x_scale" where there is one."""
    call.allocate("values", shape, dtype)
    if kind == "codes":
        call.allocate("x_scale", shape[:1], torch.float32)
    call.launch(*launch)


@lru_cache(maxsize=4096)
def _launch(scheme: str, kind: str, count: int, length: int, dtype: str) -> InputsLaunch | None:
    """The launch that makes "values" of "x", and "x_scale" where there is one, with the names of its pointers."""
    record = record_of(scheme)
    return _codes(record, count, length, dtype) if kind == "codes" else _values(record, count, length, dtype)


def _codes(scheme: Scheme, count: int, length: int, dtype: str) -> InputsLaunch | None:
    size, pdl = power_above(length), not interpreted()
    if size > LONGEST or count * length > INT32:
        return None
    rule = constants_of(scheme, dtype, pdl)
    warps = max(1, min(MOST_WARPS, size // WARP))
    tail = (length, size, rule, block_op(), pdl)
    launch = CompiledLaunch(row_codes_kernel, count, tail, warps, launch_pdl=True)
    return launch, ["x", "values", "x_scale"]


def _values(scheme: Scheme, count: int, length: int, dtype: str) -> InputsLaunch | None:
    """`fake_quantize` in one pass, by tiles of one warp: few rows are over sooner in many of them."""
    of = plans.problem_of(dtype, scheme, Blocks.of((count, length), scheme.scale, -1), not interpreted())
    plan = None if of is None else plans.fake_quantizing(of)
    if plan is None or len(plan.passes) != 1:
        return None
    one, names = block_launch(plan.on_tiles(**_small_tiles(plan.passes[0].place)).passes[0])
    options = {**one.options, "launch_pdl": True}
    tail = (*one.tail, not interpreted())
    launch = CompiledLaunch(block_values_kernel, one.grid, tail, one.warps, **options)
    return launch, ["values" if name == "y" else name for name in names]


def _small_tiles(place: Geometry) -> dict[str, Any]:
    """What is other than in a geometry where neighbouring blocks that fill their tiles are taken by fewer at once."""
    if place.shape != "flat" or place.chunked or place.size != place.integers[3] or place.size > WARP:
        return {}
    p = WARP // place.size
    while place.blocks % p:
        p //= 2
    return {"p": p, "warps": 1, "masked": False, "programs": place.blocks // p}


__all__ = ["LONGEST", "exact_inputs", "linear_small_dynamic"]
