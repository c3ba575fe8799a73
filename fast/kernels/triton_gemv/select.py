"""`linear` for CUDA tensors: which kernel, which of its tiles, and which weights none takes.

Packed integers of 2, 3, 5 and 6 bits with one float32 scale a group go to `sm90_intn_small_m`, which is CUDA C++ for Hopper, up
to 96 rows, or 32 of weights of fewer than 8192; more to no kernel. Else one row is bound by reading the weight:
`gemv_w4a16` takes 4-bit integers and `gemv_w8a16` 8-bit elements, where sizes are theirs (`takes_w4a16`, `takes_w8a16`),
`gemv_any` all else. Up to C.most_rows rows of 16-bit inputs go to `gemm_small_m`. Beyond, the tensor cores are the limit, and
a dense weight that is made for the call costs little beside it: the caller dequantizes.

`linear_pair` and `linear_swiglu` for CUDA tensors: two products of one row in one launch, by the kernels of `linear`.

A launch has few bytes under way at its beginning and end (times: reports/LOG.md). Two weights of a layer that multiply the same
inputs, a gate and what it gates, lose that once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from fast.cost import Coefficients
from fast.kernels.scheme.constants import SchemeConstants, constants_of
from fast.kernels.scheme.fast_path_rules import ocp_name
from fast.kernels.sm90_intn_small_m import host as sm90_intn_small_m
from fast.kernels.triton_gemv.gemv_w4a16 import (
    UNIT,
    triton_gemv_w4a16_kernel,
    triton_gemv_w4a16_pair_kernel,
    triton_gemv_w4a16_swiglu_kernel,
)
from fast.kernels.triton_gemv.gemv_w8a16 import (
    triton_gemv_w8a8_kernel,
    triton_gemv_w8a16_kernel,
    triton_gemv_w8a16_pair_kernel,
    triton_gemv_w8a16_swiglu_kernel,
)
from fast.kernels.triton_gemv.plain import triton_gemm_small_m_kernel, triton_gemv_any_kernel
from fast.launch.cuda import MULTIPROCESSORS, CudaLaunch
from fast.launch.launcher import FLOAT_NAMES, INT32, Call, CompiledLaunch, ceil_div, interpreted, same_device
from reference import Quantized
from reference.formats.formats import FORMATS
from reference.quantize.blocks import Blocks
from reference.quantize.quantize import check_quantized
from reference.schemes.schemes import Scheme

PARTS = ("codes", "scale", "outer", "zero")


def linear_pair(
    x: torch.Tensor, first: Quantized, second: Quantized, key: Any = None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """x (..., K), one row, times the transposes of two weights, or None where no kernel takes them. key: see `dispatch`."""
    call = _recorded(x, first, second, ("y", "y2"))
    if call is None:
        return None
    result: tuple[torch.Tensor, torch.Tensor] = call.result(("y", "y2"), key, first.scheme)
    return result


def linear_swiglu(x: torch.Tensor, gate: Quantized, up: Quantized, key: Any = None) -> torch.Tensor | None:
    """silu of the first product times the second, or None where no kernel takes them. key: see `dispatch`."""
    call = _recorded(x, gate, up, ("y",))
    if call is None:
        return None
    result: torch.Tensor = call.result("y", key, gate.scheme)
    return result


def _recorded(x: torch.Tensor, first: Quantized, second: Quantized, made: tuple[str, ...]) -> Call | None:
    """The launch that writes the results of these names, done; None where there is none."""
    launch = pair_launch_for(
        first.scheme, tuple(first.shape), first.axis, first.packed, x.dtype, len(made) == 1
    )
    given = {name + end: getattr(w, name) for w, end in ((first, ""), (second, "2")) for name in PARTS}
    if launch is None or not same_device(x, *given.values()):
        return None
    for w in (first, second):
        check_quantized(w)
    call = Call({"x": x, **given}, words=("x", "codes", "codes2"))
    for name in made:
        call.allocate(name, (*x.shape[:-1], first.shape[0]), x.dtype)
    call.launch(launch, [name for name in launch.kernel.arg_names if name in ("x", *given, *made)])
    return call


def pair_launch_for(
    scheme: Scheme, shape: tuple[int, ...], axis: int, packed: bool, dtype: torch.dtype, gated: bool = False
) -> CompiledLaunch | None:
    """The launch for one row of a dtype and two weights that are both stored so; None where there is none.

    gated: of `linear_swiglu`, which is for 16-bit numbers.
    """
    weight = weight_of(scheme, shape, axis, packed)
    taken = dtype in (FLOATS[:2] if gated else FLOATS)
    if weight is None or not taken or not weight.rows:
        return None
    return _pair_launch(weight, FLOAT_NAMES[dtype], gated)


@lru_cache(maxsize=4096)
def _pair_launch(weight: Weight, dtype: str, gated: bool) -> CompiledLaunch | None:
    """Programs of the first weight, then those of the second; gated: of half as many rows of both."""
    if takes_w4a16(weight) and dtype != "float32":
        one, rows = gemv_w4a16_launch(weight, dtype, 2), W4A16_ROWS
        kernels = triton_gemv_w4a16_pair_kernel, triton_gemv_w4a16_swiglu_kernel
    elif takes_w8a16(weight):
        one, rows = gemv_w8a16_launch(weight, dtype, 2), rows_per_program(weight.rows, 2)
        kernels = triton_gemv_w8a16_pair_kernel, triton_gemv_w8a16_swiglu_kernel
    else:
        return None
    programs = ceil_div(weight.rows, rows // 2) if gated else 2 * one.grid[0]
    return CompiledLaunch(kernels[gated], programs, one.tail, one.warps, **one.options)


# `linear_of_codes` for CUDA tensors: which weights the kernel takes, and how many of their rows a program.

#: What the kernel calls the elements.
KINDS = {"int8": "int", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
#: Codes that a lane takes at once: rows begin at multiples of these.
LANE = 16


def linear_of_codes(
    x: Quantized, w: Quantized, bias: torch.Tensor | None, dtype: torch.dtype, key: Any
) -> torch.Tensor | None:
    """The product of one row of codes, or None where the kernel does not take them. key: of the call; see `dispatch`.

    Several rows are `triton_scaled_mm.host`'s.
    """
    launch = w8a8_launch_for(x.scheme, w.scheme, tuple(w.shape), dtype)
    given = {
        "x": x.codes, "x_scale": x.scale, "x_zero": x.zero, "codes": w.codes, "scale": w.scale, "bias": bias
    }  # fmt: skip
    if launch is None or not same_device(*given.values()):
        return None
    call = Call(given, words=("x", "codes"))
    call.allocate("y", (1, w.shape[0]), dtype)
    call.launch(launch, list(launch.kernel.arg_names[: len(given) + 1]))
    y: torch.Tensor = call.result("y", key, x.scheme)
    return y


def w8a8_launch_for(
    x: Scheme, w: Scheme, shape: tuple[int, ...], dtype: torch.dtype
) -> CompiledLaunch | None:
    """The launch that multiplies one row of codes by a weight of some shape, both as `check_codes` allows; None where there is
    none: rows whose length is no multiple of 16, no rows, other dtypes."""
    rows, length = shape
    if dtype not in FLOATS or not rows or not length or length % LANE or interpreted():
        return None
    return _w8a8_launch(
        KINDS[x.element], KINDS[w.element], w.scale.block == -1, rows, length, FLOAT_NAMES[dtype]
    )


@lru_cache(maxsize=4096)
def _w8a8_launch(inputs: str, kind: str, each: bool, rows: int, length: int, dtype: str) -> CompiledLaunch:
    """Four rows of the weight a program where there are many, else two, and warps along K until there are enough in all."""
    taken = rows_per_program(rows)
    warps_k = warps_along_k(ceil_div(rows, taken), ceil_div(length, WARP_BYTES))
    wide = rows * length > INT32 - length
    tail = (rows, length, each, inputs, kind, taken, warps_k, wide, dtype, True)
    return CompiledLaunch(triton_gemv_w8a8_kernel, ceil_div(rows, taken), tail, warps_k, launch_pdl=True)


C = Coefficients("triton_gemv")
#: Widths of codes that `sm90_intn_small_m` has; of its others, four bits have a kernel for one row and an order for several.
OWN_BITS = (2, 3, 5, 6)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
STORAGES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")
#: Rows of a 4-bit weight that a program takes.
W4A16_ROWS = 16
#: Elements along K that a warp takes at once, of a 4-bit weight.
W4A16_UNIT = UNIT.value
#: Bytes of a row that 32 lanes read at once.
WARP_BYTES = 512
#: Bytes that a lane reads at once.
THREAD_BYTES = 16
#: Elements along K of a step of tiles, at least.
SMALLEST_STEP = 32
#: The fewest elements of K that a product of tiles takes.
SMALLEST_DOT = 16


@dataclass(frozen=True)
class Weight:
    """A stored weight (rows, length) as kernels see it."""

    rule: SchemeConstants
    element: str
    #: How scales are kept.
    storage: str
    packed: bool
    #: Elements of a block along K, 0 for one scale a row, -1 for one in all; rows of a block; blocks in a row of them.
    block: int
    block_rows: int
    per_row: int
    rows: int
    length: int

    @property
    def step(self) -> int:
        """The largest power of two that divides a block along K, and K."""
        return power_in(self.length) if self.block <= 0 else min(power_in(self.length), power_in(self.block))

    @property
    def wide(self) -> bool:
        """Whether indices need 64 bits."""
        return self.rows * self.length > INT32 - self.length


def linear(
    x: torch.Tensor, w: Quantized, bias: torch.Tensor | None, family: str, key: Any = None
) -> torch.Tensor | None:
    """x (..., K) times the weight's transpose plus bias by a family (`fast.gemm.choose`), or None where that does not take it.

    key: see `dispatch`.
    """
    parts = (w.codes, w.scale, w.outer, w.zero)
    launch = launch_for(w, x.numel() // max(x.shape[-1], 1), x.dtype, family)
    if launch is None or not same_device(x, *parts, bias):
        return None
    check_quantized(w)
    names = dict(zip(("codes", "scale", "outer", "zero"), parts, strict=True))
    call = Call({"x": x, **names, "bias": bias}, words=("x", "codes"))
    call.allocate("y", (*x.shape[:-1], w.shape[0]), x.dtype)
    given = ("x", *names, "bias", "y")
    taken = launch.names if isinstance(launch, CudaLaunch) else launch.kernel.arg_names
    call.launch(launch, [name for name in taken if name in given])  # type: ignore[arg-type]
    y: torch.Tensor = call.result("y", key, w.scheme)
    return y


def launch_for(
    w: Quantized, count: int, dtype: torch.dtype, family: str
) -> CompiledLaunch | CudaLaunch | None:
    """The launch of a family that multiplies `count` rows of a dtype by a weight; None where it does not take them."""
    if family == "sm90_intn_small_m":
        return sm90_intn_small_m.launch_for(w, count, dtype)
    weight = None if w.tiled else weight_of(w.scheme, tuple(w.shape), w.axis, w.packed)
    if weight is None or dtype not in FLOATS or not 0 < count <= C.most_rows or not weight.rows:
        return None
    return _launch(family, weight, count, FLOAT_NAMES[dtype])


@lru_cache(maxsize=4096)
def _launch(family: str, weight: Weight, count: int, dtype: str) -> CompiledLaunch:
    if family == "triton_gemm_small_m":
        return gemm_small_m_launch(weight, dtype, count)
    of_one_row = {
        "triton_gemv_w4a16": gemv_w4a16_launch, "triton_gemv_w8a16": gemv_w8a16_launch, "triton_gemv_any": gemv_any_launch
    }  # fmt: skip
    return of_one_row[family](weight, dtype)


def takes_rows(weight: Weight, count: int, dtype: torch.dtype) -> bool:
    """Whether `gemm_small_m` multiplies so many rows: 16-bit ones by elements that they hold exactly."""
    exact = weight.rule.kind != "codebook" and weight.rule.zero != "value" and dtype != torch.float32
    most = C.most_rows if weight.block <= 0 else C.most_block_rows
    return exact and weight.step >= SMALLEST_DOT and count <= most


@lru_cache(maxsize=4096)
def weight_of(scheme: Scheme, shape: tuple[int, ...], axis: int, packed: bool) -> Weight | None:
    """A weight's description; None where it is no matrix with blocks along K, or its values no products of a scale."""
    plain = scheme.scale.stored == "decode" and 1 < scheme.format.bits <= 8
    if len(shape) != 2 or axis != 1 or not plain:
        return None
    rows, length = shape
    block, block_rows = _block_of(scheme, length)
    if (block > 0 and length % block) or block < -1 or not length:
        return None
    flat = scheme.scale.flat_size
    per_row = (
        length // block if flat else Blocks.of(shape, scheme.scale, 1).scale_shape[-1] if block > 0 else 1
    )
    rule = constants_of(scheme, "float32", not interpreted())
    result = Weight(
        rule, scheme.element, scheme.scale.storage, packed, block, block_rows, per_row, rows, length
    )
    return result if result.step >= min(SMALLEST_STEP, block if block > 0 else SMALLEST_STEP) else None


