"""The weights that `choose_` chooses for, what each option would make of them, and which have to take the same one.

Options are checked as `quantize_` checks its configuration. A weight that some option does not take (a block does not
divide its shape) has the others; one that none takes is no item and stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ao_lab.calibration.methods import AWQ, BiasCorrection, LowRank, Method, Smooth, ordered
from ao_lab.config.base import Config, kind_of
from ao_lab.quantization.api import quantize_weights, transform_of
from ao_lab.quantization.plan import Change, QuantizationPlan, group_of, planned
from ao_lab.transforms.layers import is_linear, shorten
from ao_lab.transforms.plan import Filter

#: Methods that change other parameters than the weight of a layer.
BEYOND = (Smooth, AWQ, LowRank, BiasCorrection)
#: Names of the choices by scores.
SCORED = (MIXED, CORRECTED) = ("mixed", "mixed, corrected")
#: Which items are tied: labels by name, or a function of the name; None where an item stands alone.
Groups = Mapping[str, object] | Callable[[str], object]
#: Settings by name: the option of a weight by its full name, None to leave it dense.
Candidates = Mapping[str, Mapping[str, str | None] | Callable[[str], str | None]]


@dataclass
class Item:
    """One weight, wherever it is."""

    places: dict[str, tuple[nn.Module, str]]
    #: By option: what it would become; None for an option that leaves it dense. Options that do not apply are missing.
    changes: dict[str, Change | None] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its first full name."""
        return next(iter(self.places))

    @property
    def parameter(self) -> torch.Tensor:
        """The weight as it is in the model now."""
        module, name = self.places[self.name]
        return module.get_parameter(name)

    @property
    def numel(self) -> int:
        """How many parameters it has."""
        return self.parameter.numel()

    @property
    def transposed(self) -> bool:
        """Whether it is stored (in, out)."""
        return any(change.transposed for change in self.changes.values() if change is not None)


def items_of(model: nn.Module, options: Mapping[str, Config | None], filter_fn: Filter | None) -> list[Item]:
    """The weights in the order of the model; ValueError for options that cannot be chosen among."""
    plans = {
        name: _plan_of(model, name, config, filter_fn)
        for name, config in options.items()
        if config is not None
    }
    by_weight: dict[int, Item] = {}
    for name, plan in plans.items():
        for key, change in plan.changes.items():
            by_weight.setdefault(key, Item(change.places)).changes[name] = change
    order = {id(parameter): i for i, parameter in enumerate(model.parameters())}
    items = [by_weight[key] for key in sorted(by_weight, key=lambda key: order[key])]
    for item in items:
        _check(item)
        item.changes.update({name: None for name, config in options.items() if config is None})
    return items


def _plan_of(model: nn.Module, name: str, config: Config, filter_fn: Filter | None) -> QuantizationPlan:
    if transform_of(config) is not quantize_weights or config.prepares:
        raise ValueError(
            f"options[{name!r}]: {type(config).__name__} prepares training, it quantizes no weight; leave it out"
        )
    if config.observer() is not None:
        raise ValueError(
            f"options[{name!r}]: {type(config).__name__} finds static scales from data, and scores are of weights and dynamic "
            f"inputs; give it act_quant_scale, or leave it out"
        )
    try:
        return planned(model, config, filter_fn)
    except ValueError as error:
        raise ValueError(f"options[{name!r}] is for none of these layers, leave it out: {error}") from error


def _check(item: Item) -> None:
    for full, (module, _) in item.places.items():
        if not (is_linear(module) or type(module).forward is nn.Embedding.forward):
            raise ValueError(
                f"{full}: {type(module).__name__} is no linear layer whose outputs could be watched, so it has no score; leave "
                f"it out by filter_fn"
            )


