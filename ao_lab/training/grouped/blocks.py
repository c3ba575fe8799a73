"""Schemes in blocks that lie within a group or an expert, and scales of such blocks that a whole group shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

import fast
from fast.quantize.derived import derived
from fast.quantize.two_levels import scales_of_two_levels, without_outer
from reference import Scheme
from reference.schemes.record_text import record_of


def fine_scales(
    x: torch.Tensor, scheme: Scheme, block: int, shared: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Scheme, torch.Tensor]:
    """The scheme in blocks that lie within groups, and scales that `shared` has made the groups' own."""
    if scheme.outer is not None:
        return without_outer(scheme.key), scales_of_two_levels(x, scheme, shared)
    fine = in_blocks(scheme.key, block)
    found: torch.Tensor = fast.choose_scales(x, fine).scale
    return fine, shared(found)


@derived
def in_blocks(key: str, block: int) -> Scheme:
    """The record of a key in blocks of another length."""
    scheme = record_of(key)
    if scheme.scale.block == block:
        return scheme
    return replace(scheme, name=f"{scheme.name}_in_{block}", scale=replace(scheme.scale, block=block))


__all__ = ["fine_scales", "in_blocks"]
