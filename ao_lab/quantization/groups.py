"""Layers that stay unquantized because groups do not divide their inputs: how many, and the groups that divide them.

Such a layer is left with a reason, since the others can be quantized; where most are left, that is hardly what was asked for,
and `quantize_` warns of it (`warn_of_undivided`).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from ao_lab.config.base import Config, FqnToConfig
from ao_lab.config.granularity import PerGroup
from ao_lab.config.recipe import largest_group, undividing
from ao_lab.transforms.plan import Plan

#: The reason of a weight whose blocks do not divide it: its elements along the axis, and the block.
UNDIVIDED = re.compile(r"(\d+) elements are not divisible by the block size (\d+)")
#: Where the reference's advice begins, which is for arrays, and ours for layers.
ARRAYS, WAY = "; pad the tensor", "; use "
#: Groups below this one store more for scales than for elements of few bits: one scale per row is proposed in their place.
SMALLEST, ROWS = 8, "one scale per row"
#: The words of the warning that callers know it by.
STAY = "stay unquantized: groups of"


def fitting_groups(block: int, lengths: Collection[int]) -> list[int]:
    """Group sizes that divide all of some lengths: the largest (`largest_group`) and a smaller one down to 32; [] where the
    largest is less than 8."""
    size = largest_group(block, lengths)
    smaller = [one for one in (128, 64, 32) if one < size]
    return [size, *smaller][:2] if size >= SMALLEST else []


def named_groups(sizes: Sequence[int], config: object) -> str:
    """Group sizes in the words of a configuration: its option, or where it has none a scheme; one scale per row where there
    are none."""
    base = getattr(config, "base_config", None) or config
    own = {one.name: getattr(base, one.name) for one in fields(base)} if isinstance(base, Config) else {}
    if not sizes:
        return (
            "group_size=-1" if "group_size" in own else f"{ROWS} (PerRow(), or a scheme such as int8_rowwise)"
        )
    if "group_size" in own:
        return f"group_size={' or '.join(map(str, sizes))}"
    if any(isinstance(one, PerGroup) for one in own.values()):
        return " or ".join(f"PerGroup({size})" for size in sizes)
    return f"a scheme with groups of {' or '.join(map(str, sizes))}"


def with_groups(reason: str, config: object) -> str:
    """The reason of a layer that groups do not divide, with what this configuration can have in their place; others as they
    are."""
    found = UNDIVIDED.search(reason)
    if found is None:
        return reason
    sizes = fitting_groups(int(found[2]), [int(found[1])])
    return f"{reason.partition(ARRAYS)[0]}{WAY}{named_groups(sizes, config)}"


def without_groups(reason: str) -> str:
    """A reason without what `with_groups` says of a way out."""
    return reason.partition(WAY)[0] if UNDIVIDED.search(reason) else reason


def undivided_layers(layers: Mapping[str, tuple[tuple[int, ...], str]]) -> tuple[list[int], str]:
    """Of layers (shape, reason; "" for quantized ones) the groups that divide the inputs of all, and what is to be said: how
    many of how many stay dense because theirs do not; ([], "") where none does."""
    found = {name: UNDIVIDED.search(reason) for name, (_, reason) in layers.items()}
    left = {name: one for name, one in found.items() if one is not None}
    blocks = {int(one[2]) for one in left.values()}
    if len(blocks) != 1:
        return [], ""
    block = blocks.pop()
    lengths = {int(one[1]) for one in left.values()}
    sizes = fitting_groups(block, {*lengths, *(shape[-1] for shape, reason in layers.values() if not reason)})
    shown = ", ".join(map(str, sorted(lengths)))
    told = f"{len(left)} of {len(layers)} layers {STAY} {block} do not divide their inputs ({shown})"
    return sizes, told


def undivided(reasons: Sequence[str]) -> str:
    """Why blocks of one size divide the inputs of no layer, and what to use instead; "" for other reasons."""
    found = [UNDIVIDED.search(one) for one in reasons]
    numbers = {(int(one[1]), int(one[2])) for one in found if one is not None}
    blocks = {block for _, block in numbers}
    if None in found or len(blocks) != 1:
        return ""
    return undividing(blocks.pop(), [int(one[1]) for one in found if one is not None])


def warn_of_undivided(plan: Plan[Any], config: Config | FqnToConfig, stacklevel: int = 4) -> None:
    """A UserWarning where most of the layers that were meant stay dense because groups do not divide their inputs."""
    layers = {
        full: (tuple(change.parameter.shape), "")
        for change in plan.changes.values()
        for full in change.places
    }
    for full, reason in plan.reasons.items():
        if UNDIVIDED.search(reason):
            layers[full] = (), reason
    if 2 * sum(bool(reason) for _, reason in layers.values()) <= len(layers):
        return
    sizes, told = undivided_layers(layers)
    given = config.fqn_to_config.values() if isinstance(config, FqnToConfig) else [config]
    if told:
        way = named_groups(sizes, next((one for one in given if one is not None), None))
        warnings.warn(f"quantize_: {told}; {way} quantizes all of them", UserWarning, stacklevel=stacklevel)


@contextmanager
def told_elsewhere() -> Iterator[None]:
    """Where the caller says itself which layers groups do not divide, no warning does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", f"quantize_: .*{STAY}", UserWarning)
        yield
