"""What a run of `validate_linear_sparse.py` finds, and how much of its time is left."""

from __future__ import annotations

import time
from typing import Any

from tests.gpu.sparsity.products.checks import Check


class Report:
    """What was found, printed as it comes."""

    def __init__(self, seconds: float) -> None:
        self.end, self.broken = time.monotonic() + seconds, set[str]()
        self.rows: list[dict[str, Any]] = []
        self.checks: list[Check] = []

    @property
    def wrong(self) -> int:
        """Checks that found something."""
        return sum(one.wrong is not None for one in self.checks)

    def left(self) -> float:
        """Seconds of the budget."""
        return self.end - time.monotonic()

    def say(self, text: str) -> None:
        """Print with the time that is left."""
        print(f"[{self.left():5.0f}] {text}", flush=True)


__all__ = ["Report"]
