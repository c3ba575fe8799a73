"""Which elements share a scale, and how a range is mapped to integers: the classes of torchao's configurations.

Objects of torchao with these names are understood too; what counts is the name and its numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from reference.arrays.namespace import and_nearest, choice
from reference.schemes.schemes import Block


@dataclass(frozen=True)
class PerTensor:
    """One scale for the whole tensor."""


@dataclass(frozen=True)
class PerRow:
    """One scale per row: per output channel of a weight, per token of an activation."""

    dim: int = -1


@dataclass(frozen=True)
class PerToken:
    """One scale per token: PerRow of an activation."""


@dataclass(frozen=True)
class PerAxis:
    """One scale per index of an axis; axis 0 of a weight: per output channel."""

    axis: int


@dataclass(frozen=True)
class PerGroup:
    """One scale per `group_size` elements along the contraction axis."""

    group_size: int


@dataclass(frozen=True)
class PerBlock:
    """One scale per two-dimensional block, PerBlock((rows, columns))."""

    block_size: tuple[int, ...]


class MappingType(StrEnum):
    """How a range of values is mapped to integers."""

    SYMMETRIC = "SYMMETRIC"
    SYMMETRIC_NO_CLIPPING_ERR = "SYMMETRIC_NO_CLIPPING_ERR"
    ASYMMETRIC = "ASYMMETRIC"


#: Defaults of configurations.
PER_ROW, ROWS, GROUPS_OF_32 = PerRow(), PerAxis(0), PerGroup(32)
NAMES = ("PerTensor", "PerRow", "PerToken", "PerAxis", "PerGroup", "PerBlock")


def block_of(granularity: Any) -> Block:
    """The block of a `Scale` record; ValueError for a granularity that no default scheme has."""
    kind = type(granularity).__name__
    if kind not in NAMES:
        raise ValueError(
            f"granularity is one of {', '.join(NAMES)}, for instance PerRow(); got {granularity!r:.80}"
            f"{and_nearest(getattr(granularity, '__name__', granularity), NAMES)}"
        )
    if kind == "PerTensor":
        return "tensor"
    if kind == "PerGroup":
        return int(granularity.group_size)
    if kind == "PerBlock":
        return _block_of_sizes(tuple(granularity.block_size))
    axis = {"PerRow": "dim", "PerAxis": "axis"}.get(kind)
    place = -1 if axis is None else getattr(granularity, axis)
    if place != (0 if kind == "PerAxis" else -1):
        raise ValueError(
            f"{granularity!r}: scales are per row, PerRow(-1) or PerAxis(0); for others give scheme="
        )
    return -1


def _block_of_sizes(sizes: tuple[int, ...]) -> Block:
    if len(sizes) != 2:
        raise ValueError(f"PerBlock of {sizes}: rows and columns, two numbers")
    return int(sizes[1]) if sizes[0] == 1 else (int(sizes[0]), int(sizes[1]))


def is_asymmetric(mapping: Any) -> bool:
    """Whether a mapping type (ours, torchao's, or a name) has a zero point; ValueError for one that no default scheme has."""
    name = str(getattr(mapping, "name", mapping)).upper()
    choice(name, tuple(MappingType), "mapping type")
    # The default symmetric integers map the largest magnitude onto qmax: nothing clips in either of the two.
    return name == MappingType.ASYMMETRIC


__all__ = [
    "GROUPS_OF_32", "PER_ROW", "ROWS", "MappingType", "PerAxis", "PerBlock", "PerGroup", "PerRow", "PerTensor",
    "PerToken", "block_of", "is_asymmetric",
]  # fmt: skip
