"""Which configuration each parameter of a model has: by a filter, or by the names and patterns of `FqnToConfig`.

Every pass over a model that is given a configuration goes this way: `quantize_`, both steps of quantization-aware training, and
adapters. A selection is called with each parameter's place and says its configuration (None: it stays) and the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from ao_lab.config.base import DEFAULT, PATTERN, Config, FqnToConfig, compiled_pattern
from ao_lab.transforms.layers import (
    first_matrix,
    is_experts,
    is_linear,
    quantizable_parameters,
    says_its_axis,
    unsupported_reason,
)

Filter = Callable[[nn.Module, str], bool]
ROUTES = "it routes tokens to experts and stays dense; a filter_fn of your own that accepts it quantizes it"

#: Of a layer whose weight is also an embedding's.
TIED = (
    "its weight is that of {}, which stays dense: quantized it would be stored beside it; a filter_fn of your own that accepts "
    "it, or its name in FqnToConfig, quantizes it"
)
NO_EXPERTS = (
    "no experts, as far as its module says; a filter_fn of your own that accepts it, and axis=-1 or axis=-2, quantizes a batch "
    "of matrices"
)


def selection(
    config: Config | FqnToConfig,
    filter_fn: Filter | None,
    routers: frozenset[str] = frozenset(),
    tied: Mapping[str, str] | None = None,
) -> Filtered | Patterns:
    """What selects the configuration of each parameter of a model; ValueError for a filter beside FqnToConfig.

    routers: names of layers that route tokens to experts and stay dense (`ao_lab.transforms.layers.routers`); tied: those
    whose weight is an embedding's, and of which embedding (`tied_layers`). Both are quantized where they are asked for by name.
    """
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(
            f"filter_fn is a function of a module and its name that says whether it is meant, got {filter_fn!r:.60}; "
            f"FqnToConfig takes names and patterns"
        )
    if not isinstance(config, FqnToConfig):
        return Filtered(config, filter_fn, routers, tied or {})
    if filter_fn is not None:
        raise ValueError("FqnToConfig names the layers itself; leave filter_fn out")
    return Patterns(config, tied or {})


@dataclass
class Filtered:
    """One configuration for the modules that a function accepts."""

    config: Config
    filter_fn: Filter | None
    #: Names of layers that route tokens to experts.
    routers: frozenset[str] = frozenset()
    #: Names of layers whose weight is an embedding's, and of that embedding.
    tied: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, path: str, module: nn.Module, full: str) -> tuple[Config | None, str]:
        """The configuration of a parameter (None: it stays) and the reason."""
        kind = type(module).__name__
        if path in self.routers and self._leaves("routers"):
            return None, ROUTES
        if path in self.tied and self._leaves("tied"):
            return None, TIED.format(self.tied[path])
        if self.filter_fn is None:
            good = is_linear(module)
            return (self.config, f"{kind}") if good else (None, f"{kind}: without filter_fn only nn.Linear")
        if self.filter_fn(module, path):
            return self.config, "accepted by filter_fn"
        automatic = getattr(self.filter_fn, "leaves_routers", False)
        unsaid = automatic and not is_linear(module) and is_experts(module) and not says_its_axis(module)
        name = full.rpartition(".")[2]
        why = (unsupported_reason(module, name, module._parameters[name]) or NO_EXPERTS) if unsaid else ""  # type: ignore[arg-type]
        return None, why or "refused by filter_fn"

    def _leaves(self, kind: str) -> bool:
        """Whether the filter is one that leaves layers of a kind dense, as no filter does."""
        return self.filter_fn is None or bool(getattr(self.filter_fn, f"leaves_{kind}", False))

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
        patterns = [name for name in hits if name.startswith(PATTERN)]
        if exact or patterns:
            name = (exact or patterns)[0]
        elif DEFAULT in self.configs and is_linear(module):
            if path in self.tied:
                return None, TIED.format(self.tied[path])
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
            raise ValueError(
                f"FqnToConfig: {', '.join(map(repr, unused))} match nothing; names are {_some(model)}"
            )


def passed_over(
    model: nn.Module, accepts: Callable[[str, nn.Module, str], bool]
) -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """Modules that a selection accepts and that have matrices, but none that is quantized or pruned (convolutions, LSTM, ...).

    By the full name of their first. A filter that asks for what only linear layers have does not accept them. `accepts` is
    given a module's name, the module and the full name of that parameter.
    """
    known, found = {id(module) for _, module, _, _ in quantizable_parameters(model)}, {}
    for path, module in model.named_modules():
        if id(module) in known or (first := first_matrix(module)) is None:
            continue
        full = f"{path}.{first}" if path else first
        try:
            accepted = accepts(path, module, full)
        except AttributeError:
            accepted = False
        if accepted:
            found[full] = (module, module.get_parameter(first))
    return found


def _some(model: nn.Module) -> str:
    names = [name for name, _ in model.named_modules() if name]
    return ", ".join(names[:8]) + (" ..." if len(names) > 8 else "")


__all__ = ["Filter", "Filtered", "Patterns", "passed_over", "selection"]
