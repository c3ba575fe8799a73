"""Pieces of a `QuantizedTensor`: slices, single experts, rows, other shapes, and pieces put together again.

What a piece has of each part is one table, `ENTRIES`: codes, metadata and the scales of its blocks, so that it dequantizes to
the same bits as the same piece of the dense tensor; all else holds for every piece. That is possible where no block, and no
byte of packed codes or metadata, is cut in two; everywhere else ValueError says where it may be sliced. Axes here are those of
the stored orientation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd, lcm, prod

import torch

from ao_lab.tensor.metadata import PARTS, PRESHUFFLED, SPARSE
from ao_lab.tensor.quantized_tensor import QuantizedTensor, signed, swapped
from fast.matmul.preshuffled.layout import rows_restored

Part = torch.Tensor | None
#: Parts that are scales, and zero points.
SCALES = ("scale", "outer", "zero")
#: Dense columns of a byte of metadata.
COLUMNS = 8


def _code_entries(t: QuantizedTensor, dim: int) -> tuple[int, int]:
    if dim != len(t.shape) - 1:
        return 1, 1
    bits, elements = t.scheme.format.bits, 2 if t.meta.layout == SPARSE else 1
    return (8 * elements, bits) if bits < 8 else (elements, 1)


def _block_entries(t: QuantizedTensor, dim: int) -> tuple[int, int]:
    return block_sizes(t)[dim], 1


def _metadata_entries(t: QuantizedTensor, dim: int) -> tuple[int, int]:
    return (COLUMNS if dim == len(t.shape) - 1 else 1), 1


#: By part, elements of the weight along an axis and the entries that hold them. Parts that are not here hold for every piece.
ENTRIES: dict[str, Callable[[QuantizedTensor, int], tuple[int, int]]] = {
    "codes": _code_entries, "scale": _block_entries, "zero": _block_entries, "metadata": _metadata_entries,
}  # fmt: skip


def axis_step(t: QuantizedTensor, dim: int) -> int:
    """Elements of an axis between which a tensor can be cut."""
    mixed = t.recipe.rotation if dim == len(t.shape) - 1 else 0
    return lcm(block_sizes(t)[dim], _byte_step(t, dim), mixed or 1)


def mapped_entries(t: QuantizedTensor, function: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Part]:
    """Parts, with `function` of those that have entries for places or blocks; scales over the whole tensor have none."""
    return {
        name: function(part) if part is not None and part.dim() and name in ENTRIES else part
        for name, part in t.parts.items()
    }


def slice_axis(t: QuantizedTensor, dim: int, start: int, end: int) -> QuantizedTensor:
    """Elements start to end (excluded) of an axis."""
    t.check_shaped()
    length = t.stored_shape[dim]
    start, end = _clamped(start, length), max(_clamped(end, length), _clamped(start, length))
    shape = _with(t.stored_shape, dim, end - start)
    if dim == 0 and end > start and are_preshuffled_experts(t):
        return _stored(t, _of_experts(t, lambda part: _narrowed(part, 0, start, end)), shape)
    t = t.in_rows
    if is_flat(t):
        return _slice_flat(t, dim, start, end, shape)
    _check_slice(t, dim, start, end)
    return _stored(t, {name: _slice_part(t, name, dim, start, end) for name in PARTS}, shape)


def select(t: QuantizedTensor, dim: int, index: int) -> QuantizedTensor:
    """One entry of an axis in front of the matrix (an expert), without that axis."""
    if dim >= len(t.shape) - 2:
        raise ValueError(
            f"select along axis {dim} of shape {tuple(t.shape)}: only axes in front of the last two; "
            f"slice it instead, or dequantize()"
        )
    length = t.stored_shape[dim]
    if not -length <= index < length:
        raise IndexError(f"entry {index} of axis {dim} with {length} entries")
    index = index % length
    t.check_shaped()
    if are_preshuffled_experts(t):
        return _stored(t, _of_experts(t, lambda part: part[index]), t.stored_shape[1:])
    one = slice_axis(t, dim, index, index + 1)
    if is_flat(t):
        parts = {**one.parts, "codes": one.codes.squeeze(dim)}
    else:
        parts = mapped_entries(one, lambda part: part.squeeze(dim))
    return _stored(t, parts, (*t.stored_shape[:dim], *t.stored_shape[dim + 1 :]))


def select_rows(t: QuantizedTensor, index: torch.Tensor, counted: bool = False) -> QuantizedTensor | None:
    """The entries of the first axis that `index` names, one after the other; None where blocks span that axis.

    counted: indices are integers from 0, and others raise what they raise for a dense tensor; else they are those of t[index].
    """
    t.check_shaped()
    if not has_entries(t):
        return None
    flat = index.reshape(-1)
    if is_flat(t):
        return _flat_entries(t, flat, counted)
    if are_preshuffled_experts(t) and flat.shape[0] == 0:
        return select_rows(t.plain, index, counted)
    if are_preshuffled_experts(t):
        chosen = _of_experts(t, lambda part: _picked(part, flat, counted))
        return _stored(t, chosen, (flat.shape[0], *t.stored_shape[1:]))
    if t.meta.layout == PRESHUFFLED:
        return _preshuffled_rows(t, flat, counted)
    parts = mapped_entries(t, lambda part: _picked(part, flat, counted))
    return _stored(t, parts, (flat.shape[0], *t.stored_shape[1:]))


def select_runs(t: QuantizedTensor, dim: int, index: torch.Tensor) -> QuantizedTensor:
    """What `index` names of an axis, where that is whole blocks: DTensor puts strided shards in order so."""
    numbers = index.reshape(-1)
    length = t.stored_shape[dim]
    if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < length:
        raise IndexError(
            f"index_select along an axis of {length} elements: {int(numbers.min())} to {int(numbers.max())}"
        )
    breaks = ((numbers[1:] - numbers[:-1]) != 1).nonzero().reshape(-1) + 1
    runs = [run for run in torch.tensor_split(numbers, breaks.cpu()) if run.numel()]
    try:
        pieces = [slice_axis(t, dim, int(run[0]), int(run[-1]) + 1) for run in runs]
        return concatenate(pieces, dim) if pieces else slice_axis(t, dim, 0, 0)
    except ValueError as error:
        raise ValueError(f"index_select along axis {dim} of {t!r}: {error}") from error


def has_entries(t: QuantizedTensor) -> bool:
    """Whether entries along the first axis are picked as they are stored: no block spans it.

    Of matrices whose blocks are of the flattened tensor none are.
    """
    if is_flat(t):
        return (
            t.meta.layout == "plain" and len(t.shape) == 3 and prod(t.stored_shape[1:]) % _flat_step(t) == 0
        )
    transposed = t.meta.transposed and len(t.shape) == 2
    one_block = t.scheme.scale.block == -1 and t.meta.axis == -len(t.shape)
    return t.meta.layout != "tiled" and not (transposed or one_block or block_sizes(t)[0] != 1)


def are_preshuffled_experts(t: QuantizedTensor) -> bool:
    """Whether pieces along axis 0 are preshuffled as well: experts, whose parts have them in front."""
    return t.meta.layout == PRESHUFFLED and len(t.stored_shape) == 3


def _of_experts(t: QuantizedTensor, function: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Part]:
    """Parts of some of the experts."""
    preshuffled = {name: part for name in ("codes", "scale", "zero") if (part := t.parts[name]) is not None}
    return {**t.parts, **{name: function(part) for name, part in preshuffled.items()}}


def _flat_entries(t: QuantizedTensor, index: torch.Tensor, counted: bool) -> QuantizedTensor:
    """Entries whose blocks are of the flattened tensor, each with scales of its own."""
    parts, count = dict(t.parts), t.stored_shape[0]
    for name in ("codes", "scale", "outer"):
        part = parts[name]
        if part is not None and part.dim():
            each = part.reshape(count, -1) if part.dim() == 1 else part
            picked = _picked(each, index, counted)
            parts[name] = picked.reshape(-1) if part.dim() == 1 else picked
    return _stored(t, parts, (index.shape[0], *t.stored_shape[1:]))


def _preshuffled_rows(t: QuantizedTensor, index: torch.Tensor, counted: bool) -> QuantizedTensor:
    """Rows of a preshuffled weight as a plain one; torch checks the indices, on rows' numbers."""
    numbers = torch.arange(t.shape[0], device=index.device)
    q = rows_restored(t.stored, numbers.index_select(0, index) if counted else numbers[index])
    parts: dict[str, Part] = {"codes": q.codes, "scale": q.scale, "zero": q.zero}
    return t.remade({**t.parts, **parts}, q.shape, layout="plain")


