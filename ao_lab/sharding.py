"""`QuantizedTensor` under FSDP2: a shard is rows of the weight with the scales of their blocks, gathered as they are stored.

FSDP2 cuts a parameter along axis 0 (`chunk`), keeps the piece, and before a layer runs gathers what `gathered_parts` names:
codes and scales, never a dense weight. Scales over the whole weight (0-d) and static scales of inputs are the same on every
rank and stay where they are. Weights are frozen; what trains beside them (adapters, norms) is FSDP2's as always.
"""

from __future__ import annotations

from typing import Any

import torch

from ao_lab.tensor import QuantizedTensor
from ao_lab.tensor_meta import PARTS

#: Parts with rows, if they have any axes.
ROWS = ("codes", "scale", "zero", "outer")
Metadata = tuple[tuple[str, ...], tuple[int, ...]]


def gathered_parts(
    t: QuantizedTensor, mesh: Any, whole: tuple[int, ...]
) -> tuple[tuple[torch.Tensor, ...], Metadata]:
    """The parts of a shard that differ between ranks, and their names with the weight's shape.

    ValueError, on every rank, where the rows are not the same number everywhere.
    """
    if whole[0] % mesh.size():
        raise ValueError(
            f"FSDP2 over {mesh.size()} ranks cuts a quantized weight of shape {whole} into unequal shards; choose a number "
            f"of ranks that divides {whole[0]}, or leave this layer out of fully_shard"
        )
    parts = t.to_layout("plain").parts
    names = tuple(name for name in ROWS if _has_rows(parts[name]))
    return tuple(part for name in names if (part := parts[name]) is not None), (names, whole)


def whole_weight(
    t: QuantizedTensor, outputs: tuple[torch.Tensor, ...], metadata: Metadata, dtype: torch.dtype
) -> QuantizedTensor:
    """The weight of gathered parts, over their memory.

    On a CPU over a copy: the reference reads tensors as NumPy arrays, and memory that NumPy has seen torch does not give back.
    """
    names, whole = metadata
    kept = [output.clone() if output.device.type == "cpu" else output for output in outputs]
    gathered = dict(zip(names, kept, strict=True))
    parts = {name: gathered.get(name, getattr(t, name)) for name in PARTS}
    return t.remade(parts, whole, dtype=dtype, layout="plain")


def refill(t: QuantizedTensor, outputs: tuple[torch.Tensor, ...], metadata: Metadata) -> None:
    """Bring a weight that `whole_weight` made up to date with parts that were gathered again: the copy on a CPU."""
    for name, output in zip(metadata[0], outputs, strict=True):
        part = getattr(t, name)
        if part.data_ptr() != output.data_ptr():
            part.copy_(output)


def _has_rows(part: torch.Tensor | None) -> bool:
    return part is not None and part.dim() > 0


__all__ = ["gathered_parts", "refill", "whole_weight"]
