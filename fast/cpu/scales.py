"""The factors and summands of a stored matrix's blocks as float32 matrices, and where torch operations may use them.

`BlockScales.of` gives None for weights that are left to the reference: blocks that do not run along the last axis, and
numbers near the ends of float32 (or of the dtype that is wanted), where dequantization saturates or a NaN's bits would be the
processor's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import torch

from fast.cpu.elements import Element, has_infinities, largest
from reference import Quantized
from reference.arrays.namespace import namespace_of
from reference.formats.formats import FORMATS
from reference.formats.storage import storage_dtype
from reference.quantize.blocks import Blocks
from reference.quantize.quantize import with_plain_scales
from reference.quantize.scales import given_scales
from reference.schemes.schemes import Scheme

#: Dtypes whose values come out; float32 carries them.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: The first code of e4m3 that is no number from 0 up.
E4M3_NAN = 0x7F


@dataclass(frozen=True)
class BlockScales:
    """Scales (rows, blocks) float32, one for `size` elements of a row; rows or blocks may be 1 (and stand for all).

    zero: zero points in the same places, None where there is none; `divides`: numbers are divided by their scale; table: where
    scale holds codes (uint8), what each stands for, float32 (256,).
    """

    scale: torch.Tensor
    zero: torch.Tensor | None
    size: int
    divides: bool
    table: torch.Tensor | None = None

    @classmethod
    def of(cls, q: Quantized, dtype: torch.dtype) -> BlockScales | None:
        """Those of a tensor to be dequantized to a dtype; None where only the reference has the bits."""
        if not covered(q.scheme, tuple(q.shape), q.axis, dtype):
            return None
        result = cls._made(q, dtype)
        return result if result.is_plain(q.scheme, dtype) else None

    @classmethod
    def _made(cls, q: Quantized, dtype: torch.dtype, zero_codes: bool = False) -> BlockScales:
        q = with_plain_scales(q)
        scheme = q.scheme
        scale = _decoding_scale(q, _carrier(scheme, dtype))
        zero = None if q.zero is None or _is_double(scheme) else _zero(q, zero_codes)
        return cls(*_as_rows(q, scale, zero), scheme.scale.stored == "encode")

    @classmethod
    def coded(cls, q: Quantized) -> BlockScales:
        """As `of` for float32, of numbers of any size; scales of 8 bits stay the codes they are, and come with their table,
        and zero points that are int8 stay that.

        Only of tensors that are `covered` (which is not asked again: a record's hash takes as long as a small product).
        """
        storage = q.scheme.scale.storage
        if storage_dtype(storage) not in ("uint8", "int8") or _is_double(q.scheme):
            return cls._made(q, torch.float32, zero_codes=True)
        q = with_plain_scales(q)
        zero = None if q.zero is None else _zero(q, codes=True)
        scale, zero, size = _as_rows(q, q.scale.view(torch.uint8), zero)
        return cls(scale, zero, size, q.scheme.scale.stored == "encode", scale_table(q))

    def part(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scales and zero points of some rows."""
        return _rows(self.scale, first, last), None if self.zero is None else _rows(self.zero, first, last)

    def is_plain(self, scheme: Scheme, dtype: torch.dtype) -> bool:
        """Whether no value leaves the dtype, and no product is NaN by arithmetic."""
        if not self.scale.numel():
            return True
        low, high = (float(end) for end in torch.aminmax(self.scale))
        element = Element.of(scheme)
        most, limit = max(abs(low), abs(high)), torch.finfo(dtype).max / 2
        if not most < torch.finfo(torch.float32).max:  # NaN too
            return False
        smallest = float(self.scale.abs().min()) if self.divides or has_infinities(element) else 1.0
        if smallest == 0:
            return False
        codes = largest(element) + (0 if self.zero is None or self._adds(scheme) else 256)
        reach = codes / smallest if self.divides else codes * most
        if self._adds(scheme) and self.zero is not None:
            reach += float(self.zero.abs().max())
        return reach < limit

    @staticmethod
    def _adds(scheme: Scheme) -> bool:
        return scheme.zero is not None and scheme.zero.rule == "value"


def _rows(x: torch.Tensor, first: int, last: int) -> torch.Tensor:
    return x if x.shape[0] == 1 else x[first:last]


@lru_cache(maxsize=4096)
def covered(scheme: Scheme, shape: tuple[int, ...], axis: int, dtype: torch.dtype) -> bool:
    """Whether torch operations dequantize a tensor of this shape: blocks along its last axis, in the dtypes of `DTYPES`."""
    block, last = scheme.scale.block, len(shape) - 1
    if dtype not in DTYPES or scheme.format.bits > 8 or len(shape) < 2 or not prod(shape):
        return False
    if scheme.outer is not None and not _is_double(scheme) and scheme.outer.block != "tensor":
        return False
    if block == "tensor":
        return True
    if flat := scheme.scale.flat_size:
        return shape[-1] % flat == 0
    if isinstance(block, tuple):
        return axis % len(shape) == last and len(shape) == 2
    return axis % len(shape) == last


def _is_double(scheme: Scheme) -> bool:
    """Whether the outer scale is over the scales."""
    return scheme.outer is not None and scheme.outer.statistic != "absmax_elements"


def _carrier(scheme: Scheme, dtype: torch.dtype) -> torch.dtype:
    """The dtype that every operation of the record rounds to."""
    return dtype if scheme.dequantize == "target" else torch.float32


def _decoding_scale(q: Quantized, unit: torch.dtype) -> torch.Tensor:
    """Scales in their kept shape as float32, rounded to `unit`, the outer one included."""
    if _is_double(q.scheme):
        return _double(q, unit)
    return _with_outer(_rounded(_loaded(q.scale, q.scheme.scale.storage), unit), q, unit)


def _with_outer(scale: torch.Tensor, q: Quantized, unit: torch.dtype) -> torch.Tensor:
    """Scales times the outer one, as the record orders it."""
    scheme, outer = q.scheme, q.outer
    if scheme.outer is None:
        return scale
    if scheme.outer_order == "encode":
        return _rounded(scale / outer, unit)
    return _rounded(scale * (1.0 / outer if scheme.outer_order == "folded" else outer), unit)


def scale_table(q: Quantized) -> torch.Tensor:
    """What each of the 256 codes of a tensor's scales stands for, the outer scale included, float32 (256,)."""
    return _with_outer(_storage_table(q.scheme.scale.storage), q, torch.float32).view(-1)


def _double(q: Quantized, unit: torch.dtype) -> torch.Tensor:
    """Scales that are quantized themselves, in groups along all of them, about their mean: float32 operations in the order of
    `reference.quantize.scales.double_scale`. Infinite ones are not made finite here: who asks leaves those to the reference."""
    outer, size = q.scales.outer, q.scheme.outer.block if q.scheme.outer is not None else None
    if unit != torch.float32 or not isinstance(size, int) or len(outer) != -(-q.scale.numel() // size):
        return _by_reference(q, unit)
    codes = q.scale.detach().reshape(-1).view(torch.uint8).numpy()
    numbers = np.ones(len(outer) * size, np.float32)
    numbers[: len(codes)] = _storage_table(q.scheme.scale.storage).numpy()[codes]
    with np.errstate(all="ignore"):
        numbers = numbers.reshape(-1, size) / outer.detach().numpy()[:, None] + q.scales.zero.detach().numpy()
    return torch.from_numpy(numbers.reshape(-1)[: len(codes)]).view(q.scale.shape)


def _by_reference(q: Quantized, unit: torch.dtype) -> torch.Tensor:
    blocks = Blocks.of(q.shape, q.scheme.scale, q.axis)
    parts = {name: getattr(q.scales, name).numpy() for name in ("scale", "outer", "zero")}
    given = type(q.scales)(**parts)
    chosen = given_scales(
        namespace_of(parts["scale"]), given, blocks, q.scheme, str(unit).removeprefix("torch.")
    )
    bits: Any = chosen.scale
    return _rounded(torch.from_numpy(bits.view("float32")).view(blocks.scale_shape), unit)


def _zero(q: Quantized, codes: bool = False) -> torch.Tensor:
    """Zero points as float32, or where they are `codes` of int8 as that."""
    record = q.scheme.zero
    if record is not None and record.rule == "value":
        return _loaded(q.zero, record.storage)
    zero: torch.Tensor = q.zero
    return zero if codes and zero.dtype == torch.int8 else zero.to(torch.float32)


def _loaded(kept: torch.Tensor, storage: str) -> torch.Tensor:
    """Kept scales as float32."""
    if storage == "float32":
        return kept
    name = storage_dtype(storage)
    if storage in ("bfloat16", "float16"):
        return kept.view(getattr(torch, storage)).to(torch.float32)
    codes = kept.view(torch.uint8) if name == "int8" else kept
    if storage == "float8_e8m0fnu":
        return codes.view(torch.float8_e8m0fnu).to(torch.float32)
    if storage == "float8_e4m3fn" and codes.numel() and int(codes.max()) < E4M3_NAN:
        # As numbers of float16, whose exponents are 8 less: quicker than a table and than torch's cast.
        return (codes.to(torch.int16) << 7).view(torch.float16).to(torch.float32).mul_(256)
    index = codes.reshape(-1).to(torch.int32)
    return torch.index_select(_storage_table(storage), 0, index).view(kept.shape)


@lru_cache(maxsize=16)
def _storage_table(storage: str) -> torch.Tensor:
    values = FORMATS[storage].values
    return torch.from_numpy(values[[code & (len(values) - 1) for code in range(256)]].copy())


def _rounded(x: torch.Tensor, unit: torch.dtype) -> torch.Tensor:
    return x if unit == torch.float32 else x.to(unit).to(torch.float32)


def _as_rows(
    q: Quantized, scale: torch.Tensor, zero: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Scales and zero points as matrices of the tensor's rows, and the elements of a block."""
    rows, length = prod(q.shape[:-1]), q.shape[-1]
    block = q.scheme.scale.flat_size or q.scheme.scale.block
    if block == "tensor":
        return scale.reshape(1, 1), None if zero is None else zero.reshape(1, 1), length
    size = length if block == -1 else block[1] if isinstance(block, tuple) else int(block)
    tall = block[0] if isinstance(block, tuple) else 1

    def matrix(x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(-1, -(-length // size))
        return x if tall == 1 else x.repeat_interleave(tall, 0)[:rows]

    return matrix(scale), None if zero is None else matrix(zero), size


__all__ = ["DTYPES", "BlockScales", "covered", "scale_table"]
