"""What `quantize` and `choose_scales` return: a stored tensor, and its scales alone."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

from reference.arrays.pytrees import array_container
from reference.quantize.blocks import Blocks
from reference.quantize.tiled_scales import check_tiled, tile_scales, untile_scales
from reference.schemes.schemes import Scheme

# Inside a rule the plain functions: no conversion from torch, no JAX program of their own.
_tile, _untile = inspect.unwrap(tile_scales), inspect.unwrap(untile_scales)


@array_container("scale", "outer", "zero")
@dataclass(frozen=True, eq=False)
class Scales:
    """Scales of a tensor, in the shapes of `Blocks.scale_shape`.

    scale: float32, or the codes of the record's storage format (uint8, uint16; int8 for integers).
    outer: second level, or None: 0-d for a scale over all elements, one per block of scales otherwise.
    zero: zero points (int8 codes, or float storage), or None; for schemes with `center="mean"` the 0-d float32 mean.
    """

    scale: Any = None
    outer: Any = None
    zero: Any = None


@array_container("codes", "scale", "outer", "zero")
@dataclass(frozen=True, eq=False)
class Quantized:
    """A stored tensor.

    codes: uint8 (uint16 for 16-bit elements) of the tensor's shape, one code per element in the low bits (what lies above them
    is ignored); where `packed`, packed by `reference.pack` along the last axis, shape `packed_shape(shape, element)`.
    scale, outer, zero: as in `Scales`. shape, axis: of the tensor that was quantized. scheme: the record. tiled: whether
    `scale` is the tiled layout of a matrix's scales (`tile_scales`), flat.
    """

    codes: Any
    scale: Any
    outer: Any
    zero: Any
    shape: tuple[int, ...]
    axis: int
    scheme: Scheme
    packed: bool = False
    tiled: bool = False

    @property
    def scales(self) -> Scales:
        """The scales alone, to be given to `quantize` again: not tiled."""
        return Scales(with_plain_scales(self).scale, self.outer, self.zero)

    @classmethod
    def from_fields(cls, values: dict[str, Any]) -> Quantized:
        """A `Quantized` with these fields, all of them given: the same as from `__init__`, in a fifth of the time."""
        q = object.__new__(cls)
        q.__dict__.update(values)
        return q


def with_tiled_scales(q: Quantized) -> Quantized:
    """q with its scales in the tiled layout; ValueError where the scheme or shape has none."""
    if q.tiled:
        return q
    check_tiled(q.scheme, q.shape, q.axis)
    return replace(q, scale=_tile(q.scale), tiled=True)


def with_plain_scales(q: Quantized) -> Quantized:
    """q with its scales row by row; ValueError where tiled ones have another shape than they should."""
    if not q.tiled:
        return q
    check_tiled(q.scheme, q.shape, q.axis)
    rows, columns = Blocks.of(q.shape, q.scheme.scale, q.axis).scale_shape
    return replace(q, scale=_untile(q.scale, (rows, columns)), tiled=False)


__all__ = ["Quantized", "Scales", "with_plain_scales", "with_tiled_scales"]
