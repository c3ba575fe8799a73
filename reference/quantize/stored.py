"""What `quantize` and `choose_scales` return: a stored tensor, its scales alone, and the tiled layout of block scales.

cuBLAS's block-scaled GEMMs read scales in tiles of 128 rows by 4 columns, 512 bytes each. Rows are padded to a multiple of
128 and columns to a multiple of 4 with zeros. Tiles follow each other row by row of tiles; within a tile the scale of (row,
column) lies at byte

    (row % 32) * 16 + (row // 32) * 4 + column,

so that 16 neighbouring bytes hold the scales of rows r, r + 32, r + 64 and r + 96.

Source: cuBLAS documentation, "1D Block Scaling Factors Layout". torchao calls it `to_blocked`. Scales along M or N are the
rows here, blocks along K the columns, for 32 elements per e8m0 scale (MX) as for 16 per e4m3 scale (NVFP4).
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, field, replace
from math import prod
from operator import index
from typing import Any

from reference.arrays.bridges import array_container, bridged
from reference.arrays.namespace import Array, Namespace, as_array, namespace_of
from reference.quantize.blocks import Blocks
from reference.schemes.schemes import Scheme, record_of


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


@dataclass(frozen=True)
class QuantizedStructure:
    """What a `Quantized` is in JAX apart from its arrays, whatever axes stand before its own.

    `jax.lax.scan` takes the first axis off every array, `jax.vmap` puts one on: the shape is that of the codes at each time.
    axis: counted from the end. last: length of the last axis, which codes of less than a byte do not tell once packed; None
    where they do. shape: of the instance that was taken apart, for one whose codes are no array (a sharding, say). wrong: that
    shape, alone, where its codes were of another one, as made by hand; it stays, and the axis as it was, for an error; else ().
    """

    scheme: Any
    axis: Any
    last: int | None
    packed: bool
    tiled: bool
    shape: Any = field(compare=False)
    wrong: tuple[Any, ...] = ()

    @classmethod
    def of(cls, q: Quantized) -> QuantizedStructure:
        """That of q."""
        shape, axis, last = q.shape, q.axis, _last(q)
        lengths = getattr(q.codes, "shape", None)
        is_right = isinstance(shape, tuple) and (
            not isinstance(lengths, tuple)
            or (lengths == shape if last is None else lengths[:-1] == shape[:-1])
        )
        if is_right and _is_index(axis) and axis >= 0:
            axis -= len(shape) or 1
        parts = {"scheme": q.scheme, "axis": axis, "last": last, "packed": q.packed, "tiled": q.tiled}
        made = object.__new__(cls)  # JAX takes apart what each call is given: a third of the time of __init__
        made.__dict__.update(parts, shape=shape, wrong=() if is_right else (shape,))
        return made

    def filled(self, codes: Any, scale: Any, outer: Any, zero: Any) -> Quantized:
        """A `Quantized` of these arrays. An axis that codes of fewer axes do not have stays as it is, for an error."""
        lengths = getattr(codes, "shape", None)
        shape, axis = self.shape, self.axis
        if not self.wrong:
            if isinstance(lengths, tuple):
                shape = tuple(lengths) if self.last is None else (*lengths[:-1], self.last)
            if _is_index(axis) and axis + (len(shape) or 1) >= 0:
                axis += len(shape) or 1
        parts = {"codes": codes, "scale": scale, "outer": outer, "zero": zero, "shape": shape, "axis": axis}
        return Quantized.from_fields(
            {**parts, "scheme": self.scheme, "packed": self.packed, "tiled": self.tiled}
        )

    def text(self) -> str:
        """As JSON, the scheme by its key."""
        fields = {**self.__dict__, "scheme": self.scheme.key, "shape": [_length(n) for n in self.shape]}
        return json.dumps(fields, default=index)

    @classmethod
    def read(cls, text: str) -> QuantizedStructure:
        """The inverse of `text`; formats of a scheme of one's own are registered."""
        fields = json.loads(text)
        shape, wrong = tuple(fields["shape"]), tuple(map(tuple, fields["wrong"]))
        return cls(**{**fields, "scheme": record_of(fields["scheme"]), "shape": shape, "wrong": wrong})


