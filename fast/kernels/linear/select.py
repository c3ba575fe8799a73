"""`linear` for CUDA tensors: which kernel, which of its tiles, and which weights none takes.

One row is bound by reading the weight: `nibble_product` takes 4-bit integers and `byte_product` 8-bit elements, where sizes are
theirs (`is_of_nibbles`, `is_of_bytes`), `vector_product` all else. Up to MOST_ROWS rows of 16-bit inputs go to `tile_product`.
Beyond, the tensor cores are the limit, and a dense weight that is made for the call costs little beside it: the caller
dequantizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from fast.kernels.launch.call import NAMES, Call, select
from fast.kernels.launch.launcher import CompiledLaunch, interpreted, same_device
from fast.kernels.linear.gemm_small_m import tile_kernel
from fast.kernels.linear.gemv_any import vector_kernel
from fast.kernels.linear.gemv_w4a16 import UNIT, nibble_kernel
from fast.kernels.linear.gemv_w8a16 import byte_kernel
from fast.kernels.quantize.geometry import INT32, ceil_div
from fast.kernels.scheme.constants import SchemeConstants, constants_of
from fast.kernels.scheme.fast_path_rules import ocp_name
from reference import Quantized
from reference.formats.formats import FORMATS
from reference.quantize.blocks import Blocks
from reference.quantize.quantize import check_quantized
from reference.schemes.schemes import Scheme

# Beyond as many rows a weight is dequantized for the call; scales that change along K make products of tiles slower sooner.
MOST_ROWS, MOST_BLOCK_ROWS = 128, 32
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
STORAGES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")
# Warps that keep an H200 busy with codes of 8 bits, and the most of them that share a row.
BUSY, ALONG = 3500, 8
# Registers a lane for 8-bit codes where rows are long or many: more warps at work; shorter ones lose by it.
BYTE_REGISTERS, LONG = 64, 8192
# Rows of a 4-bit weight that a program takes, elements along K that a warp takes at once, and the programs that fill an H200.
NIBBLE_ROWS, NIBBLE_UNIT, MANY_TILES = 16, UNIT.value, 600
# Registers a lane, so that 28 warps are at work on a multiprocessor.
NIBBLE_REGISTERS = 72
# What 32 lanes of 16 bytes read of a row, and of `vector_product` a program.
BYTES, THREAD_BYTES, VECTOR_ROWS, VECTOR_WARPS = 512, 16, 8, 2
SMALLEST_STEP = 32
# Rows of the weight that a tile has, half as many where there would be fewer tiles than an H200 has multiprocessors.
TILE_ROWS, FULL = 64, 132
# The fewest elements of K that a product of tiles takes.
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
    high: int
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


def linear(x: torch.Tensor, w: Quantized, bias: torch.Tensor | None, key: Any = None) -> torch.Tensor | None:
    """x (..., K) times the weight's transpose plus bias, or None where no kernel takes them. key: see `launch.cache`."""
    parts = (w.codes, w.scale, w.outer, w.zero)
    launch = launch_for(w, x.numel() // max(x.shape[-1], 1), x.dtype)
    if launch is None or not same_device(x, *parts, bias):
        return None
    check_quantized(w)
    names = dict(zip(("codes", "scale", "outer", "zero"), parts, strict=True))
    call = Call({"x": x, **names, "bias": bias}, words=("x", "codes"))
    call.empty("y", (*x.shape[:-1], w.shape[0]), x.dtype)
    given = ("x", *names, "bias", "y")
    call.launch(launch, [name for name in launch.kernel.arg_names if name in given])
    y: torch.Tensor = call.result(select("y"), key, w.scheme)
    return y


def launch_for(w: Quantized, count: int, dtype: torch.dtype) -> CompiledLaunch | None:
    """The launch that multiplies `count` rows of a dtype by a weight; None where there is none."""
    weight = None if w.tiled else weight_of(w.scheme, tuple(w.shape), w.axis, w.packed)
    if weight is None or dtype not in FLOATS or not 0 < count <= MOST_ROWS or not weight.rows:
        return None
    return _launch(weight, count, NAMES[dtype])


@lru_cache(maxsize=4096)
def _launch(weight: Weight, count: int, dtype: str) -> CompiledLaunch | None:
    """The first of the kernels that takes a weight."""
    if count > 1:
        exact = weight.rule.kind != "codebook" and weight.rule.zero != "value" and dtype != "float32"
        most = MOST_ROWS if weight.block <= 0 else MOST_BLOCK_ROWS
        return (
            tile_launch(weight, dtype, count)
            if exact and weight.step >= SMALLEST_DOT and count <= most
            else None
        )
    if is_of_nibbles(weight) and dtype != "float32":
        return nibble_launch(weight, dtype)
    return byte_launch(weight, dtype) if is_of_bytes(weight) else vector_launch(weight, dtype)


@lru_cache(maxsize=4096)
def weight_of(scheme: Scheme, shape: tuple[int, ...], axis: int, packed: bool) -> Weight | None:
    """A weight's description; None where it is no matrix with blocks along K, or its values no products of a scale."""
    plain = scheme.scale.stored == "decode" and 1 < scheme.format.bits <= 8
    if len(shape) != 2 or axis != 1 or not plain:
        return None
    rows, length = shape
    block, high = _block_of(scheme, length)
    if (block > 0 and length % block) or block < -1 or not length:
        return None
    flat = scheme.scale.flat_size
    per_row = (
        length // block if flat else Blocks.of(shape, scheme.scale, 1).scale_shape[-1] if block > 0 else 1
    )
    rule = constants_of(scheme, "float32", not interpreted())
    made = Weight(rule, scheme.element, scheme.scale.storage, packed, block, high, per_row, rows, length)
    return made if made.step >= min(SMALLEST_STEP, block if block > 0 else SMALLEST_STEP) else None


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


def is_of_nibbles(weight: Weight) -> bool:
    """Whether `nibble_product` takes a weight: packed integers of 4 bits in blocks of 32 or more along K.

    Zero points that are values come as bfloat16, those that are codes with two's complement.
    """
    rule = weight.rule
    integers = rule.bits == 4 and rule.kind == "int" and rule.low in (-8, 0) and not rule.fraction_bits
    kept = rule.zero == "" or rule.low == -8 if rule.zero != "value" else rule.zero_storage == "bfloat16"
    blocks = weight.block >= 0 and weight.high == 1 and weight.step >= 32 and weight.length % NIBBLE_UNIT == 0
    blocks &= weight.rows >= NIBBLE_ROWS
    return weight.packed and integers and blocks and kept and _one_level(weight)


def is_of_bytes(weight: Weight) -> bool:
    """Whether `byte_product` takes a weight: two's complement, e4m3 or e5m2 of 8 bits, in blocks of 16 or more along K."""
    rule = weight.rule
    kinds = (rule.kind == "int" and rule.low < 0) or ocp_name(FORMATS.get(weight.element, rule)) in (
        "e4m3",
        "e5m2",
    )
    blocks = weight.step >= 16 and weight.length % BYTES == 0
    return rule.bits == 8 and kinds and blocks and rule.zero != "value" and _one_level(weight)


def nibble_launch(weight: Weight, dtype: str, times: int = 1) -> CompiledLaunch:
    """One row, 4-bit integers: with few rows more warps share them, so that enough bytes are under way.

    times: weights like this one that a launch reads, as in `byte_launch`; here it is for the kernel of one.
    """
    tiles = ceil_div(weight.rows, NIBBLE_ROWS)
    along = min(4 if times * tiles >= MANY_TILES else 8, power_in(weight.length // NIBBLE_UNIT))
    tail = (
        weight.rows, weight.length, weight.block or weight.length, along, weight.storage, bool(weight.rule.low < 0),
        bool(weight.rule.zero == "value"), dtype, True,
    )  # fmt: skip
    return CompiledLaunch(nibble_kernel, tiles, tail, along, launch_pdl=True, maxnreg=NIBBLE_REGISTERS)


def byte_launch(weight: Weight, dtype: str, times: int = 1) -> CompiledLaunch:
    """One row, 8-bit elements: four rows of the weight a warp where there are many, else two."""
    rows = byte_rows(weight.rows, times)
    along = warps_along(times * ceil_div(weight.rows, rows), power_in(weight.length // BYTES))
    kind = "int" if weight.rule.kind == "int" else ocp_name(FORMATS[weight.element])
    tail = (
        weight.rows, weight.per_row, weight.length, weight.block, weight.high, kind, weight.storage,
        1.0 / (1 << weight.rule.fraction_bits), rows, along, weight.wide, dtype, True,
    )  # fmt: skip
    limit = weight.block <= 0 and (rows == 4 or weight.length > LONG)
    registers = {"maxnreg": BYTE_REGISTERS} if limit else {}
    return CompiledLaunch(byte_kernel, ceil_div(weight.rows, rows), tail, along, launch_pdl=True, **registers)


def byte_rows(rows: int, times: int = 1) -> int:
    """Rows of 8-bit elements that a program takes, of `times` weights with so many."""
    return 4 if times * ceil_div(rows, 4) >= BUSY else 2


def warps_along(programs: int, most: int) -> int:
    """Warps that share the rows of a program, a power of two up to `most`, so that there are enough in all."""
    along = 1
    while 2 * along <= min(ALONG, most) and programs * along < BUSY:
        along *= 2
    return along


def vector_launch(weight: Weight, dtype: str) -> CompiledLaunch:
    """One row, any other weight."""
    codes_a_byte = 8 // weight.rule.bits if weight.packed and weight.rule.bits in (2, 4) else 1
    size = min(BYTES * codes_a_byte, power_in(weight.length))
    sub = min(THREAD_BYTES * codes_a_byte, weight.step, size)
    tail = (
        weight.rows, weight.per_row, weight.length, weight.rule, dtype, weight.packed, weight.block, weight.high, weight.wide,
        VECTOR_ROWS, size, sub,
    )  # fmt: skip
    return CompiledLaunch(
        vector_kernel, ceil_div(weight.rows, VECTOR_ROWS), tail, VECTOR_WARPS, enable_fp_fusion=True
    )


def tile_launch(weight: Weight, dtype: str, count: int) -> CompiledLaunch:
    """Several rows."""
    tall = next(tall for tall in (16, 32, 64, 128) if count <= tall)
    size = min(64, power_in(weight.length)) if weight.block <= 0 else min(128, weight.step)
    rows = TILE_ROWS if ceil_div(weight.rows, TILE_ROWS) >= FULL else TILE_ROWS // 2
    tail = (
        count, weight.rows, weight.per_row, weight.length, weight.rule, dtype, weight.packed, weight.block, weight.high,
        weight.wide, tall, rows, size, 4,
    )  # fmt: skip
    return CompiledLaunch(tile_kernel, ceil_div(weight.rows, rows), tail, 4, enable_fp_fusion=True)
