"""`FqnToConfig`: a configuration per layer, by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from ao_lab.config.base import Config
from ao_lab.quantization.modules import is_linear

DEFAULT, PATTERN = "_default", "re:"


@dataclass(frozen=True)
class FqnToConfig:
    """Configurations by the full name of a parameter or module; None leaves it as it is.

    An exact name of a parameter comes first, then an exact name of a module, then "re:" and a regular expression that
    matches the whole name of a parameter, or else of a module (the first in the order given), then "_default", which is for
    nn.Linear. Each name and pattern must match something.
    """

    fqn_to_config: Mapping[str, Config | None] = field(default_factory=dict)
    version: int = 1

    def __post_init__(self) -> None:
        for name, config in self.fqn_to_config.items():
            if config is not None and not isinstance(config, Config):
                raise TypeError(
                    f"FqnToConfig: {name!r} is a configuration or None, got {type(config).__name__}"
                )
            if name.startswith(PATTERN):
                _compiled(name)

    def for_layout(self, layout: str) -> FqnToConfig:
        """Each of the configurations for a layout, see `Config.for_layout`."""
        from ao_lab.checkpoint.export.layouts import fqn_for_layout

        return fqn_for_layout(self, layout)


def _compiled(name: str) -> re.Pattern[str]:
    try:
        return re.compile(name.removeprefix(PATTERN))
    except re.error as error:
        raise ValueError(f"FqnToConfig: {name!r} is no regular expression: {error}") from error


class Patterns:
    """Which configuration a parameter has; remembers which names have matched."""

    def __init__(self, config: FqnToConfig) -> None:
        self.configs = config.fqn_to_config
        self.patterns = {name: _compiled(name) for name in self.configs if name.startswith(PATTERN)}
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


def _some(model: nn.Module) -> str:
    names = [name for name, _ in model.named_modules() if name]
    return ", ".join(names[:8]) + (" ..." if len(names) > 8 else "")


__all__ = ["FqnToConfig", "Patterns"]
