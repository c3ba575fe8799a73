"""Arrays that a call allocates, for any array library."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Buffer:
    """An array that a plan makes. fill: the number that each row starts with; () where a pass writes every element."""

    shape: tuple[int, ...]
    dtype: str
    fill: tuple[int, ...] = ()
