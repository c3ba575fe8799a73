"""`FqnToConfig`: a configuration per layer, by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ao_lab.config.base import Config, kind_of

DEFAULT, PATTERN = "_default", "re:"


@dataclass(frozen=True)
class FqnToConfig:
    """Configurations by the full name of a parameter or module; None leaves it as it is.

    An exact name of a parameter comes first, then an exact name of a module, then "re:" and a regular expression that
    matches the whole name of a parameter, or else of a module (the first in the order given), then "_default", which is for
    nn.Linear (but a head that is tied to the embedding). Each name and pattern must match something.
    """

    fqn_to_config: Mapping[str, Config | None] = field(default_factory=dict)
    version: int = 1

    def __post_init__(self) -> None:
        for name, config in self.fqn_to_config.items():
            if config is not None and not isinstance(config, Config):
                raise TypeError(f"FqnToConfig: {name!r} is a configuration or None, got {kind_of(config)}")
            if name.startswith(PATTERN):
                compiled_pattern(name)

    def for_layout(self, layout: str) -> FqnToConfig:
        """Each of the configurations for a layout, see `Config.for_layout`."""
        result = {}
        for name, one in self.fqn_to_config.items():
            try:
                result[name] = None if one is None else one.for_layout(layout)
            except ValueError as error:
                raise ValueError(f"FqnToConfig {name!r}: {error}") from error
        return replace(self, fqn_to_config=result)


def compiled_pattern(name: str) -> re.Pattern[str]:
    """The regular expression of a name that begins with "re:"; ValueError where it is none."""
    try:
        return re.compile(name.removeprefix(PATTERN))
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"FqnToConfig: {name!r} is no regular expression: {error}") from error


__all__ = ["DEFAULT", "PATTERN", "FqnToConfig", "compiled_pattern"]
