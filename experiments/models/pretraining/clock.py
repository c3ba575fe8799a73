"""How long the steps of a training took, and on how many bytes: stopped while it warms up, is stored, or is evaluated."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from experiments.models.training_checkpoint import Run


@dataclass
class Clock:
    """Seconds of steps and the bytes trained in them, over all processes of a training.

    On a GPU it waits for the device when it starts and stops. In between it is read without waiting: the device may be some
    steps behind, at most `training.LOOK`. alone: whether nothing else had the device in any of the processes; otherwise the
    seconds are not those of the steps.
    """

    device: str
    seconds: float = 0.0
    bytes: int = 0
    since: float | None = None
    alone: bool = True

    def start(self) -> None:
        """Run on."""
        if self.since is None:
            self._wait()
            self.since = time.perf_counter()

    def stop(self) -> None:
        """Stand still."""
        if self.since is not None:
            self._wait()
            self.seconds, self.since = self.now(), None

    def now(self) -> float:
        """Seconds so far."""
        return self.seconds + (0.0 if self.since is None else time.perf_counter() - self.since)

    def trained(self, count: int) -> None:
        """A step on so many bytes; it counts where the clock runs."""
        if self.since is not None:
            self.bytes += count

    @property
    def rate(self) -> float:
        """Bytes a second; 0 where nothing was timed."""
        return self.bytes / self.seconds if self.seconds else 0.0

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


@dataclass(frozen=True)
class TimedRun(Run):
    """The state of a training with its clock."""

    clock: Clock = field(default_factory=lambda: Clock("cpu"))

    def state(self) -> dict[str, Any]:
        """What `Run` has, and the clock."""
        clock = {"seconds": self.clock.now(), "timed_bytes": self.clock.bytes, "alone": self.clock.alone}
        return {**super().state(), **clock}

    def restore(self, state: dict[str, Any]) -> None:
        """Likewise."""
        super().restore(state)
        self.clock.seconds, self.clock.bytes = state["seconds"], state["timed_bytes"]
        self.clock.alone = self.clock.alone and state["alone"]


__all__ = ["Clock", "TimedRun"]
