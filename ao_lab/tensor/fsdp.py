"""`QuantizedTensor` under FSDP2: a shard is rows of the weight with the scales of their blocks, gathered as they are stored.

FSDP2 slices a parameter along axis 0 (`chunk`), keeps the piece, and before a layer runs gathers what `gathered_parts` names:
codes and scales, never a dense weight. Scales over the whole weight (0-d) and static scales of inputs are the same on every
rank and stay where they are. Weights are frozen; what trains beside them (adapters, norms) is FSDP2's as always.

Where ranks do not divide the rows, FSDP2 gathers tensors of the weight's own shape alone, the last shards filled up. Then the
bytes of a row (its codes, scales and zero points) travel in as many byte tensors of that shape as hold them: one byte an
element for weights of 4 bits, two for weights of 8 bits with scales. Ranks that divide the rows send less.

FSDP1 (`FullyShardedDataParallel`) joins the parameters of a unit in one tensor of one dtype, of which codes are no part. It
leaves quantized weights out, as it leaves out what another unit has joined: each rank keeps them whole, and shards and reduces
what trains beside them.

A shard of 2:4 weights is rows too, with their metadata. Ranks have to divide the rows: nothing fills shards up.

DTensor's shards and tensor parallelism need nothing of this; see `ao_lab.tensor.collectives`.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ao_lab.gemm.operand import forget_arranged
from ao_lab.tensor.metadata import PARTS, SPARSE
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.tensor.slicing import block_sizes, has_pieces, is_flat

#: The names of the parts that were sent, the weight's shape, and whether they were sent as bytes of rows.
Metadata = tuple[tuple[str, ...], tuple[int, ...], bool]
Parts = dict[str, torch.Tensor]


def gathered_parts(
    t: QuantizedTensor, mesh: Any, whole: tuple[int, ...]
) -> tuple[tuple[torch.Tensor, ...], Metadata]:
    """The parts of a shard that differ between ranks, or their bytes, and what `whole_weight` has to know.

    ValueError, on every rank, where rows of the weight are not rows of its parts.
    """
    if t.meta.transposed:
        raise ValueError(
            f"FSDP2 cuts the rows of {t!r}, which is stored transposed; quantize it as (rows, columns)"
        )
    t = t.in_rows
    # Of one rank FSDP2 hands back the first alone; the others lie in the shard.
    names = [name for name in PARTS if has_pieces(t, name, 0)] if mesh.size() > 1 else ["codes"]
    parts = {name: sent(getattr(t, name)) for name in names}
    if whole[0] % mesh.size() == 0:
        return tuple(parts.values()), (tuple(parts), whole, False)
    _check_rows(t, mesh.size(), whole)
    rows = -(-whole[0] // mesh.size())
    return _sent_bytes(parts, rows, whole[1:]), (tuple(parts), whole, True)


def whole_weight(
    t: QuantizedTensor, outputs: tuple[torch.Tensor, ...], metadata: Metadata, dtype: torch.dtype
) -> tuple[QuantizedTensor, tuple[torch.Tensor, ...]]:
    """The weight of what was gathered, and its tensors of which FSDP2 may take the memory back between layers.

    It lies over the memory of what was gathered, on a CPU over a copy: the reference reads tensors as NumPy arrays, and memory
    that NumPy has seen torch does not give back.
    """
    _, whole, as_bytes = metadata
    t = t.plain
    gathered = _received(t, outputs, metadata)
    on_cpu = t.device.type == "cpu"
    owned = {name: part.clone() if on_cpu or as_bytes else part for name, part in gathered.items()}
    own = tuple(owned.values()) if as_bytes and not on_cpu else ()
    layout = SPARSE if t.meta.layout == SPARSE else "plain"
    return t.remade({**t.parts, **owned}, whole, dtype=dtype, layout=layout), own


def refill(out: Any, outputs: tuple[torch.Tensor, ...], metadata: Metadata) -> None:
    """Bring a weight that `whole_weight` made up to date with what was gathered again: its copies.

    Under tensor parallelism beside FSDP2 that weight is itself the local tensor of a DTensor.
    """
    t: QuantizedTensor = out if isinstance(out, QuantizedTensor) else out.to_local()
    for name, gathered in _received(t, outputs, metadata).items():
        part = t.__dict__[name]
        if part.data_ptr() != gathered.data_ptr():
            # The same weight again: what a compiled forward has kept of it for its backward is still right.
            with _unsafe_preserve_version_counter(part):
                part.copy_(gathered)
    forget_arranged(t.codes)


def fsdp_pre_all_gather(
    self: QuantizedTensor, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
) -> tuple[tuple[torch.Tensor, ...], Metadata]:
    """What FSDP2 gathers of a shard: a method of `QuantizedTensor`."""
    return gathered_parts(self, mesh, tuple(outer_size))


def fsdp_post_all_gather(
    self: QuantizedTensor,
    outputs: tuple[torch.Tensor, ...],
    metadata: Metadata,
    param_dtype: torch.dtype,
    *,
    out: Any = None,
) -> Any:
    """The whole weight of what was gathered, or `out` brought up to date: a method of `QuantizedTensor`."""
    if out is not None:
        return refill(out, outputs, metadata)
    return whole_weight(self, outputs, metadata, param_dtype)


# FSDP2 asks a parameter for these two methods.
for hook in (fsdp_pre_all_gather, fsdp_post_all_gather):
    setattr(QuantizedTensor, hook.__name__, hook)
# FSDP1 asks whether a parameter is none of its own.
QuantizedTensor._fsdp_flattened = True  # type: ignore[attr-defined]


def sent(part: torch.Tensor) -> torch.Tensor:
    """A part, in rows, as collectives take it: of 16-bit codes, which gloo and NCCL do not know, the bytes."""
    part = part.reshape(1) if part.dim() == 0 else part.contiguous()
    return part.view(torch.uint8) if part.dtype == torch.uint16 else part


def received(moved: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """The inverse of `sent`, for a part of which the moved one is another, or holds several."""
    return moved.view(torch.uint16) if part.dtype == torch.uint16 else moved


def _check_rows(t: QuantizedTensor, ranks: int, whole: tuple[int, ...]) -> None:
    if t.meta.layout == SPARSE:
        raise ValueError(
            f"FSDP2 over {ranks} ranks cuts {whole[0]} rows of a 2:4 weight into unequal shards; choose a number of ranks that "
            f"divides them, or leave this layer out of fully_shard"
        )
    if is_flat(t) or block_sizes(t)[0] != 1:
        raise ValueError(
            f"FSDP2 over {ranks} ranks cuts a weight of shape {whole} in {t.scheme.name}, whose blocks span rows, into unequal "
            f"shards; choose a number of ranks that divides {whole[0]}, or leave this layer out of fully_shard"
        )


def _sent_bytes(parts: Parts, rows: int, row_shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """The bytes of each row in byte tensors of the shape (rows, *row_shape), as many as it takes."""
    each = [part.contiguous().flatten(1).view(torch.uint8) for part in parts.values()]
    joined = torch.cat(each, 1)
    length = prod(row_shape)
    count = -(-joined.shape[1] // length)
    sent = joined.new_zeros(rows, count * length)
    sent[: joined.shape[0], : joined.shape[1]] = joined
    return tuple(piece.reshape(rows, *row_shape).contiguous() for piece in sent.chunk(count, 1))


def _received(t: QuantizedTensor, outputs: tuple[torch.Tensor, ...], metadata: Metadata) -> Parts:
    """The gathered parts by name; taken out of the bytes of rows where they were sent so."""
    names, whole, as_bytes = metadata
    t = t.plain
    if not as_bytes:
        return {name: received(part, t.__dict__[name]) for name, part in zip(names, outputs, strict=True)}
    rows = torch.cat([output.flatten(1) for output in outputs], 1)[: whole[0]]
    parts: Parts = {}
    start = 0
    for name in names:
        part = getattr(t, name)
        length = prod(part.shape[1:]) * part.element_size()
        moved = rows[:, start : start + length].contiguous().view(part.dtype)
        parts[name] = moved.reshape(whole[0], *part.shape[1:])
        start += length
    return parts


__all__ = ["gathered_parts", "received", "refill", "sent", "whole_weight"]
