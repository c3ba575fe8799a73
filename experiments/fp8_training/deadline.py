"""When a run starts nothing more, so that it ends in time and publishes what it has."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

#: How the reason ends.
LATE = "s of this run did not reach it"


@dataclass
class Deadline:
    """Seconds from now on; None: no end. `clock` is the host's."""

    seconds: float | None
    clock: Callable[[], float] = time.perf_counter
    until: float = field(init=False)

    def __post_init__(self) -> None:
        self.until = float("inf") if self.seconds is None else self.clock() + self.seconds

    def left(self) -> float:
        """Seconds that are left, negative after the end."""
        return self.until - self.clock()

    def reason(self, needed: float = 0.0) -> str | None:
        """Why something that takes about `needed` seconds does not start; None where it does."""
        if self.left() > needed:
            return None
        return f"not run: the {self.seconds:.0f} {LATE}"


def is_late(metric: str) -> bool:
    """Whether the metric of a status says that a deadline came first."""
    return metric.startswith("status: ") and metric.endswith(LATE)


__all__ = ["Deadline", "is_late"]
