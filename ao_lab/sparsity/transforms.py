"""Configurations of `sparsify_` that do something else than prune once: each registers what, for its class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from ao_lab.sparsity.report import SparsityReport
from ao_lab.transforms.select import Filter


class Registered:
    """Base of configurations with a transform of their own."""


@dataclass(frozen=True)
class Call:
    """One call of `sparsify_` for such a configuration. further: names of the keyword arguments that were given."""

    model: nn.Module
    config: Registered
    filter_fn: Filter | None = None
    further: tuple[str, ...] = ()


Transform = Callable[[Call], SparsityReport]
_TRANSFORMS: dict[type[Registered], Transform] = {}


def transform(kind: type[Registered]) -> Callable[[Transform], Transform]:
    """Register what `sparsify_` does for a class of configurations; ValueError for a second one."""

    def register(function: Transform) -> Transform:
        if _TRANSFORMS.setdefault(kind, function) is not function:
            raise ValueError(f"{kind.__name__} has a transform already: {_TRANSFORMS[kind]}")
        return function

    return register


def transformed(
    model: nn.Module, config: Registered, filter_fn: Filter | None, **further: object
) -> SparsityReport:
    """What `sparsify_` returns for a configuration that has registered."""
    found = next((_TRANSFORMS[kind] for kind in type(config).__mro__ if kind in _TRANSFORMS), None)
    if found is None:
        raise TypeError(f"sparsify_: {type(config).__name__} has registered no transform")
    return found(Call(model, config, filter_fn, tuple(name for name, value in further.items() if value)))


__all__ = ["Call", "Registered", "Transform", "transform", "transformed"]
