"""The same choices on all ranks: ranks measure alone, and times differ."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch.distributed as dist

from ao_lab.gemm.choices import Choice, Problem


def in_group() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized()


def chosen_by_all(made: Sequence[Choice]) -> list[Choice]:
    """Of each problem the choice of the lowest rank that measured it: pipeline stages have layers that others have not."""
    if not in_group():
        return list(made)
    gathered: list[list[Choice]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, list(made))
    return merged(gathered)


def merged(by_rank: Sequence[Sequence[Choice]]) -> list[Choice]:
    """One choice for each problem, of the first list that has it."""
    result: dict[Problem, Choice] = {}
    for choices in by_rank:
        for choice in choices:
            result.setdefault(choice.problem, choice)
    return list(result.values())


def is_first_of_its_machine() -> bool:
    """Whether this rank writes the file: by LOCAL_RANK where the launcher says it, else rank 0."""
    local = os.environ.get("LOCAL_RANK")
    return not in_group() or (int(local) if local is not None else dist.get_rank()) == 0


__all__ = ["chosen_by_all", "is_first_of_its_machine", "merged"]
