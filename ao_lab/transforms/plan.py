"""Which weights a transform is going to change, what it does with each, and why the others stay: nothing half-changed.

A plan touches no weight and holds none, so that each can be freed when its time comes. Weights are changed in every place that
has them, all or none (`all_or_none`), or one after the other, where an error says how far it came (`noting`).

Which parameters are meant a filter says, or the names and patterns of `FqnToConfig`. Every pass over a model goes this way:
`quantize_`, both steps of quantization-aware training, adapters, `sparsify_` and `convert_for_training_`. A `Selection` says
of a module whether it is meant, and why; `selection` of a configuration says of each parameter which configuration it has
(None: it stays), and why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from ao_lab.config.base import DEFAULT, PATTERN, Config, FqnToConfig, compiled_pattern
from ao_lab.transforms.layers import (
    TABLES,
    first_matrix,
    full_name,
    is_experts,
    is_linear,
    never_called,
    quantizable_parameters,
    says_its_axis,
    unsupported_reason,
)
from reference.arrays.namespace import nearest_names

Filter = Callable[[nn.Module, str], bool]
REFUSED = "refused by filter_fn"
#: Where advice begins that is for a call of `quantize_` alone.
PYTHON_ADVICE = "; your own filter_fn "
ROUTES = f"it routes tokens to experts and is left unquantized{PYTHON_ADVICE}can select it"

#: Of a layer whose weight is also an embedding's.
TIED = (
    "its weight is that of {}, which stays unquantized: a quantized copy would be stored in addition"
    f"{PYTHON_ADVICE}can select it, or its name in FqnToConfig"
)
NO_EXPERTS = (
    f"not recognized as experts{PYTHON_ADVICE}can select a batch of matrices, with axis=-1 or axis=-2"
)


@dataclass
class Selection:
    """Whether a module is meant, and the reason: a filter's, or what a transform takes without one.

    Names of layers that route tokens, and of those whose weight is an embedding's, have a reason why they stay: without a
    filter, and with one that has the attribute `leaves_routers` or `leaves_tied`.
    """

    filter_fn: Filter | None
    #: Of a module and its name, where there is no filter.
    default: Callable[[nn.Module, str], tuple[bool, str]]
    routers: Mapping[str, str] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, module: nn.Module, path: str) -> tuple[bool, str]:
        """Of a module by its name."""
        for kind, reasons in (("routers", self.routers), ("tied", self.tied)):
            if path in reasons and getattr(self.filter_fn, f"leaves_{kind}", self.filter_fn is None):
                return False, reasons[path]
        if self.filter_fn is None:
            return self.default(module, path)
        with noting_types(self.filter_fn):
            return (True, "accepted by filter_fn") if self.filter_fn(module, path) else (False, REFUSED)

    def accepts(self, module: nn.Module, path: str) -> bool:
        """Whether the filter accepts what is no linear layer; one that asks for what only these have does not."""
        try:
            return self.filter_fn is not None and bool(self.filter_fn(module, path))
        except AttributeError:
            return False


@contextmanager
def noting_types(filter_fn: Filter) -> Iterator[None]:
    """A TypeError of a filter says how filters are called: one with swapped arguments gets a module where a name belongs."""
    try:
        yield
    except TypeError as error:
        error.add_note(f"filter_fn is called as filter_fn(module, name); this one is {filter_fn!r:.60}")
        raise


def selection(
    config: Config | FqnToConfig,
    filter_fn: Filter | None,
    routers: Iterable[str] = (),
    tied: Mapping[str, str] | None = None,
) -> Filtered | Patterns:
    """What selects the configuration of each parameter of a model; ValueError for a filter beside FqnToConfig.

    routers: names of layers that route tokens to experts and stay dense (`ao_lab.transforms.layers.routers`); tied: those
    whose weight is an embedding's, and of which embedding (`tied_layers`). Both are quantized where they are asked for by name.
    """
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(
            f"filter_fn is a function of a module and its name that selects modules, got {filter_fn!r:.60}; "
            f"FqnToConfig takes names and patterns"
        )
    stays = {name: TIED.format(table) for name, table in (tied or {}).items()}
    if not isinstance(config, FqnToConfig):
        select = Selection(filter_fn, _linear_layers, dict.fromkeys(routers, ROUTES), stays)
        return Filtered(config, select)
    if filter_fn is not None:
        raise ValueError("FqnToConfig names the layers itself; leave filter_fn out")
    return Patterns(config, stays)


def _linear_layers(module: nn.Module, path: str) -> tuple[bool, str]:
    kind = type(module).__name__
    return (True, kind) if is_linear(module) else (False, f"{kind}: by default (no filter_fn) only nn.Linear")


@dataclass
class Filtered:
    """One configuration for the modules that are selected."""

    config: Config
    select: Selection

    def __call__(self, path: str, module: nn.Module, full: str) -> tuple[Config | None, str]:
        """The configuration of a parameter (None: it stays) and the reason."""
        wanted, reason = self.select(module, path)
        if wanted:
            return self.config, reason
        automatic = reason == REFUSED and getattr(self.select.filter_fn, "leaves_routers", False)
        if automatic and not is_linear(module) and is_experts(module) and not says_its_axis(module):
            name = full.rpartition(".")[2]
            reason = unsupported_reason(module, name, module._parameters[name]) or NO_EXPERTS  # type: ignore[arg-type]
        return None, reason

    def check_all_matched(self, model: nn.Module) -> None:
        """A filter that accepts nothing is found by the caller, which counts."""


class Patterns:
    """Which configuration a parameter has; remembers which names have matched."""

    def __init__(self, config: FqnToConfig, tied: Mapping[str, str]) -> None:
        self.configs, self.tied = config.fqn_to_config, tied
        self.patterns = {name: compiled_pattern(name) for name in self.configs if name.startswith(PATTERN)}
        self.matched: set[str] = set()

    def __call__(self, path: str, module: nn.Module, full: str) -> tuple[Config | None, str]:
        """The configuration of a parameter (None: it stays) and the reason."""
        # Names that match count as used even where a more exact one decides.
        hits = [*self._hits(full), *self._hits(path)]
        self.matched.update(hits)
        exact = [name for name in hits if not name.startswith(PATTERN)]
        if hits:
            name = (exact or hits)[0]
        elif DEFAULT in self.configs and is_linear(module):
            if path in self.tied:
                return None, self.tied[path]
            name = DEFAULT
        else:
            return None, "no name or pattern of FqnToConfig matches it"
        reason = f"FqnToConfig {name!r}"
        return self.configs[name], reason if self.configs[name] is not None else f"{reason} is None"

    def _hits(self, name: str) -> list[str]:
        exact = [name] if name in self.configs and name != DEFAULT else []
        return exact + [key for key, pattern in self.patterns.items() if pattern.fullmatch(name)]

    def check_all_matched(self, model: nn.Module) -> None:
        """ValueError for names that matched nothing."""
        unused = [name for name in self.configs if name not in self.matched and name != DEFAULT]
        if unused:
            names = [name for name, _ in model.named_modules() if name]
            close = [one for name in unused for one in nearest_names(name, names, 2, 0.8)]
            near = list(dict.fromkeys(close))
            some = ", ".join(near or names[:8]) + (" ..." if not near and len(names) > 8 else "")
            known = "similar names are" if near else "names are"
            raise ValueError(f"FqnToConfig: {', '.join(map(repr, unused))} match nothing; {known} {some}")


def passed_over(
    model: nn.Module, accepts: Callable[[str, nn.Module, str], bool]
) -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """Modules that a selection accepts and that have matrices, but none that is quantized or pruned (convolutions, LSTM, ...).

    By the full name of their first. A filter that asks for what only linear layers have does not accept them. `accepts` is
    given a module's name, the module and the full name of that parameter.
    """
    known, passed = {id(slot.module) for slot in quantizable_parameters(model)}, {}
    for path, module in model.named_modules():
        if id(module) in known or (first := first_matrix(module)) is None:
            continue
        full = full_name(path, first)
        try:
            accepted = accepts(path, module, full)
        except AttributeError:
            accepted = False
        if accepted:
            passed[full] = (module, module.get_parameter(first))
    return passed


def check_called(model: nn.Module, chosen: Iterable[nn.Module], when: str = "before") -> None:
    """ValueError where torch would multiply with the dense weights of converted layers in eval mode, past these.

    when: the words for when the fast path is to be switched off.
    """
    inside = never_called(model)
    encoder = next((inside[id(module)] for module in chosen if id(module) in inside), None)
    if encoder is not None:
        raise ValueError(
            f"in eval mode torch's fast path of {encoder} computes with dense weights and calls no layer; "
            f"call torch.backends.mha.set_fastpath_enabled(False) {when}, or exclude its layers with filter_fn"
        )


Device = torch.device | str | int | None
#: Told of each weight when it is changed: its full name, how many are, of how many; of a phase that begins: what it is.
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
        return {name: module for name, (module, _) in self.places.items() if not isinstance(module, TABLES)}

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
