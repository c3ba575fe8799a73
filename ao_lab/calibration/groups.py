"""Weights that are calibrated as one: layers that read one tensor and have one scheme are one matrix, row below row.

Scales and codes of a row depend on that row and on what the layers read, so that queries, keys and values together have the
bits that each has alone, for one factor of the Hessian. It is not so where a block of scales spans rows of two layers, or
where each matrix has an outer scale, or statistic, of its own: such weights are matrices by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn

import fast
from ao_lab.config.base import Config
from ao_lab.config.recipe import Recipe
from ao_lab.transforms.walk import Block, block_of
from reference import Quantized, Scheme

PARTS = ("codes", "scale", "zero")


class Target(Protocol):
    """A weight to be quantized: what `ao_lab.quantization.plan.Change` has."""

    places: dict[str, tuple[nn.Module, str]]
    config: Config
    recipe: Recipe
    transposed: bool
    axis: int

    @property
    def name(self) -> str:
        """Its first full name."""

    @property
    def parameter(self) -> torch.Tensor:
        """The weight as it is now."""

    @property
    def layers(self) -> dict[str, nn.Module]:
        """The modules that multiply with it."""

    def put(self, parameter: nn.Parameter) -> None:
        """A new weight in every place."""


@dataclass
class Stack:
    """Weights of one scheme whose layers read one tensor."""

    targets: list[Target]
    #: Their dense values (out, in), once they are looked at.
    dense: list[torch.Tensor] = field(default_factory=list)

    def read(self) -> None:
        """Look at the weights as they are now."""
        self.dense = [dense_of(target) for target in self.targets]

    @property
    def scheme(self) -> Scheme:
        """What they are quantized to."""
        return self.targets[0].recipe.weight

    def matrix(self) -> torch.Tensor:
        """All rows."""
        return self.dense[0] if len(self.dense) == 1 else torch.cat(self.dense)

    def split_quantized(self, q: Quantized) -> list[Quantized]:
        """Each weight's part of the quantized matrix."""
        if len(self.dense) == 1:
            return [q]
        rows, columns = q.shape
        parts = {name: getattr(q, name) for name in PARTS}
        result, first = [], 0
        for one in self.dense:
            # Copies: a view would hold all rows as long as one of the weights lives.
            cut: dict[str, Any] = {
                name: None if part is None else part[_rows(first, len(one), len(part), rows)].clone()
                for name, part in parts.items()
            }
            result.append(replace(q, **cut, shape=(len(one), columns)))
            first += len(one)
        return result


def _rows(first: int, count: int, parts: int, rows: int) -> slice:
    """Entries of a part that has `parts` for all rows: those of `count` rows from `first` on."""
    return slice(first * parts // rows, (first + count) * parts // rows)


def dense_of(target: Target) -> torch.Tensor:
    """The values of a weight as (out, in)."""
    dense = target.parameter.detach()
    return dense.transpose(-2, -1).contiguous() if target.transposed else dense


def stacks(targets: Iterable[Target], inputs: dict[str, int]) -> list[Stack]:
    """Weights in stacks, in their order. inputs: what tells, by the first full name of each, which tensor its layers read."""
    result: list[Stack] = []
    open_stacks: dict[Any, Stack] = {}
    for target in targets:
        parameter = target.parameter
        key = inputs.get(target.name), target.recipe, parameter.dtype, parameter.device
        known = open_stacks.get(key)
        if known is not None and rows_stand_alone(target.recipe.weight, len(parameter)):
            known.targets.append(target)
            continue
        new = Stack([target])
        result.append(new)
        if rows_stand_alone(target.recipe.weight, len(parameter)) and target.name in inputs:
            open_stacks[key] = new
    return result


def rows_stand_alone(scheme: Scheme, rows: int) -> bool:
    """Whether rows of this number have the codes and scales that they have below others."""
    block = scheme.scale.block
    height = block[0] if isinstance(block, tuple) else 1
    return scheme.outer is None and not isinstance(block, str) and rows % height == 0


def with_packed_codes(q: Quantized) -> Quantized:
    """Codes below 8 bits packed, as weights store them."""
    if q.packed or q.scheme.format.bits >= 8:
        return q
    return replace(q, codes=fast.pack(q.codes, q.scheme.format), packed=True)


def in_one_block(target: Target, blocks: Iterable[str]) -> bool:
    """Whether a weight is in one block, and in no other place."""
    places = {block_of(full, blocks) for full in target.places}
    return len(places) == 1 and None not in places


def path_inside(target: Target, block: Block) -> str | None:
    """The name in a block of the one layer that has a weight; None where several have it."""
    if len(target.places) != 1 or list(target.layers) != [target.name]:
        return None
    path = target.name.rpartition(".")[0]
    return path.removeprefix(f"{block.name}.") if block.name else path


def names_of(targets: Sequence[Target]) -> list[str]:
    """First full names."""
    return [target.name for target in targets]
