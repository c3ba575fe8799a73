"""The loop that all models of this experiment are trained on with, dense or 2:4."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from experiments.models.pretraining.training import adamw, set_rate

Batch = TypeVar("Batch")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Steps of AdamW: the rate rises linearly over the share `warmup` of them, then falls to 0 along a cosine.

    batch: images or sequences a step. clip: the largest norm of the gradients.
    """

    steps: int
    batch: int
    rate: float
    warmup: float = 0.1
    weight_decay: float = 0.05
    clip: float = 1.0

    def rate_at(self, number: int) -> float:
        """The rate of step `number`, from 0."""
        rise = min(1.0, (number + 1) / max(1.0, self.warmup * self.steps))
        return self.rate * rise * 0.5 * (1 + math.cos(math.pi * number / self.steps))


def fit(
    model: nn.Module,
    schedule: Schedule,
    draw: Callable[[torch.Generator], Batch],
    loss_of: Callable[[nn.Module, Batch], Tensor],
    seed: int,
    after: Callable[[nn.Module], object] = lambda model: None,
) -> None:
    """Train a model in place. draw: a batch by a generator of the seed's own, so that all methods of a seed see the same.
    after: called after each step of the optimizer."""
    generator = torch.Generator().manual_seed(seed)
    model.train().requires_grad_(True)
    optimizer = adamw(model, schedule)  # type: ignore[arg-type]
    for number in range(schedule.steps):
        set_rate(optimizer, schedule.rate_at(number))
        loss_of(model, draw(generator)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), schedule.clip)
        optimizer.step()
        optimizer.zero_grad()
        after(model)
    model.eval().requires_grad_(False)


__all__ = ["Schedule", "fit"]
