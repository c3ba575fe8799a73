"""`SparseQuantizedTensor` under FSDP2: as `ao_lab.tensor.fsdp` has it of dense weights, metadata gathered beside codes.

A shard is rows of the weight with its codes, metadata and the scales of its rows. Ranks have to divide the rows: a byte of
metadata is of eight columns of one row, so that rows can be cut anywhere, but padded shards would need scales of rows that are
not there.
"""

from __future__ import annotations

from typing import Any

import torch

from ao_lab.gemm.sparse import forget_arranged
from ao_lab.tensor.sparse.metadata import received, sent
from ao_lab.tensor.sparse.slicing import differs
from ao_lab.tensor.sparse.sparse_tensor import SparseQuantizedTensor

#: The names of the parts that were sent, and the weight's shape.
Metadata = tuple[tuple[str, ...], tuple[int, ...]]


def fsdp_pre_all_gather(
    self: SparseQuantizedTensor, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
) -> tuple[tuple[torch.Tensor, ...], Metadata]:
    """What FSDP2 gathers of a shard; ValueError, on every rank, where rows of the weight are not rows of its parts."""
    whole = tuple(outer_size)
    if self.turned:
        raise ValueError(
            f"FSDP2 cuts the rows of {self!r}, which is stored transposed; quantize it as (rows, columns)"
        )
    if whole[0] % mesh.size():
        raise ValueError(
            f"FSDP2 over {mesh.size()} ranks cuts {whole[0]} rows of a 2:4 weight into unequal shards; choose a number of "
            f"ranks "
            f"that divides them, or leave this layer out of fully_shard"
        )
    names = tuple(
        name
        for name, part in self.parts.items()
        if part is not None and part.dim() and differs(self, name, 0)
    )
    names = (
        names if mesh.size() > 1 else ("codes",)
    )  # FSDP2 hands back the first alone; the others lie in the shard
    return tuple(sent(part) for name in names if (part := self.parts[name]) is not None), (names, whole)


def fsdp_post_all_gather(
    self: SparseQuantizedTensor,
    outputs: tuple[torch.Tensor, ...],
    metadata: Metadata,
    param_dtype: torch.dtype,
    *,
    out: Any = None,
) -> Any:
    """The whole weight of what was gathered, or `out` brought up to date."""
    names, whole = metadata
    gathered = {name: received(part, self.parts[name]) for name, part in zip(names, outputs, strict=True)}
    if out is not None:
        local: SparseQuantizedTensor = out if isinstance(out, SparseQuantizedTensor) else out.to_local()
        for name, part in gathered.items():
            ours = local.parts[name]
            if ours is not None and ours.data_ptr() != part.data_ptr():
                ours.copy_(part)
        forget_arranged(local.codes)
        return None
    # As of dense weights: memory that NumPy has seen torch does not give back, so that on a CPU it is copied.
    kept = {name: part.clone() if self.device.type == "cpu" else part for name, part in gathered.items()}
    return self.remade({**self.parts, **kept}, whole, dtype=param_dtype), ()


# FSDP2 asks a parameter for these two methods.
for hook in (fsdp_pre_all_gather, fsdp_post_all_gather):
    setattr(SparseQuantizedTensor, hook.__name__, hook)

__all__ = ["fsdp_post_all_gather", "fsdp_pre_all_gather"]
