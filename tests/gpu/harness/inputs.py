"""What kernels are fed: difficult blocks for a record, random bits, subnormals, and all patterns of 16 bits.

Arrays have `WIDTH` columns, which every block size of default schemes and conventions divides, and a multiple of 64 rows, so
that one compiled kernel serves all of them. Where a scale reaches over many blocks (tensor-wide, or of a second level), blocks
of like magnitude come in tensors of their own, or the largest would hide all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from ao_lab.testing.samples import Layout, fill
from reference import SCHEMES, Scheme
from reference.arrays.namespace import namespace_of
from reference.quantize.blocks import Blocks
from tests.support.edge_blocks import Edges, edge_blocks

WIDTH = 256
ROWS = 64
DTYPES = ("float32", "bfloat16", "float16")
NUMPY = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float64": np.float64}
Array = np.ndarray[Any, Any]
#: One scheme of every kind of block, scale, zero point and code.
REPRESENTATIVE = (
    "fp8_tensorwise", "fp8_rowwise", "fp8_1x128", "fp8_128x128", "mxfp8_e4m3", "mxfp8_e5m2_rceil", "mxfp4",
    "mxfp6_e2m3", "mxint8", "nvfp4", "int8_rowwise_asymmetric", "int4_g32", "int3_g64_asymmetric", "nf4",
    "torchao.nvfp4", "torchao.int4_g32_tinygemm", "torchao.int8_rowwise_asymmetric", "torchao.nf4",
    "torchao.mxfp8_e4m3_even", "torchao.fp8_tensorwise_training", "te.nvfp4", "te.nvfp4_16x16",
    "compressed_tensors.nvfp4", "compressed_tensors.int4_g128",
)  # fmt: skip


def shared(scheme: Scheme) -> bool:
    """Whether a scale depends on many blocks, or the one block is the tensor."""
    return scheme.outer is not None or scheme.scale.block == "tensor"


def scheme_inputs(scheme: Scheme, dtype: str, fraction: float = 1.0) -> Iterator[tuple[str, Array]]:
    """(label, array) pairs for one record and dtype, all blocks along the last axis."""
    yield from random_inputs(dtype, max(ROWS, round(4 * fraction) * ROWS))
    if scheme.scale.block == "tensor":  # what one program has where it is alone: whole, and with masks
        for rows in (2 * ROWS, ROWS + ROWS // 2):
            yield f"{rows} rows", fill("normals", (rows, WIDTH), dtype=dtype, seed=rows)
    blocks = _edges(_block_size(scheme), scheme.element, scheme.scale.target, dtype)
    blocks = blocks[:: max(1, round(1 / fraction))]
    if not shared(scheme):
        yield "edges", placed(scheme, blocks)
        return
    order = np.argsort(np.nan_to_num(np.abs(blocks.astype(np.float32)), nan=np.inf).max(1), kind="stable")
    yield "edges mixed", placed(scheme, blocks)
    rows = 1 if scheme.scale.block == "tensor" else 2 * WIDTH
    starts = range(0, len(order), rows)
    few = max(2, round(40 * fraction))
    for start in starts[:: max(1, len(starts) // few)]:
        yield f"edges from {start}", placed(scheme, blocks[order[start : start + rows]])


def _block_size(scheme: Scheme) -> int:
    """Elements of a block for which edges are made; larger blocks repeat them."""
    block = scheme.scale.block
    if isinstance(block, str):
        return int(block[5:]) if block.startswith("flat:") else WIDTH
    size = prod(block) if isinstance(block, tuple) else int(block)
    return size if 1 < size <= WIDTH else WIDTH


def placed(scheme: Scheme, blocks: Array, width: int = WIDTH) -> Array:
    """An array whose blocks, as the record cuts it, are these; filled up by repeating them."""
    first = Blocks.of((ROWS, width), scheme.scale, -1)
    ns = namespace_of(blocks)
    size = first.split(ns, np.zeros((ROWS, width), np.uint8)).shape[-1]
    # Of blocks that are much larger than the edges only some are kept.
    blocks = blocks if size <= WIDTH else blocks[:: max(1, 64 * len(blocks) // (1 << 13))]
    rows = -(-len(blocks) * min(size, ROWS * width) // (ROWS * width)) * ROWS
    rows = ROWS if scheme.scale.block == "tensor" else -(-rows // 128) * 128 if size > WIDTH else rows
    cut = Blocks.of((rows, width), scheme.scale, -1)
    shape = cut.split(ns, np.zeros((rows, width), np.uint8)).shape
    repeated = blocks[np.arange(prod(shape[:-1])) % len(blocks)]
    split = np.tile(repeated, (1, -(-shape[-1] // blocks.shape[1])))[:, : shape[-1]]
    return np.ascontiguousarray(cut.join(ns, split.reshape(shape)))


@lru_cache(maxsize=64)
def _edges(size: int, element: str, target: float, dtype: str) -> Array:
    """Edge blocks in a dtype. float16: the float32 ones moved into its range by powers of two."""
    wide = "float32" if dtype == "float16" else dtype
    families = edge_blocks(Edges(element, target, size, wide))
    blocks = np.concatenate(list(families.values()))
    if dtype != "float16":
        return blocks.astype(NUMPY[dtype])
    near = fill("near_ties", (64, size), dtype="float16", fmt=element)
    near[:, 0] = np.clip(target, 0, 65504)
    return np.concatenate([_into_float16(blocks), near])


def _into_float16(blocks: Array) -> Array:
    """Finite maxima brought between 2**-24 and 2**16; neighbouring steps of float32 become those of float16 or vanish."""
    top = np.abs(np.where(np.isfinite(blocks), blocks, 0)).max(1, keepdims=True)
    _, exponent = np.frexp(top)
    wanted = (np.arange(len(blocks)) % 41 - 24)[:, None]
    shift = np.where((exponent > 15) | (exponent < -22), wanted - exponent, 0)
    with np.errstate(all="ignore"):
        return np.ldexp(blocks.astype(np.float64), shift).astype(np.float16)


def random_inputs(dtype: str, rows: int, width: int = WIDTH, seed: int = 0) -> Iterator[tuple[str, Array]]:
    """Random bits, normal numbers of many magnitudes, subnormals, and a few NaN and infinities among normal ones."""
    shape, layout, rng = (rows, width), Layout.of(dtype), np.random.default_rng(seed)
    yield "bits", fill("bits", shape, dtype=dtype, seed=seed)
    normal = rng.standard_normal(shape) * np.exp(3 * rng.standard_normal((rows, 1)))
    normal = layout.pattern(normal).view(layout.dtype)
    normal[3 % rows] = 0
    yield "normals", normal
    yield "subnormals", fill("subnormals", shape, dtype=dtype, seed=seed)
    sparse = normal.copy()
    sparse[::16, 5], sparse[1::32, 70], sparse[2::32, 71] = np.nan, np.inf, -np.inf
    yield "sparse", sparse


@lru_cache(maxsize=4)
def all_patterns(dtype: str) -> dict[str, Array]:
    """All 65,536 patterns of a 16-bit dtype as (256, 256) in orders that put different neighbours into a block."""
    layout = Layout.of(dtype)
    index = np.arange(1 << 16)
    shuffled = np.random.default_rng(5).permutation(index)
    signs = index >> 1 | (index & 1) << 15
    finite = np.where((index & layout.infinity) == layout.infinity, 0, index)
    orders = {"sorted": index, "shuffled": shuffled, "both signs": signs, "finite": finite,
              "finite shuffled": np.where((shuffled & layout.infinity) == layout.infinity, 0, shuffled),
              "columns": index.reshape(256, 256).T}  # fmt: skip
    return {
        name: order.reshape(256, 256).astype(np.uint16).view(layout.dtype) for name, order in orders.items()
    }


def default_schemes() -> list[str]:
    """Names of the schemes that are no convention of another project."""
    return [name for name in SCHEMES if "." not in name]


def normals(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> Array:
    """Normal numbers whose rows along the last axis differ in magnitude."""
    rng = np.random.default_rng(seed)
    spread = np.exp2(rng.integers(-6, 7, (*shape[:-1], 1))) if shape else 1.0
    return np.asarray(rng.standard_normal(shape) * spread, np.float32).astype(NUMPY[dtype])
