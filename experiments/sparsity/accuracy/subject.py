"""What is trained, pruned and evaluated: the common form of the vision transformer and of the language model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from experiments.harness.outcome import Values

#: Added to the seed of what is drawn: other data in training from random weights, after it, and for calibration.
TUNING_SEED, CALIBRATION_SEED = 1000, 2000


#: Held while a model draws its weights from torch's one generator.
DRAWING = threading.Lock()
Model = TypeVar("Model", bound=nn.Module)


def seeded(make: Callable[[], Model], seed: int) -> Model:
    """A model with the random weights of a seed, whatever other threads draw."""
    with DRAWING:
        torch.manual_seed(seed)
        return make()


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One model and task at one scale.

    kind, data, setting: of its rows. seeds: how many. metric: what gaps are of, in `unit`; higher_is_better: its direction;
    relative: whether a gap is in percent of the dense model's, or in units of the metric. margin: the largest gap that counts
    as none, named before anything was measured. build: the model with random weights. start: trains it from there.
    go_on: trains it on, with something called after each step. calibration: batches of training data. evaluate: its metrics.
    key: whatever determines the trained weights beside code and libraries.
    """

    kind: str
    data: str
    setting: str
    seeds: int
    metric: str
    unit: str
    higher_is_better: bool
    relative: bool
    margin: float
    build: Callable[[int], nn.Module]
    start: Callable[[int], nn.Module]
    go_on: Callable[[nn.Module, int, Callable[[nn.Module], object]], None]
    calibration: Callable[[int], Sequence[Tensor]]
    evaluate: Callable[[nn.Module], Values]
    key: tuple[Any, ...]


__all__ = ["CALIBRATION_SEED", "TUNING_SEED", "Subject", "seeded"]
