"""The host side of blocks that are mixed, and rounded by words drawn in place: which matrices the kernels take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod, sqrt
from typing import Any

import numpy as np
import torch

from fast.kernels.hadamard.columns import COLUMNS, columns_kernel
from fast.kernels.hadamard.columns import WARPS as COLUMN_WARPS
from fast.kernels.hadamard.rows import TILE, rows_kernel
from fast.kernels.hadamard.rows import WARPS as ROW_WARPS
from fast.kernels.scheme.constants import SchemeConstants, constants_of
from fast.kernels.scheme.fast_path_rules import is_fast_stochastic, is_under_outer
from fast.kernels.tile.block_op import BlockOp, block_op
from fast.launch.call import FLOAT_NAMES
from fast.launch.launcher import UNFUSED, interpreted
from reference import SCHEMES, Quantized
from reference.formats.storage import storage_dtype
from reference.schemes.schemes import Scheme
from reference.training.hadamard import signs

#: Lengths of blocks down columns, which a thread holds, and along rows, which a warp holds.
LONGEST_COLUMN, LONGEST_ROW = 32, 128
#: What the kernel is told of a scheme where nothing is quantized.
NO_SCHEME = "mxfp4"


@dataclass(frozen=True)
class Rule:
    """What is done with the blocks of a matrix: mixed over `hadamard` elements (0: not), quantized by a scheme (None: not)."""

    scheme: Scheme | None
    hadamard: int
    axis: int

    @property
    def length(self) -> int:
        """Elements of a block; 0 where they are no plain blocks."""
        if self.scheme is None:
            return self.hadamard
        block = self.scheme.scale.block
        plain = isinstance(block, int) and block > 0 and self.hadamard in (0, block)
        return int(block) if plain else 0  # type: ignore[call-overload]


def covers(x: torch.Tensor, rule: Rule) -> bool:
    """Whether the kernels serve a contiguous matrix: whole blocks of a power of two, float elements, no zero points."""
    length, name = rule.length, FLOAT_NAMES.get(x.dtype)
    if name is None or x.dim() != 2 or not x.is_contiguous() or not x.numel() or x.data_ptr() % 16:
        return False
    if length < 4 or length & (length - 1) or x.shape[rule.axis] % length or max(x.shape) >= 2**30:
        return False
    if length > (LONGEST_ROW if rule.axis else LONGEST_COLUMN) or (rule.axis and name == "float32"):
        return False
    return rule.scheme is None or _quantizes(rule.scheme)


@lru_cache(maxsize=256)
def _quantizes(scheme: Scheme) -> bool:
    """Whether elements are those of default float schemes: each is multiplied by one reciprocal and stored as it is."""
    default = (
        scheme.nan,
        scheme.apply,
        scheme.arithmetic,
        scheme.overflow,
        scheme.dequantize,
        scheme.codes_from,
    )
    plain = default == ("block", "reciprocal", "float32", "saturate", "float32", "stored")
    fmt = scheme.format
    floats = (
        fmt.kind == "float" and fmt.bits <= 8 and scheme.zero is None and scheme.scale.statistic == "absmax"
    )
    outer = scheme.outer is None or scheme.outer.statistic == "absmax_elements"
    return plain and floats and outer and scheme.scale.stored == "decode" and fmt.specials != "ieee"


def mixed(x: torch.Tensor, rule: Rule) -> torch.Tensor:
    """Blocks of a matrix transformed; where `covers` says so."""
    y = torch.empty_like(x)
    _run(x, rule, block_op(output=FLOAT_NAMES[x.dtype]), {"y": y})
    return y


def values(x: torch.Tensor, rule: Rule, seed: int, stream: int) -> torch.Tensor:
    """What the codes of a matrix stand for, in its dtype and layout; where `covers` says so."""
    y = torch.empty_like(x)
    outer = _outer(x, rule)
    op = block_op(output=FLOAT_NAMES[x.dtype], outer="statistic" if outer else "")
    _run(x, rule, op, {"y": y, **outer}, seed, stream)
    return y


def quantized(x: torch.Tensor, rule: Rule, seed: int, stream: int) -> Quantized:
    """Codes and scales of a matrix, in its layout; where `covers` says so."""
    scheme = rule.scheme
    assert scheme is not None
    shape = list(x.shape)
    shape[rule.axis] //= rule.length
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    stored = getattr(torch, storage_dtype(scheme.scale.storage))
    scale = torch.empty(shape, dtype=stored, device=x.device)
    outer = _outer(x, rule)
    op = block_op(codes=True, scales=True, outer="statistic" if outer else "")
    _run(x, rule, op, {"codes": codes, "scale": scale, **outer}, seed, stream)
    return Quantized(codes, scale, outer.get("outer"), None, tuple(x.shape), rule.axis, scheme)


def _outer(x: torch.Tensor, rule: Rule) -> dict[str, torch.Tensor]:
    """The statistic of the outer scale, and memory for it; nothing where there is none."""
    if rule.scheme is None or rule.scheme.outer is None:
        return {}
    statistic = torch.zeros((), dtype=torch.int32, device=x.device)
    _run(x, rule, block_op(statistic=True, outer="statistic"), {"statistic": statistic})
    return {"statistic": statistic, "outer": torch.empty((), dtype=torch.float32, device=x.device)}


def _run(
    x: torch.Tensor, rule: Rule, op: BlockOp, tensors: dict[str, torch.Tensor], seed: int = 0, stream: int = 0
) -> None:
    constants, draws = _constants(rule.scheme, FLOAT_NAMES[x.dtype], not interpreted())
    pointers = (x, *(tensors.get(name) for name in ("codes", "scale", "outer", "statistic", "y")))
    drawn = (seed & 0xFFFFFFFF, seed >> 32, stream)
    length, (rows, columns) = rule.length, x.shape
    mix = (rule.hadamard > 0, _sign_bits(length), _factor(length), rule.scheme is None, draws)
    wide = prod(x.shape) >= 2**33
    if rule.axis:
        p, count = TILE * 4 // length, x.numel() // length
        grid, sizes, warps = -(-count // p), (count,), ROW_WARPS
        tail = (constants, op, length // 4, *mix, count % p != 0, wide, p)
        kernel: Any = rows_kernel
    else:
        grid, sizes, warps = rows // length * -(-columns // COLUMNS), (rows, columns), COLUMN_WARPS
        tail = (constants, op, length, *mix, columns % COLUMNS != 0, wide, COLUMNS)
        kernel = columns_kernel
    options = {} if interpreted() else {"num_warps": warps, **UNFUSED}
    with torch.cuda.device(x.get_device()):
        kernel[(grid,)](*pointers, *sizes, *drawn, *tail, **options)


@lru_cache(maxsize=256)
def _constants(scheme: Scheme | None, dtype: str, hardware: bool) -> tuple[SchemeConstants, bool]:
    """Constants of the kernel, and whether scaled elements are rounded stochastically without the general rules."""
    scheme = SCHEMES[NO_SCHEME] if scheme is None else scheme
    draws = scheme.rounding == "stochastic" and (is_fast_stochastic(scheme) or is_under_outer(scheme))
    return constants_of(scheme, dtype, hardware), draws


@lru_cache(maxsize=16)
def _sign_bits(length: int) -> int:
    """Bit i where element i of a block is negated."""
    return sum(1 << at for at, sign in enumerate(signs(length)) if sign < 0)


@lru_cache(maxsize=16)
def _factor(length: int) -> float:
    return float(np.float32(1 / sqrt(length)))


__all__ = ["Rule", "covers", "mixed", "quantized", "values"]
