"""The weights of options, quantized when they are asked for, and put into a model for a while.

On a host they are quantized once and held, packed; on a GPU quantizing again is quicker than memory is large, and none is held.
What methods with data have made (GPTQ) is held in any case.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ao_lab.calibration.methods import Method
from ao_lab.choose.items import Item
from ao_lab.config.base import Config
from ao_lab.quantization.api import quantize_, quantize_parameter
from ao_lab.quantization.plan import JoinedScales
from ao_lab.transforms.plan import Filter

#: An option of each item, by the item's name; None leaves it as it is.
Setting = Mapping[str, str | None]


@dataclass
class Weights:
    """Quantized weights by item and option."""

    items: Sequence[Item]
    held: dict[tuple[str, str], nn.Parameter] = field(default_factory=dict)
    #: The outer scales that joined layers share, by option and name.
    outer: dict[str, dict[str, torch.Tensor | None]] = field(default_factory=dict)

    def of(self, item: Item, option: str) -> nn.Parameter | None:
        """What an item becomes under an option; None where that leaves it dense."""
        change, key = item.changes[option], (item.name, option)
        if change is None:
            return None
        if key in self.held:
            return self.held[key]
        dense = item.parameter
        weight = quantize_parameter(change, dense, None, {}, self._outer(option).get(item.name))
        if dense.device.type == "cpu":
            self.held[key] = weight
        return weight

    def calibrate(
        self,
        model: nn.Module,
        configs: Mapping[str, Config | None],
        batches: Sequence[Any],
        methods: tuple[Method, ...],
        tell: Callable[[str], None] = lambda word: None,
    ) -> None:
        """Hold what methods make of each option, in a copy of the model that has this option wherever it can be. tell: is told
        which option and which of its weights.
        """
        data = batches if any(method.calibrates for method in methods) else None
        for option, config in configs.items():
            if config is None:
                continue
            whole, mine = copy.deepcopy(model), [item for item in self.items if option in item.changes]
            told = partial(_told, tell, option)
            quantize_(whole, config, _layers_of(mine), calibration=data, methods=methods, progress=told)
            modules = dict(whole.named_modules())
            for item in mine:
                path, _, name = item.name.rpartition(".")
                self.held[item.name, option] = modules[path].get_parameter(name)

    def _outer(self, option: str) -> dict[str, torch.Tensor | None]:
        if option not in self.outer:
            changes = [change for item in self.items if (change := item.changes.get(option)) is not None]
            shared = JoinedScales(changes)
            self.outer[option] = {change.name: shared.of(change) for change in changes}
        return self.outer[option]

    @contextmanager
    def placed(self, setting: Setting) -> Iterator[None]:
        """A model whose items have these options inside; the very parameters of before are in their places afterwards."""
        before = [
            (module, name, module._parameters[name])
            for item in self.items
            for module, name in item.places.values()
        ]
        try:
            new = [
                (item, self.of(item, option))
                for item in self.items
                if (option := setting[item.name]) is not None
            ]
            for item, weight in new:
                for module, name in item.places.values() if weight is not None else ():
                    module._parameters[name] = weight
            yield
        finally:
            for module, name, parameter in before:
                module._parameters[name] = parameter


def _told(tell: Callable[[str], None], option: str, word: str, done: int, total: int) -> None:
    tell(f"{option}: {word}")


def _layers_of(items: Sequence[Item]) -> Filter:
    """A filter for the layers of items in a copy of the model, whose modules a caller's own filter may not know."""
    paths = {full.rpartition(".")[0] for item in items for full in item.places}
    return lambda module, path: path in paths