def _picked(part: torch.Tensor, index: torch.Tensor, counted: bool) -> torch.Tensor:
    """Entries of axis 0, as `torch.embedding` picks them (`counted`) or as part[index] does."""
    entries = signed(part)
    return (entries.index_select(0, index) if counted else entries[index]).view(part.dtype)


def concatenate(tensors: Sequence[QuantizedTensor], dim: int) -> QuantizedTensor:
    """Tensors of one recipe put together along an axis; ValueError where their blocks or scales do not go together."""
    first = tensors[0]
    first.check_shaped()
    if any(t.meta != first.meta for t in tensors):
        raise ValueError(
            "cat of QuantizedTensors of different recipes, axes or dtypes; dequantize() them first"
        )
    step = axis_step(first, dim)
    if is_flat(first):
        _check_flat_concatenate(first, tensors, dim)
    elif any(t.stored_shape[dim] % step for t in tensors[:-1]):
        raise ValueError(
            f"cat along axis {dim} in {first.scheme.name} cuts blocks of {block_sizes(first)[dim]} or bytes: all pieces but "
            f"the last hold multiples of {step}; dequantize() first"
        )
    parts = {name: _concatenate_part(tensors, name, dim) for name in PARTS}
    shape = _with(first.stored_shape, dim, sum(t.stored_shape[dim] for t in tensors))
    return _stored(first, parts, shape)


