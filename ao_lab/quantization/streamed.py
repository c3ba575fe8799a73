"""Weights that are quantized as they arrive, one after the other, by a plan that was made of their shapes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ao_lab.config.observer import Observer
from ao_lab.quantization.api import Progress, quantize_weight
from ao_lab.quantization.plan import Change, Device, Plan


class StreamedWeights:
    """A plan, and the quantized weight of each dense one that arrives."""

    def __init__(
        self, plan: Plan, observers: Mapping[str, Observer], device: Device, progress: Progress | None
    ) -> None:
        self.plan, self.observers, self.device, self.progress = plan, observers, device, progress
        self.changes = {name: change for change in plan.changes.values() for name in change.places}
        self.done, self.total = 0, len(plan.changes)

    def go_on(self, plan: Plan) -> None:
        """With the changes of another plan, which are the last."""
        self.changes = {name: change for change in plan.changes.values() for name in change.places}
        self.total = self.done + len(plan.changes)

    def parameter(self, name: str, dense: torch.Tensor) -> nn.Parameter:
        """The quantized weight of a parameter that the plan changes."""
        change: Change = self.changes[name]
        observer = next((self.observers[place] for place in change.layers if place in self.observers), None)
        weight = nn.Parameter(quantize_weight(change, dense, self.device, observer), requires_grad=False)
        self.done += 1
        if self.progress is not None:
            self.progress(name, self.done, self.total)
        return weight


__all__ = ["StreamedWeights"]
