"""`ao-lab configs`: the configurations that `--config` takes, their options and defaults, and the nearest to a wrong name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ao_lab.cli.formats import known
from ao_lab.cli.terminal.output import WrongInput, print_json, print_table

if TYPE_CHECKING:
    from ao_lab.config.base import Config

#: Options of the command line's own: --config SCHEME, --activation, --sparsity.
OWN_FLAGS = ("scheme", "activation_scheme", "sparsity")
#: Options that all configurations have; they come last.
COMMON = ("kernel", "axis")
#: Parameters that torchao's classes have, taken so that their calls run unchanged; nothing here depends on them.
WITHOUT_EFFECT = ("set_inductor_config", "version", "int4_tile_packed_ntile", "use_triton_kernel", "alg_id")


def config_classes() -> dict[str, type[Config]]:
    """The configurations of quantized weights by name; without those that hold others, or are for training."""
    from ao_lab import calibration as calibration  # registers configurations with static scales
    from ao_lab.config.base import CONFIGS

    return dict(sorted(CONFIGS.items()))


def check_name(name: str) -> None:
    """WrongInput, with the nearest names, for one that is neither a configuration's nor a scheme's."""
    from reference import SCHEMES

    names: Mapping[str, Any] = {**config_classes(), **SCHEMES}
    try:
        known(name, names, "config")
    except WrongInput as error:
        nearest = str(error).partition("; ")[2]
        raise WrongInput(
            f"--config {name} is no configuration (ao-lab configs lists them) and no scheme (ao-lab schemes); {nearest}"
        ) from None


def options_of(kind: type[Config]) -> dict[str, Any]:
    """The options of a configuration that change something, with their defaults."""
    found = {field.name: field.default for field in dataclasses.fields(kind) if field.init}
    common = {name: found.pop(name) for name in COMMON if name in found}
    return {
        name: value
        for name, value in {**found, **common}.items()
        if name not in (*OWN_FLAGS, *WITHOUT_EFFECT) and not _has_one_value(kind, name)
    }


def _has_one_value(kind: type[Config], name: str) -> bool:
    """Whether a parameter may have no other value than its default; None and False say the same."""
    return len({value or None for value in kind.ONLY.get(name, (0, 1))}) == 1


def show_configs(name: str | None, as_json: bool) -> None:
    """All configurations as a table, or one with its options."""
    classes = config_classes()
    if name is None:
        rows = [{"name": key, "what": _sentence(kind), **_schemes(kind)} for key, kind in classes.items()]
        if as_json:
            print_json(rows)
        else:
            columns = ["configuration", "what it is", "weight", "activation"]
            print_table("Configurations", columns, [[str(v or "-") for v in row.values()] for row in rows])
        return
    kind = known(name, classes, "config")
    options = {key: _plain(value) for key, value in options_of(kind).items()}
    details = {"name": name, "what": " ".join((kind.__doc__ or "").split()), **_schemes(kind)}
    if as_json:
        print_json({**details, "options": options})
        return
    properties = [[key, str(value or "-")] for key, value in details.items()]
    print_table(f"Configuration {name}", ["property", "value"], properties)
    defaults = [
        [key, value if isinstance(value, str) else json.dumps(value)] for key, value in options.items()
    ]
    print_table("Options", ["--option NAME=VALUE", "default"], defaults)


def _sentence(kind: type[Config]) -> str:
    """The first sentence of a configuration's description."""
    text = " ".join((kind.__doc__ or "").split())
    return text.partition(". ")[0].removesuffix(".") + "."


def _schemes(kind: type[Config]) -> dict[str, str | None]:
    """The schemes of weight and input by default; None where there is none, or the configuration has to be told."""
    try:
        recipe = kind().recipe()
    except (TypeError, ValueError):
        return {"weight": None, "activation": None}
    return {
        "weight": recipe.weight.name,
        "activation": None if recipe.activation is None else recipe.activation.name,
    }


def _plain(value: Any) -> Any:
    """A default as it is typed: JSON, or a granularity by name."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    given = [getattr(value, field.name) for field in dataclasses.fields(value)]
    numbers = [item for item in given if isinstance(item, int) and item > 0]
    return type(value).__name__ + (f"({', '.join(map(str, numbers))})" if numbers else "")


__all__ = ["check_name", "config_classes", "options_of", "show_configs"]
