"""Scales of matrices of which each rank holds a part: the bits of one process, whatever the ranks.

The magnitude of the largest element does not depend on the order in which it is found, and its bit pattern is what ranks
compare, as an integer, so that NaN stays NaN. From magnitudes scales are chosen as `fast.choose_scales` does it from tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import fast
from reference import Scheme

#: Bytes at a multiple of which kernels read a tensor without looking at it first (`fast.launch.launcher.ALIGNMENT`).
ALIGNED = 16
#: What `one_block_a_row` has made, by the keys of schemes; a cache of functools is none to torch's tracer.
ROWS: dict[str, Scheme] = {}


def magnitudes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The largest magnitude of each tensor, float32: NaN where one is NaN, 0 of a tensor without elements."""
    filled = [t for t in tensors if t.numel()]
    norms = list(torch._foreach_norm(filled, ord=math.inf)) if filled else []
    if len({t.dtype for t in norms}) > 1:
        norms = [norm.float() for norm in norms]
    if len(filled) == len(tensors):
        return torch.stack(norms).float()
    found = iter(norms)
    zero = torch.zeros((), device=tensors[0].device)
    return torch.stack([next(found).float() if t.numel() else zero for t in tensors])


def amax_over(amaxes: torch.Tensor, group: Any) -> torch.Tensor:
    """The largest of non-negative float32 values over the ranks of a group; NaN where one is."""
    bits = amaxes.abs().view(torch.int32)
    dist.all_reduce(bits, dist.ReduceOp.MAX, group)
    return bits.view(torch.float32)


def missing_ranks(group: Any, device: torch.device, asked: str, count: int) -> list[int]:
    """Ranks of a group that did not ask the same within the time limit of its collectives on a device; none where all did.

    Ranks meet in the group's store, on the host: no collective is under way when one of them does not come. asked: what, a key
    of the store; count: for which time, from 0 on.
    """
    if dist.get_backend(group) == "fake":
        return []
    store = dist.distributed_c10d._get_process_group_store(group)
    keys = [f"{asked}/{count}/{rank}" for rank in range(group.size())]
    own = keys[group.rank()]
    store.set(own, "1")
    try:
        store.wait(keys, time_limit(group, device))
    except dist.DistStoreError:
        if missing := [rank for rank, key in enumerate(keys) if not store.check([key])]:
            store.delete_key(own)
            return missing
    # Whoever asks for this time has read the keys of the time before.
    store.delete_key(f"{asked}/{count - 1}/{group.rank()}")
    return []


def time_limit(group: Any, device: torch.device) -> timedelta:
    """After which a group's collectives on a device fail: `init_process_group(timeout=...)`."""
    limit: timedelta = group._get_backend(device).options._timeout
    return limit


def scales_of(amaxes: torch.Tensor, scheme: Scheme, dtype: torch.dtype) -> torch.Tensor:
    """The scale of blocks whose largest magnitudes, once they are cast to `dtype`, are amaxes (n): scales (n)."""
    return fast.choose_scales(amaxes.to(dtype).reshape(-1, 1), one_block_a_row(scheme)).scale.reshape(-1)  # type: ignore[no-any-return]


def one_block_a_row(scheme: Scheme) -> Scheme:
    """The scheme with one scale for each row, by the same rule."""
    if scheme.key not in ROWS:
        ROWS[scheme.key] = replace(scheme, name=f"{scheme.name}_rows", scale=replace(scheme.scale, block=-1))
    return ROWS[scheme.key]


def apart(scales: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each of scales (n) by itself (0-d), where kernels read at once, as a tensor of its own lies."""
    return scales.new_empty(len(scales), ALIGNED // scales.itemsize)[:, 0].copy_(scales).unbind()


__all__ = ["amax_over", "apart", "magnitudes", "missing_ranks", "scales_of"]
