"""Layers that programs join into one matrix, and that need one outer scale for that: queries, keys and values; gate and up.

vLLM and SGLang load q_proj, k_proj and v_proj of a layer as one weight. Its blocks keep their scales; of the outer scales, one
for each tensor, one is taken for all rows, and the others' weights would be off by the ratio. `for_layout` gives such schemes
(nvfp4_pow2) a power of two as outer scale, and layers of them that are joined get the largest of theirs, as llm-compressor
does. Every other scheme keeps each tensor's own.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ao_lab.quantization.plan import Change
from ao_lab.tensor.chunked import outer_scale
from reference import Scheme

#: Names of layers of one module that are joined: `packed_modules_mapping` of vLLM's models, and weights of experts.
JOINED = (
    ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"),
    ("query", "key", "value"), ("query_proj", "key_proj", "value_proj"), ("wq", "wk", "wv"), ("w_gate", "w_up"),
    ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"), ("fc1_g", "fc1_x"), ("wi_0", "wi_1"), ("c_fc_0", "c_fc_1"),
)  # fmt: skip
PLACES = {name: names for names in JOINED for name in names}


def shares_outer(scheme: Scheme) -> bool:
    """Whether a scheme's outer scale is one that joined layers share."""
    outer = scheme.outer
    return outer is not None and outer.rule == "ratio_pow2" and outer.statistic == "absmax_elements"


def group_of(name: str) -> tuple[str, tuple[str, ...]] | None:
    """What a weight "PATH.q_proj.weight" is joined in: the path and the names of the layers; None for others."""
    path, _, leaf = name.removesuffix(".weight").rpartition(".")
    return (path, PLACES[leaf]) if name.endswith(".weight") and leaf in PLACES else None


def joined(changes: Iterable[Change]) -> dict[str, list[Change]]:
    """For the first name of each weight that shares an outer scale all weights that do, itself included."""
    groups: dict[object, list[Change]] = {}
    for change in changes:
        place = group_of(next(iter(change.places)))
        if place is not None and shares_outer(change.recipe.weight):
            groups.setdefault((place, change.recipe), []).append(change)
    return {next(iter(one.places)): group for group in groups.values() if len(group) > 1 for one in group}


class JoinedScales:
    """The outer scales of the weights of a plan, found when the first of a group is asked for."""

    def __init__(self, changes: Iterable[Change]) -> None:
        self.groups = joined(changes)
        self.known: dict[str, torch.Tensor] = {}

    def of(self, change: Change) -> torch.Tensor | None:
        """The outer scale that a weight shares, of the dense weights of the model; None where it has its own."""
        name = next(iter(change.places))
        if name in self.groups and name not in self.known:
            members = {next(iter(one.places)): one for one in self.groups[name]}
            scale = largest([one.parameter for one in members.values()], change.recipe.weight)
            self.known.update(dict.fromkeys(members, scale))
        return self.known.pop(name, None)


def largest(weights: Iterable[torch.Tensor], scheme: Scheme) -> torch.Tensor:
    """The largest outer scale of dense weights in a scheme."""
    found = [outer_scale(weight.detach(), scheme) for weight in weights]
    return torch.stack([one if one.is_meta else one.cpu() for one in found]).max()


__all__ = ["JOINED", "JoinedScales", "group_of", "joined", "largest", "shares_outer"]
