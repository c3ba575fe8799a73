"""A tensor as blocks that share a scale, and back.

`Blocks` is the one place that knows what `Scale.block` and `axis` mean. `split` brings a tensor into shape (..., blocks,
elements of a block), so that every rule reduces over the last axis; `join` undoes it. Scales inside have a last axis of 1;
outside they have the tensor's shape with blocked axes divided: `expose` and `accept` convert.

A short last block is filled by repeating its last element (which changes no minimum and no maximum), an empty block that
needs a scale all the same (a row of length 0) holds one zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from reference.arrays.namespace import Array, Namespace
from reference.schemes.schemes import Block, Scale, flat_size


def normalize_axis(axis: int, shape: tuple[int, ...]) -> int:
    """A non-negative axis; ValueError when it is outside the shape, TypeError when it is no integer."""
    # operator.index would take True; NumPy's integers are welcome.
    if isinstance(axis, bool) or not hasattr(axis, "__index__"):
        raise TypeError(f"axis is an integer, got {type(axis).__name__}: {axis!r}")
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"axis {axis} is outside a tensor of shape {shape} with {len(shape)} axes")
    return int(axis) % len(shape)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Blocks:
    """Blocks of a tensor of `shape` along `axis` as a `Scale` record defines them."""

    shape: tuple[int, ...]
    block: Block
    axis: int
    partial: bool

    @classmethod
    def of(cls, shape: tuple[int, ...], scale: Scale, axis: int) -> Blocks:
        """Blocks of a tensor of this shape; ValueError where they do not divide it, TypeError for a non-integer axis."""
        per_axis = not isinstance(scale.block, str)
        # A 0-d tensor is one block of one element, whatever the axis.
        axis = normalize_axis(axis, shape or (1,)) if per_axis or shape else 0
        blocks = cls(shape, scale.block, axis, scale.partial)
        blocks._check()
        return blocks

    def _check(self) -> None:
        if isinstance(self.block, tuple) and len(self.shape) < 2:
            raise ValueError(f"blocks of {self.block} need at least two axes, got shape {self.shape}")
        if self.block in (-1, "tensor"):  # one block, whatever its length, which a tracer may leave open
            return
        for length, size in zip(self._lengths, self._sizes, strict=True):
            if length % size and not self.partial and not self.shape:
                raise ValueError(
                    f"a single value (shape ()) has no axis to cut into blocks of {size}; give an array, such as x.reshape(1) "
                    f"padded to {size} values, or a scheme with one scale for a row or a tensor"
                )
            if length % size and not self.partial:
                raise ValueError(
                    f"shape {self.shape}: {length} elements are not divisible by the block size {size}"
                    f"{self._where}; pad the tensor, choose another block, or set partial=True in the scheme's Scale, as nf4 "
                    "does, for a short last block"
                )

    @property
    def _where(self) -> str:
        return f" along axis {self.axis}" if not isinstance(self.block, str) else ""

    @property
    def _moved(self) -> tuple[int, ...]:
        """Shape with the blocked axis last (whole-tensor and flat blocks: one axis)."""
        if isinstance(self.block, str):
            return (prod(self.shape),)
        shape = self.shape or (1,)
        return (*shape[: self.axis], *shape[self.axis + 1 :], shape[self.axis])

    @property
    def _lengths(self) -> tuple[int, ...]:
        """Lengths of the blocked axes."""
        return self._moved[-2:] if isinstance(self.block, tuple) else self._moved[-1:]

    @property
    def _sizes(self) -> tuple[int, ...]:
        if isinstance(self.block, tuple):
            return self.block
        if flat := flat_size(self.block):
            return (flat,)
        whole = self.block in (-1, "tensor")
        return (max(self._lengths[-1], 1),) if whole else (int(self.block),)

    @property
    def _counts(self) -> tuple[int, ...]:
        whole = self.block in (-1, "tensor")
        return (1,) if whole else tuple(_ceil(n, b) for n, b in zip(self._lengths, self._sizes, strict=True))

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of the scale array as users see it."""
        if self.block == "tensor":
            return ()
        if isinstance(self.block, str) or not self.shape:
            return self._counts if self.shape or self.block != -1 else ()
        lead = self._moved[: -len(self._counts)]
        moved = (*lead, *self._counts)
        return (*moved[: self.axis], moved[-1], *moved[self.axis : -1])

    def split(self, ns: Namespace, x: Array, *, zeros: bool = False) -> Array:
        """x of `shape` as (..., blocks, block size); `zeros` fills a short last block with zeros."""
        x = self._move(ns, x).reshape(self._moved)
        lead = self._moved[: -len(self._sizes)]
        for position, (length, size, count) in enumerate(
            zip(self._lengths, self._sizes, self._counts, strict=True)
        ):
            x = _fill(ns, x, len(lead) + position, count * size - length, zeros)
        if len(self._sizes) == 1:
            return x.reshape((*lead, *self._counts, self._sizes[0]))
        (rows, columns), (r, c) = self._counts, self._sizes
        x = x.reshape((*lead, rows, r, columns, c))
        return ns.moveaxis(x, -3, -2).reshape((*lead, rows, columns, r * c))

    def join(self, ns: Namespace, blocks: Array) -> Array:
        """The inverse of `split`."""
        lead = self._moved[: -len(self._sizes)]
        if len(self._sizes) == 2:
            (rows, columns), (r, c) = self._counts, self._sizes
            blocks = ns.moveaxis(blocks.reshape((*lead, rows, columns, r, c)), -2, -3)
            x = blocks.reshape((*lead, rows * r, columns * c))
            x = x[..., : self._lengths[0], : self._lengths[1]]
        else:
            x = blocks.reshape((*lead, self._counts[0] * self._sizes[0]))[..., : self._lengths[0]]
        if isinstance(self.block, str):
            return x.reshape(self.shape)
        return ns.moveaxis(x, -1, self.axis).reshape(self.shape)

    def expose(self, scale: Array, ns: Namespace) -> Array:
        """A scale of shape (..., blocks, 1) as users see it."""
        if len(self.scale_shape) < 2:
            return scale.reshape(self.scale_shape)
        return ns.moveaxis(scale[..., 0], -1, self.axis)

    def accept(self, scale: Array, ns: Namespace) -> Array:
        """The inverse of `expose`."""
        if len(self.scale_shape) < 2:
            return scale.reshape((*self._counts, 1))
        return ns.moveaxis(scale, self.axis, -1)[..., None]

    def _move(self, ns: Namespace, x: Array) -> Array:
        return x if isinstance(self.block, str) or not self.shape else ns.moveaxis(x, self.axis, -1)


def _fill(ns: Namespace, x: Array, axis: int, missing: int, zeros: bool) -> Array:
    """Lengthen an axis by repeating its last element, or with zeros, also when it is empty."""
    if missing <= 0:
        return x
    shape = list(ns.shape(x))
    if shape[axis] == 0 or zeros:
        empty = shape[axis] == 0
        shape[axis] = missing
        filler = ns.full(tuple(shape), 0, ns.dtype_name(x), x)
        return filler if empty else ns.concatenate([x, filler], axis)
    last = x[(slice(None),) * axis + (slice(-1, None),)]
    shape[axis] = missing
    return ns.concatenate([x, ns.broadcast_to(last, tuple(shape))], axis)