def _block_of(scheme: Scheme, length: int) -> tuple[int, int]:
    """Elements of a block along K and its rows, as in `Weight`; -2 for what has no place there."""
    block = scheme.scale.block
    if isinstance(block, tuple):
        return block[1], block[0]
    if block == "tensor":
        return -1 if scheme.zero is None else -2, 1
    if block == -1:
        # With a zero point a row is a block like any other.
        return 0 if scheme.zero is None else length, 1
    return scheme.scale.flat_size or block, 1


def power_in(n: int) -> int:
    """The largest power of two that divides n."""
    return n & -n


def _one_level(weight: Weight) -> bool:
    return (
        weight.storage in STORAGES
        and not weight.rule.has_outer
        and not weight.rule.two_level
        and not interpreted()
    )


def takes_w4a16(weight: Weight) -> bool:
    """Whether `gemv_w4a16` takes a weight: packed integers of 4 bits in blocks of 32 or more along K.

    Zero points that are values come as bfloat16, those that are codes with two's complement.
    """
    rule = weight.rule
    integers = rule.bits == 4 and rule.kind == "int" and rule.low in (-8, 0) and not rule.fraction_bits
    kept = rule.zero == "" or rule.low == -8 if rule.zero != "value" else rule.zero_storage == "bfloat16"
    blocks = (
        weight.block >= 0 and weight.block_rows == 1 and weight.step >= 32 and weight.length % W4A16_UNIT == 0
    )
    blocks &= weight.rows >= W4A16_ROWS
    return weight.packed and integers and blocks and kept and _one_level(weight)


