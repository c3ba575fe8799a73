"""Whether what is measured as compiled was compiled: torch.compile runs what it does not follow without a word."""

from __future__ import annotations

from experiments.harness.outcome import Wrong


def programs() -> int:
    """How many graphs this process has compiled until now."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def check_compiled(before: int) -> None:
    """Wrong where no graph was compiled since there were `before`: rows would call compiled what ran operation by operation."""
    if programs() <= before:
        raise Wrong(
            "nothing was compiled: the step ran operation by operation, and is no row of a compiled one"
        )


__all__ = ["check_compiled", "programs"]
