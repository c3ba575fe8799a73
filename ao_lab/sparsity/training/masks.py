"""Masks of weights in training, and weights that are set to zero by them; whole weights and shards of FSDP2.

A mask is stored as bool, or as bits (`fast.kernels.sparse_mm.bits`) where the products read these: an eighth of the memory.

A mask is found from the whole weight, gathered where ranks have a shard each: rows of a shard would do for N:M along the last
axis, but not for tiles of a transposable mask, and with the whole weight no rank can have another mask than the next.
"""

from __future__ import annotations

from typing import Any

import torch

from ao_lab.sparsity.prune_layer import mask_of
from ao_lab.sparsity.training.config import SparseTrainingConfig
from ao_lab.sparsity.weights import most_kept, pruned_pattern
from fast.kernels.sparse_mm.bits import pack_bits, unpack_bits
from fast.sparsity.compress_masked import masked


def is_distributed(w: torch.Tensor) -> bool:
    """Whether each rank has a part of it: a DTensor."""
    return hasattr(w, "device_mesh")


def whole(w: torch.Tensor) -> torch.Tensor:
    """The values of a weight, without history; of a DTensor gathered, which every rank has to call."""
    gathered: Any = w.detach()
    values: torch.Tensor = gathered.full_tensor() if is_distributed(w) else gathered
    # On a CPU a copy: the reference reads NumPy arrays, and memory that NumPy has seen torch does not give back.
    return values.clone() if values.device.type == "cpu" else values


@torch.no_grad()
def find_mask(w: torch.Tensor, config: SparseTrainingConfig, out: torch.Tensor | None = None) -> torch.Tensor:
    """Bool (out, in), True where a weight (out, in) stays. out: a stored mask that is written; by default a new bool tensor.

    Fixed masks are the weight's own zeros where it has the pattern already (and is not zero altogether): for these the host
    waits for two numbers of a GPU. Others are found without any wait. Whoever asks has refused weights with the zeros of
    another pattern (`other_pattern_reason`), which a fixed mask would prune again.
    """
    values = whole(w)
    if config.masks == "fixed":
        own = values != 0
        if has_pattern(own, config):
            return own if out is None else out.copy_(stored_as(own, out.dtype))
    return mask_of(values, config.scoring(), None, out)


def has_pattern(kept: torch.Tensor, config: SparseTrainingConfig) -> bool:
    """Whether a bool matrix keeps at most N of every M, in rows (of columns too where masks are transposable), not nothing."""
    most, group = config.scoring().kept_of
    sides = (kept, kept.T) if config.transposable else (kept,)
    counts = [most_kept(side, group) for side in sides]
    return counts[0] > 0 and max(counts) <= most


@torch.no_grad()
def other_pattern_reason(w: torch.Tensor, config: SparseTrainingConfig) -> str | None:
    """Why a fixed mask may not be found for a weight (out, in), and the way out: it was pruned, and not as `config` says."""
    kept, scoring = whole(w) != 0, config.scoring()
    if config.masks != "fixed" or has_pattern(kept, config):
        return None
    if (found := pruned_pattern(kept, scoring.kept_of[1])) is None:
        return None
    if most_kept(kept, scoring.kept_of[1]) <= scoring.kept_of[0]:
        asked, first = (
            "masks that are 2:4 in both directions",
            "prune the dense weights by SparsityConfig(transposable=True)",
        )
    else:
        more = ", transposable=True" if config.transposable else ""
        asked, first = (
            f"{config.pattern} masks",
            f"prune by SparsityConfig({config.pattern!r}{more}) first if that is meant",
        )
    return (
        f"it is {found} sparse already, and fixed masks are the zeros that are there: {asked} would prune it again. Train with "
        f"SparseTrainingConfig({found!r}), or {first}"
    )


@torch.no_grad()
def zero_pruned_(w: torch.Tensor, mask: torch.Tensor) -> None:
    """Set what a stored mask (of the whole weight) drops to +0, in place; of a DTensor the part that this rank has."""
    part: Any = w
    if is_distributed(w):
        from torch.distributed.tensor import distribute_tensor

        # No rank is asked for it: each has the whole mask. Axes may be split within a byte of bits.
        kept = bool_mask(mask, w.shape[-1])
        split: Any = distribute_tensor(kept, part.device_mesh, part.placements, src_data_rank=None)
        part, mask = part.to_local(), split.to_local()
    masked(part, mask, part)


@torch.no_grad()
def share_of_zeros(w: torch.Tensor, mask: torch.Tensor) -> float:
    """The share of a weight that products take as zero: what a bool mask drops, and zeros among what it keeps.

    Of a DTensor what the mask drops: no rank is asked for its part.
    """
    kept = mask if is_distributed(w) or w.is_meta else mask & (w.detach() != 0)
    return 1 - float(kept.float().mean())


def stored_dtype(config: SparseTrainingConfig) -> torch.dtype:
    """As what masks are stored: torch.uint8, bits, for the kernels that read these, torch.bool for torch's operators."""
    return torch.uint8 if config.products == "sparse_wgmma" else torch.bool


def stored_as(mask: torch.Tensor, dtype: torch.dtype, length: int = 0) -> torch.Tensor:
    """A stored mask as `stored_dtype` says. length: of its rows, read where it is bits and is to be bool."""
    if mask.dtype == dtype:
        return mask
    return pack_bits(mask) if dtype == torch.uint8 else bool_mask(mask, length)


def bool_mask(mask: torch.Tensor, length: int) -> torch.Tensor:
    """A stored mask of rows of this length as bool; the tensor itself where it is."""
    return mask if mask.dtype == torch.bool else unpack_bits(mask, length)


__all__ = [
    "bool_mask", "find_mask", "has_pattern", "is_distributed", "other_pattern_reason", "share_of_zeros", "stored_as",
    "stored_dtype", "whole", "zero_pruned_",
]  # fmt: skip