def checked_options(options: object) -> tuple[dict[str, Config | None], tuple[Method, ...]]:
    """The configurations by name, and the methods of all; TypeError or ValueError where they are none."""
    if not isinstance(options, Mapping):
        raise TypeError(
            f"options is a mapping of names to configurations, {{'int4': Int4WeightOnlyConfig()}}, got {kind_of(options)}"
        )
    configs: dict[str, Config | None] = {}
    methods: dict[str, tuple[Method, ...]] = {}
    for name, option in options.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"names of options are strings, got {name!r}")
        config, wanted = option if isinstance(option, tuple) and len(option) == 2 else (option, ())
        if config is not None and not isinstance(config, Config):
            raise TypeError(
                f"options[{name!r}] is a configuration of ao_lab, (configuration, methods), or None to leave layers dense, got "
                f"{kind_of(config)}"
            )
        configs[name] = config
        if config is not None:
            methods[name] = _checked_methods(name, wanted)
    if not methods:
        raise ValueError("options has no configuration to choose; give two or more, such as int4 and int8")
    if len(set(methods.values())) > 1:
        raise ValueError(
            f"options {shorten([*methods])} have different methods, and quantize_ applies one set to a model; give "
            f"each option the same"
        )
    return configs, next(iter(methods.values()))


def _checked_methods(name: str, methods: Iterable[Any]) -> tuple[Method, ...]:
    records = ordered(methods)
    if beyond := [one.name for one in records if isinstance(one, BEYOND)]:
        raise ValueError(
            f"options[{name!r}]: {' and '.join(beyond)} change more than a layer's weight, so that layers cannot be chosen for "
            f"one by one; leave them out here, or choose for a model that is smoothed already"
        )
    return records


def checked_candidates(
    items: Sequence[Item], candidates: Candidates | None, options: Mapping[str, Config | None]
) -> dict[str, dict[str, str | None]]:
    """The option of each item in each setting; ValueError for an option that an item does not have."""
    if not isinstance(candidates or {}, Mapping):
        raise TypeError(f"candidates is a mapping of names to settings, got {kind_of(candidates)}")
    settings: dict[str, dict[str, str | None]] = {}
    for name, candidate in (candidates or {}).items():
        options_of = _asked(items, candidate, f"candidates[{name!r}]")
        settings[name] = {item.name: option for item, option in zip(items, options_of, strict=True)}
        for item in items:
            option = settings[name][item.name]
            if option is not None and option not in item.changes:
                known = shorten([*item.changes])
                raise ValueError(
                    f"candidates[{name!r}] gives {item.name} the option {option!r}, and it can have {known} or None"
                )
        if name in (*options, *SCORED):
            raise ValueError(
                f"candidates[{name!r}] has the name of an option or a choice by scores; give it another"
            )
    return settings


def labels(items: Sequence[Item], groups: Groups | None, reads: Mapping[str, int]) -> list[object]:
    """The label of each item's group; those of one label take one option.

    groups: None ties layers that programs join into one matrix (queries, keys and values; gate and up), by their names, and
    those of one parent that read one tensor. reads: what tells of an item by its name which tensor its layers read.
    """
    if groups is None:
        return [_natural(item.name, reads) for item in items]
    asked = _asked(items, groups, "groups")
    return [
        ("alone", item.name) if label is None else ("group", label)
        for item, label in zip(items, asked, strict=True)
    ]


def _asked(items: Sequence[Item], table: Any, what: str) -> list[Any]:
    """What a mapping from full names of weights, or a function of them, says of each item; None where it says nothing.

    Raises ValueError for names of no item, TypeError for anything else than a mapping or a function.
    """
    if not isinstance(table, Mapping):
        if not callable(table):
            raise TypeError(
                f"{what} is a mapping from names of weights or a function of them, got {kind_of(table)}"
            )
        return [table(item.name) for item in items]
    names = {full for item in items for full in item.places}
    if unknown := [name for name in table if name not in names]:
        raise ValueError(
            f"{what} names {shorten(unknown)}, no weights that are chosen for; names are {shorten([*names])}"
        )
    # Of a tied weight any name will do.
    return [next((table[full] for full in item.places if full in table), None) for item in items]


def _natural(name: str, reads: Mapping[str, int]) -> object:
    joined = group_of(name)
    if joined is not None:
        return joined
    parent = name.removesuffix(".weight").rpartition(".")[0]
    return ("alone", name) if name not in reads else (parent, reads[name])


def check_groups(items: Sequence[Item], groups: Sequence[object]) -> None:
    """ValueError for a group whose layers have no option in common."""
    members: dict[object, list[Item]] = {}
    for item, label in zip(items, groups, strict=True):
        members.setdefault(label, []).append(item)
    for group in members.values():
        if not set.intersection(*(set(item.changes) for item in group)):
            raise ValueError(
                f"{shorten([item.name for item in group])} are tied and no option is for all of them; add one, leave them out "
                f"by filter_fn, or untie them by groups={{}}"
            )
