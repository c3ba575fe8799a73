"""Configurations as `compare` and `benchmark` take them: by name, by scheme, or as a folder that is quantized already."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from ao_lab.config.base import CONFIGS, Config, FqnToConfig, SchemeConfig
from ao_lab.config.recipe import named
from ao_lab.install.extras import WrongInput, wrong_input
from ao_lab.measure.evaluate import fingerprint
from ao_lab.measure.folders import check_folder
from ao_lab.transforms.plan import PYTHON_ADVICE
from reference import SCHEMES, Scheme
from reference.arrays.namespace import lookup

Given = str | Path | Scheme | Config | FqnToConfig
#: Configurations that are compared where none is named.
USUAL = (
    "Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8DynamicActivationFloat8WeightConfig",
    "MXWeightOnlyConfig", "NVFP4WeightOnlyConfig", "NF4WeightOnlyConfig", "Int4WeightOnlyConfig",
)  # fmt: skip
#: The name of the unquantized model among rows.
BASE = "unquantized"


def configurations(configs: Sequence[Given] | Mapping[str, Given]) -> dict[str, Any]:
    """What is measured, by the names of the rows; ValueError for unknown names, with the nearest, and for two of a name."""
    if isinstance(configs, (str, Path, Config, FqnToConfig)):
        configs = [configs]
    pairs = (
        list(configs.items()) if isinstance(configs, Mapping) else [(label_of(one), one) for one in configs]
    )
    names = [name for name, _ in pairs]
    if not pairs:
        raise WrongInput("compare takes one configuration or more, such as 'Int4WeightOnlyConfig'")
    if twice := [name for name in names if names.count(name) > 1 or name == BASE]:
        raise WrongInput(f"{twice[0]!r} is given twice; give each configuration once, or use your own names")
    return {name: configuration(one) for name, one in pairs}


def configuration(one: Given) -> Any:
    """The configuration of a name; a folder as a path."""
    if isinstance(one, (Config, FqnToConfig)):
        return one
    if isinstance(one, Scheme):
        return SchemeConfig(scheme=one)
    if isinstance(one, Path) or (Path(one) / "config.json").is_file():
        check_folder(Path(one))
        return Path(one)
    if one in CONFIGS:
        return CONFIGS[one]()
    try:
        return SchemeConfig(scheme=named(one))
    except ValueError:
        both: dict[str, Any] = {**CONFIGS, **SCHEMES}
        with wrong_input():
            return lookup(one, both, "configuration or scheme")


def label_of(one: Given) -> str:
    """The name of a row: what was given, or a configuration's class with what differs from its defaults."""
    if isinstance(one, (str, Path)):
        return Path(one).name if (Path(one) / "config.json").is_file() else str(one)
    if isinstance(one, Scheme):
        return one.name
    if isinstance(one, FqnToConfig):
        return f"FqnToConfig of {len(one.fqn_to_config)} patterns"
    given = [
        f"{f.name}={getattr(one, f.name)}"
        for f in fields(one)
        if f.init and getattr(one, f.name) != default_of(f)
    ]
    return " ".join([type(one).__name__, *given])


def default_of(one: Field[Any]) -> Any:
    """The default of a field of a dataclass."""
    return one.default if one.default_factory is MISSING else one.default_factory()


def check_calibration(methods: Sequence[Any], calibration: object, wanted: Mapping[str, Any]) -> None:
    """WrongInput for methods without the text that they read, and for a text that nothing reads."""
    reading = [one.name for one in methods if one.calibrates]
    static = [name for name, config in wanted.items() if observes(config)]
    if (reading or static) and calibration is None:
        what = f"--method {reading[0]}" if reading else static[0]
        raise WrongInput(f"{what} needs calibration data; give --calibration TEXT, a text file")
    if calibration is not None and not reading and not static:
        raise WrongInput("--calibration is used by methods only; give --method too, such as clip or gptq")


def observes(config: object) -> bool:
    """Whether a configuration finds static scales of inputs from data."""
    return isinstance(config, Config) and config.observer() is not None


def made_from(config: object) -> str:
    """What a row is made of, as text: another configuration, or a folder with other weights, is measured again."""
    return f"{config} {fingerprint(config)}" if isinstance(config, Path) else repr(config)


#: The beginning of a reason that names a layer's shape.
SHAPE = re.compile(r"^shape \([^)]*\): ")
#: Where the advice begins of a reason that blocks do not divide a layer.
PADDING = "; pad the tensor"


def reasons_of(report: Any) -> dict[str, int]:
    """How many linear layers were left for which reason, the most frequent first, without advice to callers of `quantize_`."""
    kept = (
        one
        for one in report.layers
        if not one.changed and len(one.shape) == 2 and "Embedding" not in one.kind
    )
    reasons = (SHAPE.sub("", one.reason.partition(PYTHON_ADVICE)[0].partition(PADDING)[0]) for one in kept)
    return dict(Counter(reasons).most_common())