def _last(q: Quantized) -> Any:
    """The length of the last axis where packed codes do not tell it; else None."""
    is_short = q.packed and isinstance(q.scheme, Scheme) and q.scheme.format.bits < 8
    return q.shape[-1] if is_short and isinstance(q.shape, tuple) and q.shape else None


def _is_index(axis: Any) -> bool:
    return hasattr(axis, "__index__") and not isinstance(axis, bool)


def _length(n: Any) -> Any:
    """A length, or the text of a symbolic one."""
    return int(n) if hasattr(n, "__index__") else str(n)


@array_container("codes", "scale", "outer", "zero", structure=QuantizedStructure)
@dataclass(frozen=True, eq=False)
class Quantized:
    """A quantized tensor: codes of its elements, scales, zero points and the scheme.

    codes: uint8 (uint16 for 16-bit elements) of the tensor's shape, one code per element in the low bits (what lies above
    them is ignored); where `packed`, packed by `reference.pack` along the last axis, shape `packed_shape(shape, element)`.
    scale, outer, zero: as in `Scales`; of most schemes bit patterns in uint8 too (`decode(q.scale, q.scheme.scale.storage)`
    gives their values). shape, axis: of the tensor that was quantized. scheme: the record. tiled: whether `scale` is the
    tiled layout of a matrix's scales (`tile_scales`), flat.
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

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """TypeError: NumPy would make an array of one object of it."""
        raise TypeError(
            "a Quantized is no array: dequantize(q) gives its values, q.codes the codes of its elements"
        )

    def __repr__(self) -> str:
        """The scheme, shapes and dtypes, without the values: "Quantized(mxfp8_e4m3, shape (4, 96), codes uint8, ...)"."""
        parts = [("codes", self.codes), ("scale", self.scale), ("outer", self.outer), ("zero", self.zero)]
        told = [f"{name} {_described(part, self.shape)}" for name, part in parts if part is not None]
        # Codes of whole bytes are the same packed or not.
        packed = self.packed and self.scheme.format.bits % 8 != 0
        flags = [name for name, on in (("packed", packed), ("tiled", self.tiled)) if on]
        axis = [f"axis {self.axis}"] if self.axis not in (-1, len(self.shape) - 1) else []
        elements = prod(self.shape)
        extra = sum(
            8 * prod(part.shape) * part.dtype.itemsize for _, part in parts[1:] if hasattr(part, "dtype")
        )
        bits = [f"{self.scheme.format.bits + extra / elements:.4g} bits/element"] if elements else []
        return f"Quantized({', '.join([self.scheme.name, f'shape {tuple(self.shape)}', *axis, *told, *flags, *bits])})"

    @classmethod
    def from_fields(cls, values: dict[str, Any]) -> Quantized:
        """A `Quantized` with these fields, all of them given: the same as from `__init__`, in a fifth of the time."""
        q = object.__new__(cls)
        q.__dict__.update(values)
        return q


def _described(part: Any, shape: tuple[int, ...]) -> str:
    """The shape of an array, where it is another than the tensor's, and its dtype; anything else as it is."""
    if not hasattr(part, "dtype"):
        return repr(part)
    dtype = str(part.dtype).removeprefix("torch.")
    return dtype if tuple(part.shape) == tuple(shape) else f"{tuple(part.shape)} {dtype}"


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


ROWS, COLUMNS = 128, 4
LANES = 32
STORAGES = ("float8_e8m0fnu", "float8_e4m3fn")


def tiled_size(shape: tuple[int, int]) -> int:
    """Bytes of the tiled form of scales of this shape."""
    rows, columns = _tiles(shape)
    return rows * columns * ROWS * COLUMNS