def scalars(t: QuantizedTensor) -> dict[str, torch.Tensor]:
    """Scales and zero points that hold for the whole tensor, and so for each piece of it."""
    return {name: part for name in SCALES if (part := t.parts[name]) is not None and part.dim() == 0}


def axis_scales(t: QuantizedTensor, dim: int) -> dict[str, torch.Tensor]:
    """Scales and zero points that hold for every piece along an axis."""
    return {
        name: part for name in SCALES if (part := t.parts[name]) is not None and not has_pieces(t, name, dim)
    }


def view(t: QuantizedTensor, shape: Sequence[int]) -> QuantizedTensor:
    """One axis, as FSDP2 stores shards, and back; or another shape with the same last axis, if blocks lie along it."""
    wanted = _inferred(shape, prod(t.shape))
    if wanted == tuple(t.shape):
        return t.remade(t.parts)
    if t.meta.flat is not None and wanted == t.meta.flat:
        return t.remade(t.parts, wanted, flat=None)
    if len(wanted) == 1:
        return t.remade(t.parts, wanted, flat=tuple(t.shape) if t.meta.flat is None else t.meta.flat)
    t, block = t.plain, t.scheme.scale.block
    if _changes_batch_alone(t, wanted):
        return _batch_view(t, wanted)
    along_last = (t.meta.axis == -1 and isinstance(block, int)) or block == "tensor"
    same_end = t.meta.flat is None and bool(wanted) and wanted[-1] == t.shape[-1]
    if t.meta.transposed or t.meta.layout == "tiled" or not same_end or not along_last:
        raise ValueError(
            f"view of shape {tuple(t.shape)} in {t.scheme.name} as {wanted}: the last axis must stay and hold the "
            f"blocks; dequantize() first"
        )
    return t.remade(mapped_entries(t, lambda part: part.reshape((*wanted[:-1], part.shape[-1]))), wanted)


def _changes_batch_alone(t: QuantizedTensor, wanted: tuple[int, ...]) -> bool:
    """Whether a view keeps the matrices of a batch, as products with inputs of several batch axes ask for."""
    matrices = len(t.shape) > 2 and len(wanted) > 2 and wanted[-2:] == tuple(t.shape[-2:])
    parts = [t.parts[name] for name in (*ENTRIES, "outer")]
    ranks = {0, len(t.shape)}  # of a scale over the whole tensor, and of parts that have the batch's axes
    return matrices and t.meta.layout != "tiled" and all(p is None or p.dim() in ranks for p in parts)