def takes_w8a16(weight: Weight) -> bool:
    """Whether `gemv_w8a16` takes a weight: two's complement, e4m3 or e5m2 of 8 bits, in blocks of 16 or more along K."""
    rule = weight.rule
    kinds = (rule.kind == "int" and rule.low < 0) or ocp_name(FORMATS.get(weight.element, rule)) in (
        "e4m3",
        "e5m2",
    )
    blocks = weight.step >= 16 and weight.length % WARP_BYTES == 0
    return rule.bits == 8 and kinds and blocks and rule.zero != "value" and _one_level(weight)


def gemv_w4a16_launch(weight: Weight, dtype: str, times: int = 1) -> CompiledLaunch:
    """One row, 4-bit integers: with few rows more warps share them, so that enough bytes are under way.

    times: weights like this one that a launch reads, as in `gemv_w8a16_launch`; here it is for the kernel of one.
    """
    tiles = ceil_div(weight.rows, W4A16_ROWS)
    warps_k = min(4 if times * tiles >= C.many_tiles else 8, power_in(weight.length // W4A16_UNIT))
    tail = (
        weight.rows, weight.length, weight.block or weight.length, warps_k, weight.storage, bool(weight.rule.low < 0),
        bool(weight.rule.zero == "value"), dtype, True,
    )  # fmt: skip
    return CompiledLaunch(
        triton_gemv_w4a16_kernel, tiles, tail, warps_k, launch_pdl=True, maxnreg=C.w4a16_registers
    )


def gemv_w8a16_launch(weight: Weight, dtype: str, times: int = 1) -> CompiledLaunch:
    """One row, 8-bit elements: four rows of the weight a warp where there are many, else two."""
    rows = rows_per_program(weight.rows, times)
    warps_k = warps_along_k(times * ceil_div(weight.rows, rows), power_in(weight.length // WARP_BYTES))
    kind = "int" if weight.rule.kind == "int" else ocp_name(FORMATS[weight.element])
    tail = (
        weight.rows, weight.per_row, weight.length, weight.block, weight.block_rows, kind, weight.storage,
        1.0 / (1 << weight.rule.fraction_bits), rows, warps_k, weight.wide, dtype, True,
    )  # fmt: skip
    limit = weight.block <= 0 and (rows == 4 or weight.length > C.long)
    registers = {"maxnreg": C.w8a16_registers} if limit else {}
    return CompiledLaunch(
        triton_gemv_w8a16_kernel, ceil_div(weight.rows, rows), tail, warps_k, launch_pdl=True, **registers
    )


def rows_per_program(rows: int, times: int = 1) -> int:
    """Rows of 8-bit elements that a program takes, of `times` weights with so many."""
    return 4 if times * ceil_div(rows, 4) >= C.busy else 2


def warps_along_k(programs: int, most: int) -> int:
    """Warps that share the rows of a program, a power of two up to `most`, so that there are enough in all."""
    warps_k = 1
    while 2 * warps_k <= min(C.most_warps_k, most) and programs * warps_k < C.busy:
        warps_k *= 2
    return warps_k


def gemv_any_launch(weight: Weight, dtype: str) -> CompiledLaunch:
    """One row, any other weight."""
    codes_a_byte = 8 // weight.rule.bits if weight.packed and weight.rule.bits in (2, 4) else 1
    size = min(WARP_BYTES * codes_a_byte, power_in(weight.length))
    sub = min(THREAD_BYTES * codes_a_byte, weight.step, size)
    tail = (
        weight.rows, weight.per_row, weight.length, weight.rule, dtype, weight.packed, weight.block, weight.block_rows,
        weight.wide, C.any_rows, size, sub,
    )  # fmt: skip
    return CompiledLaunch(
        triton_gemv_any_kernel,
        ceil_div(weight.rows, C.any_rows),
        tail,
        C.any_warps,
        enable_fp_fusion=True,
    )


def gemm_small_m_launch(weight: Weight, dtype: str, count: int) -> CompiledLaunch:
    """Several rows."""
    block_m = next(block_m for block_m in (16, 32, 64, 128) if count <= block_m)
    size = min(64, power_in(weight.length)) if weight.block <= 0 else min(128, weight.step)
    rows = C.tile_rows if ceil_div(weight.rows, C.tile_rows) >= MULTIPROCESSORS else C.tile_rows // 2
    tail = (
        count, weight.rows, weight.per_row, weight.length, weight.rule, dtype, weight.packed, weight.block, weight.block_rows,
        weight.wide, block_m, rows, size, 4,
    )  # fmt: skip
    return CompiledLaunch(
        triton_gemm_small_m_kernel, ceil_div(weight.rows, rows), tail, 4, enable_fp_fusion=True
    )
