"""What a transform is going to do with each weight, and why the others stay; and how it does that: nothing half-changed.

A plan touches no weight and holds none, so that each can be freed when its time comes. Weights are changed in every place that
has them, all or none (`all_or_none`), or one after the other, where an error says how far it came (`noting`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from ao_lab.transforms.layers import full_name

Device = torch.device | str | int | None
#: Told of each weight when it is changed: its full name, how many are, of how many.
Progress = Callable[[str, int, int], None]


@dataclass
class WeightChange:
    """One weight to be changed, wherever it is."""

    #: (module, parameter's name) of every place where it is changed, by full name.
    places: dict[str, tuple[nn.Module, str]] = field(default_factory=dict, kw_only=True)
    #: Full names of places that have it and keep it as it is.
    others: list[str] = field(default_factory=list, kw_only=True)

    @property
    def name(self) -> str:
        """The first of its full names."""
        return next(iter(self.places))

    @property
    def parameter(self) -> torch.Tensor:
        """The weight as it is now."""
        module, name = self.places[self.name]
        parameter = module._parameters[name]
        if parameter is None:
            raise ValueError(f"{self.name} was taken out of the model")
        return parameter

    @property
    def layers(self) -> dict[str, nn.Module]:
        """Those of its modules that multiply with it: all but embeddings."""
        return {
            name: module for name, (module, _) in self.places.items() if not isinstance(module, nn.Embedding)
        }

    def put(self, parameter: nn.Parameter) -> None:
        """A new weight in every place."""
        for module, name in self.places.values():
            module._parameters[name] = parameter


C = TypeVar("C", bound=WeightChange)


@dataclass
class Plan(Generic[C]):
    """What is to be changed, and why each parameter (by full name) is as it will be."""

    #: By the identity of the weight: what was shared stays shared.
    changes: dict[int, C] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    #: Names of parameters that the filter or the patterns leave as they are.
    refused: set[str] = field(default_factory=set)

    def find_others(self, model: nn.Module) -> None:
        """Note where else the weights are, and say so."""
        for path, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                change, full = self.changes.get(id(parameter)), full_name(path, name)
                if change is not None and full not in change.places:
                    change.others.append(full)
        for change in self.changes.values():
            for full in change.places if change.others else ():
                stay = "stays" if len(change.others) == 1 else "stay"
                self.reasons[full] += f"; was shared with {', '.join(change.others)}, which {stay} dense"


@contextmanager
def all_or_none(restore: Callable[[Any], None]) -> Iterator[list[Any]]:
    """A list for the modules that are changed inside, each before it is; after an error `restore` makes them what they were."""
    begun: list[Any] = []
    try:
        yield begun
    except BaseException:
        for module in begun:
            restore(module)
        raise


@contextmanager
def noting(told: Callable[[], str]) -> Iterator[None]:
    """A note at an error says what had been done."""
    try:
        yield
    except BaseException as error:
        error.add_note(told())
        raise


F = TypeVar("F")


class Transforms(Generic[F]):
    """What a function that changes models does for each class of configurations, and for its subclasses."""

    def __init__(self) -> None:
        self.by_class: dict[type, F] = {}

    def register(self, kind: type) -> Callable[[F], F]:
        """A decorator of the function of a class; ValueError for a second one."""

        def registered(function: F) -> F:
            if self.by_class.setdefault(kind, function) is not function:
                raise ValueError(f"{kind.__name__} has a transform already: {self.by_class[kind]}")
            return function

        return registered

    def of(self, config: object) -> F | None:
        """The function of a configuration's class; None where none is registered."""
        return next((self.by_class[kind] for kind in type(config).__mro__ if kind in self.by_class), None)
