"""Pieces of a `SparseQuantizedTensor`, and pieces put together, as `ao_lab.tensor.slicing` has them of dense ones.

A piece keeps its codes, its metadata and the scales of its blocks, so it stands for the same bits as the same piece of the
dense tensor. Rows may be cut anywhere, blocks of several rows between them; columns where no byte of metadata (8 columns), no
byte of packed codes and no block is cut. Functions here take tensors in the stored orientation; `in_stored` brings one there
and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd, lcm, prod

import torch

from ao_lab.tensor.slicing import block_sizes, has_pieces
from ao_lab.tensor.sparse.metadata import COLUMNS, signed, unsigned
from ao_lab.tensor.sparse.sparse_tensor import SparseQuantizedTensor

#: Parts that have an entry for each place of a tensor or its blocks.
PIECES = ("codes", "scale", "zero", "metadata")
Part = torch.Tensor | None


def in_stored(t: SparseQuantizedTensor, dim: int) -> tuple[SparseQuantizedTensor, int, bool]:
    """The tensor in its stored orientation, the axis there, and whether it was turned."""
    t.check_shaped()
    rank = len(t.shape)
    place = dim % rank
    if not t.turned:
        return t, place, False
    return t.transposed(), {rank - 1: rank - 2, rank - 2: rank - 1}.get(place, place), True


def slice_axis(t: SparseQuantizedTensor, dim: int, start: int, end: int) -> SparseQuantizedTensor:
    """Elements start to end (excluded) of a logical axis; ValueError where bytes or blocks would be cut."""
    stored, place, turned = in_stored(t, dim)
    length = stored.shape[place]
    start = _clamped(start, length)
    end = max(_clamped(end, length), start)
    step = column_step(stored) if place == len(stored.shape) - 1 else block_sizes(stored)[place]
    if (start % step and start != end) or (end % step and end != length):
        raise ValueError(
            f"elements {start} to {end} of axis {dim} (length {length}) in {stored.scheme.name} cut a block, or a byte of "
            f"metadata or codes; cut at multiples of {step}, or dequantize() first"
        )
    parts = {name: _narrowed(stored, name, place, start, end) for name in stored.parts}
    piece = stored.remade(parts, (*stored.shape[:place], end - start, *stored.shape[place + 1 :]))
    return piece.transposed() if turned else piece


def select(t: SparseQuantizedTensor, dim: int, index: int) -> SparseQuantizedTensor:
    """One entry of an axis in front of the matrix, without that axis."""
    if dim >= len(t.shape) - 2:
        raise ValueError(
            f"select along axis {dim} of shape {tuple(t.shape)}: only axes in front of the last two; slice it instead, or "
            f"dequantize()"
        )
    length = t.shape[dim]
    if not -length <= index < length:
        raise IndexError(f"entry {index} of axis {dim} with {length} entries")
    index = index % length
    one = slice_axis(t, dim, index, index + 1)
    return with_parts(one, lambda part: part.squeeze(dim), (*t.shape[:dim], *t.shape[dim + 1 :]))


def select_rows(t: SparseQuantizedTensor, index: torch.Tensor) -> SparseQuantizedTensor | None:
    """The entries of the first axis that `index` names, one after the other; None where blocks or groups span that axis."""
    t.check_shaped()
    if (t.turned and len(t.shape) == 2) or block_sizes(t)[0] != 1:
        return None
    flat = index.reshape(-1)
    return with_parts(t, lambda part: _rows_of(part, flat), (flat.shape[0], *t.shape[1:]))


def _rows_of(part: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Entries of axis 0."""
    return unsigned(signed(part)[index])


def concatenate(tensors: Sequence[SparseQuantizedTensor], dim: int) -> SparseQuantizedTensor:
    """Tensors of one recipe put together along a logical axis; ValueError where bytes, blocks or scales do not go together."""
    first = tensors[0]
    if any(t.meta != first.meta for t in tensors):
        raise ValueError(
            "cat of 2:4 tensors of different recipes, orientations or dtypes; dequantize() them first"
        )
    stored = [in_stored(t, dim)[0] for t in tensors]
    _, place, turned = in_stored(first, dim)
    last = place == len(first.shape) - 1
    step = column_step(stored[0]) if last else block_sizes(stored[0])[place]
    if any(t.shape[place] % step for t in stored[:-1]):
        raise ValueError(
            f"cat along axis {dim} in {first.scheme.name} cuts blocks or bytes: pieces of multiples of {step}; dequantize() "
            f"first"
        )
    parts = {name: _joined(stored, name, place) for name in stored[0].parts}
    shape = stored[0].shape
    made = stored[0].remade(parts, (*shape[:place], sum(t.shape[place] for t in stored), *shape[place + 1 :]))
    return made.transposed() if turned else made


