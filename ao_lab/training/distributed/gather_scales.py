"""Scales of weights whose shards lie on several ranks: the largest magnitude over all of them, one reduction for all weights.

A scale is that of the whole weight, bit for bit: the magnitude of the largest element does not depend on the order in which it
is found, and its bit pattern is what ranks compare, as an integer, so that NaN stays NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fast
from ao_lab.training.distributed.cast_on_gather import CastOnGather
from ao_lab.transforms.layers import check_model
from reference import Scheme

#: What `one_block_a_row` has made, by the keys of schemes; a cache of functools is none to torch's tracer.
ROWS: dict[str, Scheme] = {}


@torch.no_grad()
def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """The scales of all weights that FSDP2 gathers as tensorwise FP8 codes, in one reduction; torchao's function of this name.

    Call it after every optimizer step, on every rank. Without it each weight reduces its own scale when it is gathered first
    after a step. A scale is used as long as its weight has not changed: after a load, or a step that this did not follow, it is
    found again. Weights of which some rank has no rows are left to that. TypeError for anything but a model.
    """
    check_model(module)
    groups: dict[Any, list[tuple[nn.Module, CastOnGather]]] = {}
    for one, weight in gathered_weights(module):
        # Shards that FSDP2 holds on the host are reduced on the device, when they are gathered.
        here = weight.device.type == one.weight.device_mesh.device_type
        if weight.scheme.scale.block == "tensor" and here and has_rows_everywhere(one.weight):
            group = one.weight.device_mesh.get_group(one.weight.device_mesh.ndim - 1)
            groups.setdefault(group, []).append((one, weight))
    for group, found in groups.items():
        amaxes = amax_over(magnitudes([weight.dense for _, weight in found]), group)
        for (one, weight), amax in zip(found, amaxes, strict=True):
            remember(weight, amax, version_of(weight, one))
        _remember_scales([weight for _, weight in found])


def gathered_weights(module: nn.Module) -> list[tuple[Any, CastOnGather]]:
    """Modules whose sharded weight is gathered as codes, and their shards; a weight that several share once."""
    found: dict[int, tuple[Any, CastOnGather]] = {}
    for one in module.modules():
        local = getattr(getattr(one, "weight", None), "_local_tensor", None)
        if isinstance(local, CastOnGather):
            found.setdefault(id(local), (one, local))
    return list(found.values())


def has_rows_everywhere(weight: Any) -> bool:
    """Whether every rank has rows of a weight; the same answer on every rank.

    Loading a checkpoint writes to shards that have rows alone, so that ranks would differ about the age of a scale.
    """
    ranks = weight.device_mesh.size(weight.device_mesh.ndim - 1)
    return weight_rows_everywhere(int(weight.shape[0]), ranks)


def weight_rows_everywhere(rows: int, ranks: int) -> bool:
    """Of the number of rows: shards are as long as the first, but for the last ones."""
    return rows > (ranks - 1) * math.ceil(rows / ranks)


def version_of(weight: CastOnGather, module: nn.Module) -> tuple[int, ...]:
    """What changes with the weight: how often it was written to as the module's parameter, as a shard, and as what files hold.

    Each is counted where torch or the shard sees the write: an optimizer's step, `to_local()`, a load into `state_dict()`, a
    write to one of its values. Writes that torch itself does not count (`.data` of such a value, a foreach operation on it) are
    not seen: `precompute_float8_dynamic_scale_for_fsdp` after them finds the scales again.
    """
    parameter: Any = getattr(module, "weight", None)
    own = parameter._version if getattr(parameter, "_local_tensor", None) is weight else -1
    return own, weight.known.writes, weight.dense._version


def remember(weight: CastOnGather, amax: torch.Tensor, version: tuple[int, ...]) -> None:
    """Keep the magnitude of a whole weight beside its shard."""
    known = weight.known
    known.amax, known.scale, known.version = amax, None, version


def _remember_scales(weights: Sequence[CastOnGather]) -> None:
    """The scales of weights whose magnitudes are known, made together for those of one scheme and dtype."""
    kinds: dict[tuple[Scheme, torch.dtype], list[CastOnGather]] = {}
    for weight in weights:
        kinds.setdefault((weight.scheme, weight.known.dtype or weight.dtype), []).append(weight)
    for (scheme, dtype), same in kinds.items():
        scales = scales_of(torch.stack([weight.known.amax for weight in same]), scheme, dtype)  # type: ignore[misc]
        for weight, scale in zip(same, scales.unbind(), strict=True):
            weight.known.scale, weight.known.dtype = scale, dtype


def scale_of(
    weight: CastOnGather, rows: int, group: Any, module: nn.Module, dtype: torch.dtype
) -> torch.Tensor:
    """The scale (0-d) of the whole weight, cast to `dtype`: the one that is known, or reduced over the group and kept.

    rows: of the whole weight. All ranks come to the same decision, since they write to their shards at the same places.
    """
    known, version = weight.known, version_of(weight, module)
    everywhere = weight_rows_everywhere(rows, dist.get_world_size(group))
    if known.amax is None or known.version != version or not everywhere:
        remember(weight, amax_over(magnitudes([weight.dense]), group)[0], version)
    if known.scale is None or known.dtype != dtype:
        amax = known.amax
        if amax is None:
            raise ValueError(
                "a weight's magnitude is not known; call precompute_float8_dynamic_scale_for_fsdp"
            )
        known.scale, known.dtype = scales_of(amax.reshape(1), weight.scheme, dtype)[0], dtype
    return known.scale


def magnitudes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The largest magnitude of each tensor, float32: NaN where one is NaN, 0 of a tensor without elements."""
    filled = [t for t in tensors if t.numel()]
    norms = iter(torch._foreach_norm(filled, ord=math.inf) if filled else ())
    zero = torch.zeros((), device=tensors[0].device)
    return torch.stack([next(norms).float() if t.numel() else zero for t in tensors])


def amax_over(amaxes: torch.Tensor, group: Any) -> torch.Tensor:
    """The largest of non-negative float32 values over the ranks of a group; NaN where one is."""
    bits = amaxes.abs().view(torch.int32)
    dist.all_reduce(bits, dist.ReduceOp.MAX, group)
    return bits.view(torch.float32)


def scales_of(amaxes: torch.Tensor, scheme: Scheme, dtype: torch.dtype) -> torch.Tensor:
    """The scale of blocks whose largest magnitudes, once they are cast to `dtype`, are amaxes (n): scales (n)."""
    return fast.choose_scales(amaxes.to(dtype).reshape(-1, 1), one_block_a_row(scheme)).scale.reshape(-1)  # type: ignore[no-any-return]


def one_block_a_row(scheme: Scheme) -> Scheme:
    """The scheme with one scale for each row, by the same rule."""
    if scheme.key not in ROWS:
        ROWS[scheme.key] = replace(scheme, name=f"{scheme.name}_rows", scale=replace(scheme.scale, block=-1))
    return ROWS[scheme.key]


__all__ = ["precompute_float8_dynamic_scale_for_fsdp"]