def _batch_view(t: QuantizedTensor, wanted: tuple[int, ...]) -> QuantizedTensor:
    """The same matrices along other batch axes."""
    parts = dict(t.parts)
    for name in (*ENTRIES, "outer"):
        part = parts[name]
        if part is not None and part.dim():
            parts[name] = part.reshape((*wanted[:-2], *part.shape[-2:]))
    return t.remade(parts, wanted)


def expand(t: QuantizedTensor, lead: tuple[int, ...]) -> torch.Tensor:
    """A batch of the same matrix, over the same parts; where its blocks are of the flattened tensor, a batch of its values."""
    t.check_shaped()
    t = t.in_rows
    if is_flat(t):
        if t.recipe.activation is not None:
            raise ValueError(
                f"expand of {t!r} to a batch: its blocks are of the flattened tensor; dequantize() first"
            )
        return t.dequantize().expand(*lead, *t.shape)
    return t.remade(mapped_entries(t, lambda part: part.expand(*lead, *part.shape)), (*lead, *t.shape))


def is_flat(t: QuantizedTensor) -> bool:
    """Whether blocks are of the flattened tensor."""
    return bool(t.scheme.scale.flat_size)


def has_pieces(t: QuantizedTensor, name: str, dim: int) -> bool:
    """Whether a part of a piece along an axis is a piece of the whole's part."""
    part = getattr(t, name)
    if part is None or part.dim() == 0 or name in ("input_scale", "input_zero"):
        return False
    spans = t.scheme.scale.block == -1 and dim == len(t.shape) + t.meta.axis
    return name in ("codes", "metadata") or not spans


def block_sizes(t: QuantizedTensor) -> list[int]:
    """Elements per block along every stored axis, 1 where blocks do not extend (whole axes and tensors: 1 too)."""
    block, rank = t.scheme.scale.block, len(t.shape)
    sizes = [1] * rank
    if isinstance(block, str) or block == -1:
        return sizes
    axis = rank + t.meta.axis
    first, second = block if isinstance(block, tuple) else (1, block)
    sizes[axis] = second
    if first != 1:
        sizes[max(other for other in range(rank) if other != axis)] = first
    return sizes


def cuts_blocks(piece: QuantizedTensor, whole: QuantizedTensor) -> bool:
    """Whether a view ends inside a block of the tensor that it is a view of, so that both have its scale."""
    scale, base = piece.scale, whole.scale
    for dim, size in enumerate(block_sizes(piece)):
        length, of_base = piece.stored_shape[dim], whole.stored_shape[dim]
        if size == 1 or length == of_base or length % size == 0:
            continue
        if scale is None or base is None or scale.dim() != base.dim() or not base.stride(dim):
            return True
        first = (scale.storage_offset() - base.storage_offset()) // base.stride(dim) % base.shape[dim]
        if first + scale.shape[dim] != base.shape[dim] or of_base % size != length % size:
            return True
    return False


def _check_slice(t: QuantizedTensor, dim: int, start: int, end: int) -> None:
    """ValueError where a slice begins or ends inside a block or a byte."""
    length, step = t.stored_shape[dim], axis_step(t, dim)
    # 2:4 storage holds whole blocks alone: what made it is checked by them.
    partial = t.scheme.scale.partial and t.meta.layout != SPARSE
    last_step = _byte_step(t, dim) if partial else step
    if start < end and (start % step or (end != length and end % last_step)):
        raise ValueError(
            f"elements {start} to {end} of axis {dim} (length {length}) in {t.scheme.name} cut a block of "
            f"{block_sizes(t)[dim]} or a byte of packed values or metadata; cut at multiples of {step} (among ranks: as many "
            f"as divide {-(-length // step)}), or dequantize() first"
        )