def with_parts(
    t: SparseQuantizedTensor, change: Callable[[torch.Tensor], torch.Tensor], shape: Sequence[int]
) -> SparseQuantizedTensor:
    """`change` of every part that has entries for places, under another shape."""
    parts = {
        name: change(part) if part is not None and is_piece(part, name) else part
        for name, part in t.parts.items()
    }
    return t.remade(parts, shape)


def view(t: SparseQuantizedTensor, shape: Sequence[int]) -> SparseQuantizedTensor:
    """One axis, as FSDP2 stores shards, and back; or other leading axes before the same last one."""
    total = prod(t.shape)
    known = prod(length for length in shape if length != -1)
    wanted = tuple(total // max(known, 1) if length == -1 else length for length in shape)
    if prod(wanted) != total:
        raise ValueError(f"a tensor of {total} elements has no shape {tuple(shape)}")
    if wanted == tuple(t.shape):
        return t.remade(t.parts)
    if t.meta.flat is not None and wanted == t.meta.flat:
        return t.remade(t.parts, wanted, flat=None)
    if len(wanted) == 1:
        return t.remade(t.parts, wanted, flat=tuple(t.shape) if t.meta.flat is None else t.meta.flat)
    if t.meta.flat is None and len(t.shape) > 2 and len(wanted) > 2 and wanted[-2:] == tuple(t.shape[-2:]):
        # The same matrices along other batch axes, as products with inputs of several ask for.
        return with_parts(t, lambda part: part.reshape(*wanted[:-2], *part.shape[-2:]), wanted)
    if (
        t.turned
        or t.meta.flat is not None
        or wanted[-1] != t.shape[-1]
        or isinstance(t.scheme.scale.block, tuple)
    ):
        raise ValueError(
            f"view of shape {tuple(t.shape)} in {t.scheme.name} as {wanted}: the last axis must stay, and hold groups and "
            f"blocks; "
            f"dequantize() first"
        )
    return with_parts(t, lambda part: part.reshape(*wanted[:-1], part.shape[-1]), wanted)


def is_piece(part: torch.Tensor, name: str) -> bool:
    """Whether a part has entries for places or blocks; scales over the whole tensor have none."""
    return name in PIECES and part.dim() > 0


def column_step(t: SparseQuantizedTensor) -> int:
    """Columns between which a tensor in its stored orientation can be cut."""
    bits = min(t.scheme.format.bits, 8)
    return lcm(COLUMNS, 2 * 8 // gcd(8, bits), block_sizes(t)[-1])


def differs(t: SparseQuantizedTensor, name: str, dim: int) -> bool:
    """Whether a part of a piece along a stored axis is a piece of the whole's part."""
    return name == "metadata" or has_pieces(t, name, dim)


def _narrowed(t: SparseQuantizedTensor, name: str, dim: int, start: int, end: int) -> Part:
    """A part of a slice along a stored axis."""
    part: Part = t.parts[name]
    last = dim == len(t.shape) - 1
    if part is None or not differs(t, name, dim):
        return part
    if name in ("scale", "zero"):
        size = block_sizes(t)[dim]
        return part.narrow(dim, start // size, -(-end // size) - start // size)
    if not last:
        return part.narrow(dim, start, end - start)
    first = start // COLUMNS if name == "metadata" else _byte(t, start)
    stop = -(-end // COLUMNS) if name == "metadata" else _byte(t, end)
    return part.narrow(dim, first, stop - first)


def _byte(t: SparseQuantizedTensor, column: int) -> int:
    """Where the codes of a dense column begin along the last axis."""
    bits = t.scheme.format.bits
    return column // 2 if bits >= 8 else -(-(column // 2) * bits // 8)


def _joined(tensors: Sequence[SparseQuantizedTensor], name: str, dim: int) -> Part:
    """A part of tensors put together: in a row where each has its own, else the one that they share."""
    first: Part = tensors[0].parts[name]
    if first is not None and differs(tensors[0], name, dim):
        return torch.cat([part for t in tensors if (part := t.parts[name]) is not None], dim)
    if not all(_is_same(first, t.parts[name]) for t in tensors):
        raise ValueError(
            f"cat along axis {dim} in {tensors[0].scheme.name}: each piece has its own {name}, which has to hold for all; "
            f"dequantize() first"
        )
    return first


def _is_same(first: Part, other: Part) -> bool:
    """Whether two pieces have the same part. Tracers, which have no values, take the same tensor alone."""
    if first is other or first is None or other is None:
        return first is other
    return type(first) is torch.Tensor and first.shape == other.shape and torch.equal(first, other)


def _clamped(place: int, length: int) -> int:
    return min(max(place + length if place < 0 else place, 0), length)


__all__ = [
    "column_step",
    "concatenate",
    "differs",
    "in_stored",
    "is_piece",
    "select",
    "select_rows",
    "slice_axis",
    "view",
    "with_parts",
]
