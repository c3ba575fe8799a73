"""What is to be quantized while transformers reads a model, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ao_lab.checkpoint.transformers.sharded import full_weight, holds_quantized, placed_as
from ao_lab.config.base import Config
from ao_lab.config.fqn import FqnToConfig
from ao_lab.config.observer import Observer
from ao_lab.quantization.api import Progress, StreamedWeights, keep_report, preshuffle
from ao_lab.quantization.calibrate import required_observers
from ao_lab.quantization.plan import ALREADY, Device, planned
from ao_lab.transforms.select import Filter

#: What quantizing a weight may raise: it does not fit into memory, or its recipe rejects its values.
EXPECTED = (ValueError, TypeError, RuntimeError, MemoryError)


class Job:
    """A plan for a model without weights, and its weights as they arrive."""

    def __init__(
        self,
        config: Config | FqnToConfig,
        filter_fn: Filter | None,
        device: Device = None,
        observers: Mapping[str, Observer] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.config, self.filter_fn, self.device = config, filter_fn, device
        self.observers, self.progress = observers, progress
        self.loading: StreamedWeights | None = None
        self.error: Exception | None = None
        self.tied: set[str] = set()

    def __deepcopy__(self, memo: Any) -> Job:
        """Itself: transformers copies what it is given, and there is one model."""
        return self

    def start(self, model: Any) -> None:
        """Plan, on the model without weights."""
        ties = model.get_expanded_tied_weights_keys(all_submodels=True)
        self.tied = {*ties, *ties.values()}
        plan = planned(
            model, self.config, self.filter_fn, self.device, streamed=True, tied=tied_to_tables(model, ties)
        )
        self.loading = StreamedWeights(
            plan, required_observers(plan, self.observers), self.device, self.progress
        )

    def changes(self, name: str) -> bool:
        """Whether a parameter is to be quantized when it arrives.

        Which weights are one tensor depends on what the folder has: those that may be wait until all is read.
        """
        return self.loading is not None and name in self.loading.changes and name not in self.tied

    def bits(self, name: str) -> float:
        """About how many bits an element of a changed parameter takes: those of its codes and of its scales."""
        if self.loading is None:
            raise RuntimeError("nothing is planned before the model is known")
        scheme = self.loading.changes[name].recipe.weight
        block = scheme.scale.block
        return scheme.format.bits + (32 / block if isinstance(block, int) and block > 0 else 0)

    def arrived(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors by their full names in the model, those of the plan quantized.

        After an error nothing more is made: transformers keeps exceptions as text and goes on. `finish` raises the first.
        """
        if self.error is not None:
            return {}
        try:
            return {made: x for name, value in tensors.items() for made, x in self._made(name, value).items()}
        except EXPECTED as error:
            self.error = error
            return {}
        except Exception as error:
            self.error = error
            raise

    def _made(self, name: str, value: Any) -> dict[str, Any]:
        """What a tensor completes: itself, or with layers that it shares a scale with all of them, when the last has come."""
        dense = value[0] if isinstance(value, list) else value
        return self.loading.arrived(name, dense) if self.loading and self.changes(name) else {name: dense}

    def finish(self, model: nn.Module) -> None:
        """Raise what was raised; then weights that had to wait, or had no tensor of their own."""
        if self.error is not None:
            raise self.error
        if self.loading is None:
            raise RuntimeError("transformers has loaded the model without asking for its quantization")
        plan = self.loading.plan
        # Whether a head is tied, and stays dense therefore, is known when all is read: the folder may hold both.
        if self.tied or any(not holds_quantized(change.parameter) for change in plan.changes.values()):
            last = planned(model, self.config, self.filter_fn, self.device, again=True)
            self.loading.go_on(last)
            self.loading.observers = required_observers(last, self.observers)
            for change in last.changes.values():
                name, dense = next(iter(change.places)), change.parameter
                if not holds_quantized(dense):
                    change.put(placed_as(name, self.loading.parameter(name, full_weight(dense)), dense))
            plan.reasons.update({name: why for name, why in last.reasons.items() if why != ALREADY})
        if self.device is not None:
            model.to(self.device)
        preshuffle(model)
        keep_report(model, plan)


def tied_to_tables(model: nn.Module, ties: Mapping[str, str]) -> dict[str, str]:
    """Modules that are to have the weight of an embedding, and of which, by names of parameters that are to be one."""
    tables = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    pairs = [(a.removesuffix(".weight"), b.removesuffix(".weight")) for a, b in ties.items()]
    return {a: b for pair in pairs for a, b in (pair, pair[::-1]) if b in tables and a not in tables}


__all__ = ["Job"]
