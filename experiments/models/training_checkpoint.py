"""The state of a training run on disk: a killed run is resumed from it and ends with the same weights.

A checkpoint holds everything that the next step depends on: parameters and buffers, the optimizers' states, the generator that
draws the text, torch's own generator, and the losses so far. On a CPU with the same number of threads the final weights are
those of an uninterrupted run, bit for bit. The file is replaced atomically.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.harness.rows import PARTIAL

#: Seconds between checkpoints: a kill loses at most this and one step.
SECONDS = 15.0


@dataclass(frozen=True)
class Run:
    """The state that changes from step to step. `losses` grows in place: one 0-d tensor a step."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    generator: torch.Generator
    losses: list[Tensor]

    def state(self) -> dict[str, Any]:
        """The state as tensors and plain values; one loss for each step."""
        return {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "generator": self.generator.get_state(),
            "torch": torch.get_rng_state(),
            "losses": torch.stack(self.losses) if self.losses else torch.empty(0),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; errors where it is another model's."""
        self.model.load_state_dict(state["model"])
        for optimizer, stored in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(stored)
        self.generator.set_state(state["generator"])
        torch.set_rng_state(state["torch"])
        self.losses[:] = state["losses"].unbind()


class Checkpoint:
    """The checkpoint file of one training run; without a path, none is written."""

    def __init__(self, path: Path | None = None, seconds: float = SECONDS) -> None:
        self.path, self.seconds = path, seconds
        self.written = time.monotonic()
        #: Steps of earlier processes.
        self.resumed = 0

    def resume(self, run: Run, device: str | torch.device) -> int:
        """Restore a run from its checkpoint; returns the number of its steps, 0 without a checkpoint.

        ValueError for a file that cannot be read.
        """
        if self.path is None or not self.path.exists():
            return 0
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"{self.path} cannot be read; delete it, and training starts again") from error
        state["losses"] = state["losses"].to(device)
        run.restore(state)
        self.resumed = len(run.losses)
        return self.resumed

    def reached(self, run: Run) -> None:
        """Called after a step: writes the file if the last time is `seconds` ago."""
        if self.path is not None and time.monotonic() - self.written >= self.seconds:
            self._write(self.path, run)
            self.written = time.monotonic()

    def done(self) -> None:
        """Delete the file: the run is over and its model is stored elsewhere."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _write(self, path: Path, run: Run) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PARTIAL)
        try:
            with os.fdopen(handle, "wb") as file:
                torch.save(run.state(), file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


__all__ = ["SECONDS", "Checkpoint", "Run"]