def _byte_step(t: QuantizedTensor, dim: int) -> int:
    """Elements of an axis that fill whole bytes of codes, and of metadata where there is some."""
    names = ("codes", "metadata") if t.meta.layout == SPARSE else ("codes",)
    held = [ENTRIES[name](t, dim) for name in names]
    return lcm(*(elements // gcd(elements, entries) for elements, entries in held))


def _slice_part(t: QuantizedTensor, name: str, dim: int, start: int, end: int) -> Part:
    """What a slice has of a part: its entries, or all of what holds for every piece."""
    part = t.parts[name]
    if part is None or name not in ENTRIES or not has_pieces(t, name, dim):
        return part
    elements, entries = ENTRIES[name](t, dim)
    return _narrowed(part, dim, -(-start * entries // elements), -(-end * entries // elements))


def _narrowed(part: torch.Tensor, dim: int, start: int, end: int) -> torch.Tensor:
    return part.narrow(dim, start, end - start)


def _slice_flat(
    t: QuantizedTensor, dim: int, start: int, end: int, shape: tuple[int, ...]
) -> QuantizedTensor:
    """A slice of leading entries where blocks, and blocks of scales, are of the flattened tensor."""
    row, size = prod(t.stored_shape[dim + 1 :]), t.scheme.scale.flat_size
    step = _flat_step(t)
    first, last, total = start * row, end * row, prod(t.stored_shape)
    if (start, end) != (0, t.stored_shape[dim]) and (
        prod(t.stored_shape[:dim]) != 1 or first % step or (last % step and last != total)
    ):
        raise ValueError(
            f"entries {start} to {end} of axis {dim} in {t.scheme.name}: pieces hold a multiple of {step} elements of the "
            f"flattened tensor of shape {t.stored_shape}; dequantize() first"
        )
    parts = {**t.parts, "codes": _slice_part(t, "codes", dim, start, end)}
    parts["scale"] = _narrowed(t.scale, 0, first // size, -(-last // size))
    if t.outer is not None and t.outer.dim():
        parts["outer"] = _narrowed(t.outer, 0, first // step, -(-last // step))
    return _stored(t, parts, shape)


def _stored(t: QuantizedTensor, parts: dict[str, Part], shape: tuple[int, ...]) -> QuantizedTensor:
    """A tensor of this stored shape, seen as t is."""
    return t.remade(parts, swapped(shape) if t.meta.transposed else shape)


def _concatenate_part(tensors: Sequence[QuantizedTensor], name: str, dim: int) -> Part:
    """A part of tensors put together: in a row where each has its own, else the one that they share."""
    first: Part = getattr(tensors[0], name)
    if first is not None and has_pieces(tensors[0], name, dim):
        return torch.cat([getattr(t, name) for t in tensors], 0 if first.dim() == 1 else dim)
    if not all(_is_same(first, getattr(t, name)) for t in tensors):
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


def _check_flat_concatenate(first: QuantizedTensor, tensors: Sequence[QuantizedTensor], dim: int) -> None:
    """ValueError where blocks of the flattened tensor are not those of the pieces, one after the other."""
    step = _flat_step(first)
    if any(prod(t.stored_shape[:dim]) != 1 or prod(t.stored_shape) % step for t in tensors[:-1]):
        raise ValueError(
            f"cat along axis {dim} in {first.scheme.name}: pieces of axis 0 that hold a multiple of {step} elements; "
            f"dequantize() first"
        )


def _flat_step(t: QuantizedTensor) -> int:
    """Elements of a block, and of a block of scales where these have one, of the flattened tensor."""
    group = t.scheme.outer.block if t.scheme.outer is not None else 1
    scaled = t.outer is not None and t.outer.dim() > 0
    return t.scheme.scale.flat_size * (group if scaled and isinstance(group, int) else 1)


def _with(shape: tuple[int, ...], dim: int, length: int) -> tuple[int, ...]:
    return (*shape[:dim], length, *shape[dim + 1 :])


def _clamped(index: int, length: int) -> int:
    return min(max(index + length if index < 0 else index, 0), length)


def _inferred(shape: Sequence[int], total: int) -> tuple[int, ...]:
    """The shape with its -1 filled in; ValueError where it holds another number of elements."""
    known = prod(length for length in shape if length != -1)
    wanted = tuple(total // max(known, 1) if length == -1 else length for length in shape)
    if prod(wanted) != total:
        raise ValueError(f"a tensor of {total} elements has no shape {tuple(shape)}")
    return wanted


__all__ = [
    "COLUMNS",
    "ENTRIES",
    "axis_scales",
    "axis_step",
    "block_sizes",
    "concatenate",
    "expand",
    "has_entries",
    "has_pieces",
    "is_flat",
    "mapped_entries",
    "scalars",
    "select",
    "select_rows",
    "select_runs",
    "slice_axis",
    "view",
]
