"""Weights that are quantized as they arrive, one after the other, by a plan that was made of their shapes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ao_lab.config.observer import Observer
from ao_lab.quantization.api import Progress, quantize_weight
from ao_lab.quantization.joined_scales import joined, largest
from ao_lab.quantization.plan import Change, Device, Plan


class StreamedWeights:
    """A plan, and the quantized weight of each dense one that arrives."""

    def __init__(
        self, plan: Plan, observers: Mapping[str, Observer], device: Device, progress: Progress | None
    ) -> None:
        self.plan, self.observers, self.device, self.progress = plan, observers, device, progress
        self.changes = {name: change for change in plan.changes.values() for name in change.places}
        self.done, self.total = 0, len(plan.changes)
        #: Layers that share an outer scale, and what has arrived of those whose others have not.
        self.groups = {
            name: [next(iter(one.places)) for one in group]
            for name, group in joined(plan.changes.values()).items()
        }
        self.waiting: dict[str, torch.Tensor] = {}

    def arrived(self, name: str, dense: torch.Tensor) -> dict[str, nn.Parameter]:
        """The quantized weights that can be made with this one: itself, or nothing, or all that it shares a scale with."""
        group = self.groups.get(name)
        if group is None:
            return {name: self.parameter(name, dense)}
        # What comes from a file may be a view of it.
        self.waiting[name] = dense.clone() if dense.device.type == "cpu" else dense
        if not all(one in self.waiting for one in group):
            return {}
        weights = {one: self.waiting.pop(one) for one in group}
        outer = largest(weights.values(), self.changes[name].recipe.weight)
        return {one: self.parameter(one, weight, outer) for one, weight in weights.items()}

    def go_on(self, plan: Plan) -> None:
        """With the changes of another plan, which are the last."""
        self.changes = {name: change for change in plan.changes.values() for name in change.places}
        self.total = self.done + len(plan.changes)

    def parameter(self, name: str, dense: torch.Tensor, outer: torch.Tensor | None = None) -> nn.Parameter:
        """The quantized weight of a parameter that the plan changes. outer: what it shares with others."""
        change: Change = self.changes[name]
        observer = next((self.observers[place] for place in change.layers if place in self.observers), None)
        weight = nn.Parameter(
            quantize_weight(change, dense, self.device, observer, outer), requires_grad=False
        )
        self.done += 1
        if self.progress is not None:
            self.progress(name, self.done, self.total)
        return weight


__all__ = ["StreamedWeights"]
