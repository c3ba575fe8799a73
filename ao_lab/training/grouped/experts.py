"""Modules of batched experts that train in low precision: the module, its parameters and names stay, its class changes.

Two kinds of modules are known. Experts of transformers (`use_experts_implementation`) say of themselves how their parameters
lie and how they gate; they get a forward that sorts tokens on the device (`transformers_forward`). Others, as torchtitan's
GroupedExperts, keep their own forward, and its products with experts are taken over while it runs (`intercept`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import nn

from ao_lab.training.grouped.intercept import NAMES, is_matrices, run_intercepted
from ao_lab.training.grouped.transformers_forward import experts_forward, follows_transformers
from ao_lab.training.layers import Settings, mark_run, restore_class


class LowPrecisionExperts:
    """What a module of experts has beside its own class while it trains by a recipe."""

    low_precision: Settings
    #: The module's own class.
    plain: type[nn.Module]

    def unsupported_reason(self) -> str | None:
        """Why `quantize_` leaves the experts as they are."""
        name = self.low_precision.recipe.name
        return f"it trains by recipe {name!r}; ao_lab.convert_from_training_(model) makes it a {self.plain.__name__} again"

    def parameter_reason(self, name: str) -> str | None:
        """Why a parameter is as it is, for `explain`."""
        matrices = is_matrices(getattr(self, name))
        return f"trains by recipe {self.low_precision.recipe.name!r}" if matrices else None

    def extra_repr(self) -> str:
        """The module's own, and the recipe."""
        own = super().extra_repr()  # type: ignore[misc]
        return ", ".join(part for part in (own, f"recipe={self.low_precision.recipe.name}") if part)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles name the module's own class: this one is made while a program runs."""
        kind = next(one for one in KINDS if isinstance(self, one))
        return _made, (kind, self.plain), self.__dict__


class TransformersExperts(LowPrecisionExperts):
    """Experts of transformers."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states (T, K), the experts (T, k) and the weights (T, k) of each token's choices: (T, K)."""
        mark_run(self)
        return experts_forward(self, self.low_precision, hidden_states, top_k_index, top_k_weights)


class InterceptedExperts(LowPrecisionExperts):
    """Experts whose forward multiplies by torch's grouped products, or by one for each expert."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own. torch.compile leaves it out of its graphs."""
        mark_run(self)
        return run_intercepted(super().forward, self, self.low_precision, args, kwargs)  # type: ignore[misc]


KINDS = (TransformersExperts, InterceptedExperts)


CLASSES: dict[tuple[type, type], type[Any]] = {}


def class_of(kind: type[LowPrecisionExperts], plain: type[nn.Module]) -> type[Any]:
    """The class that a module of class `plain` gets, the same at every call."""
    if (kind, plain) not in CLASSES:
        fields = {"plain": plain, "__module__": plain.__module__}
        CLASSES[kind, plain] = type(f"LowPrecision{plain.__name__}", (kind, plain), fields)
    return CLASSES[kind, plain]


def _made(kind: type[LowPrecisionExperts], plain: type[nn.Module]) -> Any:
    return object.__new__(class_of(kind, plain))


def experts_reason(settings: Settings, module: nn.Module) -> str | None:
    """Why experts cannot train by a recipe; None where they can."""
    kind = type(module).__name__
    if isinstance(module, LowPrecisionExperts):
        name = module.low_precision.recipe.name
        return f"they train by recipe {name!r} already; ao_lab.convert_from_training_(model) first"
    if not follows_transformers(module) and not NAMES & called(type(module).forward):
        return f"the forward of {kind} multiplies by none of {', '.join(sorted(NAMES))}, as far as its code shows"
    step = max(settings.steps[1:])
    for name, parameter in module.named_parameters(recurse=False):
        lengths = tuple(parameter.shape[1:]) if is_matrices(parameter) else ()
        if any(length % step for length in lengths) and not settings.pad:
            return f"{name} has matrices of {lengths}, no multiples of {step}, as recipe {settings.recipe.name!r} asks"
    return None


def called(function: Callable[..., Any], depth: int = 3) -> set[str]:
    """Names in a function's code, and in that of the functions of its module that it names."""
    function = inspect.unwrap(function)
    code, globals_ = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    if code is None or not depth:
        return set()
    names = _names(code)
    inner = [globals_[name] for name in names if callable(globals_.get(name))]
    return names.union(*(called(f, depth - 1) for f in inner if inspect.isfunction(inspect.unwrap(f))))


def _names(code: CodeType) -> set[str]:
    return {*code.co_names}.union(*(_names(part) for part in code.co_consts if isinstance(part, CodeType)))


def train_experts_by(module: nn.Module, settings: Settings) -> None:
    """Make a module of experts train by a recipe."""
    kind = TransformersExperts if follows_transformers(module) else InterceptedExperts
    module.__class__ = class_of(kind, type(module))
    module.low_precision = settings  # type: ignore[assignment]


def plain_experts_again(module: LowPrecisionExperts) -> None:
    """Undo `train_experts_by`."""
    restore_class(module, LowPrecisionExperts, module.plain)


__all__ = ["LowPrecisionExperts", "experts_reason", "plain_experts_again", "train_experts_by"]
