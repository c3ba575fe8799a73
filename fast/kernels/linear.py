"""`linear` for CUDA tensors: which of the two kernels, its tile, and which weights they do not take.

One row goes to `vector_product`, up to MOST_ROWS rows of 16-bit inputs to `tile_product`. For more rows the product is bound
by the tensor cores, and a dense weight that is made once per call costs little beside it: the caller dequantizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from fast.kernels.geometry import INT32, ceil_div
from fast.kernels.launch import Fixed, interpreted, together
from fast.kernels.nibble_product import nibble_kernel
from fast.kernels.replay import NAMES, Recording, picked
from fast.kernels.rule import Rule, rule_of
from fast.kernels.tile_product import tile_kernel
from fast.kernels.vector_product import vector_kernel
from reference import Quantized
from reference.blocks import Blocks
from reference.schemes import Scheme

MOST_ROWS = 128
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
POINTERS = ("x", "codes", "scale", "outer", "zero", "bias", "y")
NIBBLE_POINTERS = ("x", "codes", "scale", "zero", "bias", "y")
# Codes of a row that a warp reads at once, 16 bytes a thread, and those of a thread.
VECTOR_BYTES, THREAD_BYTES = 512, 16
VECTOR_ROWS, VECTOR_WARPS = 8, 4
SMALLEST_STEP = 32


@dataclass(frozen=True)
class Weight:
    """A stored weight as the kernels see it: see `vector_product` for the names."""

    rule: Rule
    packed: bool
    block: int
    high: int
    per_row: int
    rows: int
    length: int
    #: How scales are kept.
    storage: str
    #: The largest power of two that divides both a block along K (rows without) and K.
    step: int

    @property
    def wide(self) -> bool:
        """Whether indices need 64 bits."""
        return self.rows * self.length > INT32 - self.length


def linear(x: torch.Tensor, w: Quantized, bias: torch.Tensor | None, key: Any = None) -> torch.Tensor | None:
    """x (..., K) times the weight's transpose plus bias, or None where no kernel takes them. key: of the call; see `ready`."""
    weight = weight_of(w.scheme, w.shape, w.axis, w.packed, w.tiled)
    count = x.numel() // max(x.shape[-1], 1)
    if weight is None or refusal(weight, count, x.dtype) or not together(x, w.codes, w.scale, w.outer, w.zero, bias):
        return None
    call = Recording({"x": x, **dict(zip(POINTERS[1:5], (w.codes, w.scale, w.outer, w.zero), strict=True)), "bias": bias})
    call.empty("y", (*x.shape[:-1], weight.rows), x.dtype)
    call.launch(*launch_of(weight, NAMES[x.dtype], count))
    call.remember(key, w.scheme, picked("y"))
    return call.tensors["y"]


def refusal(weight: Weight, count: int, dtype: torch.dtype) -> str | None:
    """Why no kernel multiplies `count` rows of a dtype by a weight; None where one does."""
    if dtype not in FLOATS or count == 0 or not weight.rows:
        return f"inputs are {', '.join(map(str, FLOATS))}, and not empty"
    if count == 1:
        return None
    if count > MOST_ROWS or dtype == torch.float32:
        return f"kernels for several rows take 16-bit inputs, up to {MOST_ROWS} rows"
    return None if weight.rule.kind != "codebook" and weight.rule.zero != "value" else "its numbers have more than 8 bits"


@lru_cache(maxsize=4096)
def weight_of(
    scheme: Scheme, shape: tuple[int, ...], axis: int, packed: bool, tiled: bool
) -> Weight | None:
    """The weight of these descriptions; None where the kernels do not take it."""
    block = scheme.scale.block
    plain = scheme.scale.stored == "decode" and scheme.dequantize == "float32" and not tiled
    if len(shape) != 2 or axis != 1 or not plain or scheme.format.bits > 8:
        return None
    rows, length = shape
    low, high = (block[1], block[0]) if isinstance(block, tuple) else (_along_rows(block), 1)
    if low is None or (low > 0 and length % low):
        return None
    step = _power_in(length) if low <= 0 else min(_power_in(length), _power_in(low))
    if low <= 0 and scheme.zero is not None:
        low = length if low == 0 else -2  # a row is a block; one zero point for all is not
    if low == -2 or step < min(SMALLEST_STEP, low if low > 0 else SMALLEST_STEP):
        return None
    per_row = Blocks.of(shape, scheme.scale, 1).scale_shape[-1] if low > 0 and not _is_flat(scheme) else 0
    per_row = length // low if _is_flat(scheme) else per_row
    return Weight(rule_of(scheme, "float32", not interpreted()), packed, low, high, per_row, rows, length, scheme.scale.storage, step)


