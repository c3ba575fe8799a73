"""Modules of a model that train by a recipe, and the reasons of those that stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import nn
from torch.nn.parameter import is_lazy

from ao_lab.training.grouped.experts import experts_reason
from ao_lab.training.layers import Settings, class_of, unsupported_reason
from ao_lab.transforms.layers import is_experts, is_linear, never_called, routers, shorten

#: Of a module and its name: whether it is to train in low precision.
Filter = Callable[[nn.Module, str], bool]
ROUTER, REFUSED = "it routes tokens to experts", "refused by filter_fn"


@dataclass
class Selection:
    """Modules by name that are to train by a recipe, and the reasons of those that stay."""

    chosen: dict[str, nn.Module] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    @property
    def modules(self) -> list[nn.Module]:
        """The chosen modules, each once."""
        return list({id(module): module for module in self.chosen.values()}.values())


def selected(model: nn.Module, settings: Settings, filter_fn: Filter | None, experts: bool) -> Selection:
    """What is to be converted; ValueError where nothing is, for lazy layers, or where torch would compute past what is."""
    found, unsupported = Selection(), list[str]()
    routing = routers(model) if filter_fn is None else frozenset()
    for name, module in model.named_modules(remove_duplicate=False):
        candidate = is_linear(module) or (experts and is_experts(module))
        if not candidate and not holds_matrices(module):
            continue
        if name in routing:
            found.left[name] = ROUTER
            continue
        if filter_fn is not None and not filter_fn(module, name):
            found.left.update({name: REFUSED} if candidate else {})
            continue
        if not candidate and filter_fn is None and not isinstance(module, nn.Linear):
            continue
        if any(map(is_lazy, module.parameters(recurse=False))):
            raise ValueError(
                f"{name or 'the model itself'}: a {type(module).__name__} has no shape yet; run one forward of "
                f"the model first, which gives it one"
            )
        reason = _reason(settings, module) if candidate else other_reason(module)
        if reason is None:
            found.chosen[name] = module
        else:
            found.left[name] = reason
            unsupported.append(name)
    _check_any(found, unsupported, settings)
    check_called(model, found.chosen.values())
    return found


def _check_any(found: Selection, unsupported: list[str], settings: Settings) -> None:
    if found.chosen:
        return
    if not unsupported:
        raise ValueError(
            "no layer is to be converted: filter_fn refused all, or the model has none beside routers"
        )
    first = unsupported[0]
    where = f"{first}: " if first else ""
    raise ValueError(
        f"recipe {settings.recipe.name!r} takes none of {shorten(unsupported)}: {where}{found.left[first]}"
    )


def _reason(settings: Settings, module: nn.Module) -> str | None:
    """Why a linear layer or experts cannot train by a recipe; None where they can."""
    if not is_linear(module):
        return experts_reason(settings, module)
    known = class_of(module)
    if isinstance(known, str) or not isinstance(module, nn.Linear):
        return str(known)
    return unsupported_reason(settings.recipe, module, settings.pad)


def holds_matrices(module: nn.Module) -> bool:
    """Whether a module has parameters of two axes or more of its own that a filter may have meant; lazy ones have none yet."""
    return any(
        not is_lazy(parameter) and parameter.dim() > 1 for parameter in module.parameters(recurse=False)
    )


def other_reason(module: nn.Module) -> str:
    """Why a module that holds matrices is none that recipes train."""
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention multiplies with its weight without calling it"
    if is_experts(module):
        return "experts=False"
    return f"recipes train nn.Linear and batched experts, and this is a {type(module).__name__}"


def check_called(model: nn.Module, chosen: Iterable[nn.Module], when: str = "before") -> None:
    """ValueError where torch would multiply with the dense weights of converted layers in eval mode, past these.

    when: the words for when the fast path is to be switched off.
    """
    inside = never_called(model)
    found = next((inside[id(module)] for module in chosen if id(module) in inside), None)
    if found is not None:
        raise ValueError(
            f"in eval mode torch's fast path of {found} computes with dense weights and calls no layer; "
            f"call torch.backends.mha.set_fastpath_enabled(False) {when}, or leave its layers out by filter_fn"
        )


__all__ = ["Filter", "Selection", "check_called", "selected"]