@bridged
def tile_scales(scale: Any) -> Array:
    """Scale codes (M, blocks), uint8, as a flat uint8 array of `tiled_size` bytes; padding is 0.

    scale: the `scale` of `quantize(x, ..., axis=-1)` of a matrix, NumPy, JAX or torch. Raises TypeError for other
    dtypes than uint8 and ValueError for other ranks than 2.
    """
    ns, scale = _byte_input(scale, "tile_scales")
    shape = ns.shape(scale)
    if len(shape) != 2:
        raise ValueError(f"tile_scales takes scales of a matrix, (M, blocks), got shape {shape}")
    rows, columns = _tiles(shape)
    scale = _pad(ns, _pad(ns, scale, 0, rows * ROWS), 1, columns * COLUMNS)
    tiles = scale.reshape((rows, ROWS // LANES, LANES, columns, COLUMNS))
    # (tile row, row // 32, row % 32, tile column, column) -> (tile row, tile column, row % 32, row // 32, column)
    return ns.moveaxis(ns.moveaxis(tiles, 1, 3), 1, 2).reshape((-1,))


@bridged
def untile_scales(tiled: Any, shape: tuple[int, int]) -> Array:
    """Scales of `shape` (M, blocks) from their tiled layout (the inverse of `tile_scales`); padding bytes are ignored.

    tiled: uint8 of shape (tiled_size(shape),). Raises TypeError for other dtypes, ValueError where the shapes do not fit.
    """
    ns, tiled = _byte_input(tiled, "untile_scales")
    shape = _matrix_shape(shape)
    if ns.shape(tiled) != (tiled_size(shape),):
        raise ValueError(
            f"scales of shape {shape} are tiled into shape {(tiled_size(shape),)}, got {ns.shape(tiled)}"
        )
    rows, columns = _tiles(shape)
    tiles = tiled.reshape((rows, columns, LANES, ROWS // LANES, COLUMNS))
    plain = ns.moveaxis(ns.moveaxis(tiles, 2, 1), 3, 1)
    return plain.reshape((rows * ROWS, columns * COLUMNS))[: shape[0], : shape[1]]


def check_tiled(scheme: Scheme, shape: tuple[int, ...], axis: int) -> None:
    """ValueError unless scales of a tensor of this shape have a tiled form: a matrix, a byte for each block of its rows."""
    block = scheme.scale.block
    if not isinstance(block, int) or block < 1 or scheme.scale.storage not in STORAGES:
        raise ValueError(
            f"tiled=True takes a scheme with blocks along one axis and scales stored in {' or '.join(STORAGES)}, got "
            f"{scheme.name!r} with blocks {block!r} and scales in {scheme.scale.storage}; leave tiled out"
        )
    if len(shape) != 2 or Blocks.of(shape, scheme.scale, axis).axis != 1:
        raise ValueError(
            f"tiled=True takes a matrix (M, K) with blocks along its last axis, got shape {shape} and axis {axis}; "
            f"reshape or transpose it, or leave tiled out"
        )


def _tiles(shape: tuple[int, ...]) -> tuple[int, int]:
    """Tiles along rows and columns."""
    return -(-shape[0] // ROWS), -(-shape[1] // COLUMNS)


def _matrix_shape(shape: tuple[int, int]) -> tuple[int, int]:
    if len(shape) != 2 or min(shape) < 0:
        raise ValueError(f"shape is that of a matrix of scales, (M, blocks), got {tuple(shape)}")
    return shape[0], shape[1]


def _byte_input(x: Any, what: str) -> tuple[Namespace, Array]:
    x = as_array(x)
    ns = namespace_of(x)
    if ns.dtype_name(x) != "uint8":
        raise TypeError(
            f"{what} takes scale codes as uint8, got {ns.dtype_name(x)} of shape {ns.shape(x)}; view them as uint8"
        )
    return ns, x


def _pad(ns: Namespace, x: Array, axis: int, length: int) -> Array:
    shape = list(ns.shape(x))
    shape[axis] = length - shape[axis]
    return ns.concatenate([x, ns.full(tuple(shape), 0, "uint8", x)], axis) if shape[axis] else x


# Inside a rule the plain functions: no conversion from torch, no JAX program of their own.
_tile, _untile = inspect.unwrap(tile_scales), inspect.unwrap(untile_scales)


__all__ = ["Quantized", "Scales", "with_plain_scales", "with_tiled_scales"]