def _is_flat(scheme: Scheme) -> bool:
    return str(scheme.scale.block).startswith("flat:")


def _along_rows(block: Any) -> int | None:
    """Elements of a block along K; 0 for a row, -1 for the matrix."""
    if block == "tensor":
        return -1
    if isinstance(block, str):
        return int(block.removeprefix("flat:"))
    return 0 if block == -1 else int(block)


def _power_in(n: int) -> int:
    """The largest power of two that divides n."""
    return n & -n


@lru_cache(maxsize=4096)
def launch_of(weight: Weight, dtype: str, count: int) -> tuple[Fixed, tuple[str, ...]]:
    """The launch for `count` rows, and the names of its pointers."""
    if count == 1 and dtype != "float32" and is_of_nibbles(weight):
        return nibble_launch(weight, dtype), NIBBLE_POINTERS
    made = vector_launch(weight, dtype) if count == 1 else tile_launch(weight, dtype, count)
    return made, POINTERS


def is_of_nibbles(weight: Weight) -> bool:
    """Whether `nibble_product` takes a weight: packed signed 4-bit integers in blocks of 32 or more."""
    rule = weight.rule
    integers = rule.bits == 4 and rule.kind == "int" and rule.low == -8 and not rule.fraction_bits
    scales = weight.storage in ("float32", "bfloat16") and not rule.has_outer and not rule.two_level
    blocks = weight.block >= 0 and weight.high == 1 and weight.step >= 32
    return weight.packed and integers and scales and blocks and weight.length % 256 == 0 and not interpreted()


def nibble_launch(weight: Weight, dtype: str) -> Fixed:
    """The launch for one row and 4-bit integers."""
    words = min(4, weight.step // 32, _power_in(weight.length // 256))
    return Fixed(*nibble_arguments(weight, dtype, words, 8, 4, 1, 1))


def nibble_arguments(weight: Weight, dtype: str, words: int, rows: int, down: int, along: int, unroll: int) -> Any:
    tail = (
        weight.rows, max(weight.per_row, 1), weight.length, weight.block or weight.length, words, rows, down, along, unroll,
        weight.wide, dtype == "bfloat16", weight.storage == "bfloat16",
    )  # fmt: skip
    return nibble_kernel, ceil_div(weight.rows, rows), tail, down * along


@lru_cache(maxsize=4096)
def vector_launch(weight: Weight, dtype: str) -> Fixed:
    """The launch for one row."""
    codes_a_byte = 8 // weight.rule.bits if weight.packed and weight.rule.bits in (2, 4) else 1
    size = min(VECTOR_BYTES * codes_a_byte, _power_in(weight.length))
    sub = min(THREAD_BYTES * codes_a_byte, weight.step, size)
    tail = (
        weight.rows, weight.per_row, weight.length, weight.rule, dtype, weight.packed, weight.block, weight.high, weight.wide,
        VECTOR_ROWS, size, sub, 4,
    )  # fmt: skip
    return Fixed(vector_kernel, ceil_div(weight.rows, VECTOR_ROWS), tail, VECTOR_WARPS, enable_fp_fusion=True)


@lru_cache(maxsize=4096)
def tile_launch(weight: Weight, dtype: str, count: int) -> Fixed:
    """The launch for several rows."""
    tall = 16 if count <= 16 else 32 if count <= 32 else 64 if count <= 64 else 128
    size = min(64, _power_in(weight.length)) if weight.block <= 0 else min(128, weight.step)
    rows = 64
    tail = (
        count, weight.rows, weight.per_row, weight.length, weight.rule, dtype, weight.packed, weight.block, weight.high,
        weight.wide, tall, rows, size, 4,
    )  # fmt: skip
    grid = (ceil_div(weight.rows, rows), ceil_div(count, tall), 1)
    return Fixed(tile_kernel, grid, tail, 4, enable_fp_fusion=True)
