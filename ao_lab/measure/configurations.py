"""Configurations as `compare` and `benchmark` take them: by name, by scheme, or as a folder that is quantized already."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ao_lab.checkpoint.io.shards import has_weights, look_at
from ao_lab.checkpoint.io.strict_json import shown
from ao_lab.checkpoint.model_builder import read_config
from ao_lab.checkpoint.size import Written
from ao_lab.config.base import Config, FqnToConfig, SchemeConfig, config_named
from ao_lab.eval import Text, Windows
from ao_lab.install.extras import WrongInput, wrong_input
from ao_lab.measure.asked import as_fields
from ao_lab.measure.evaluate import fingerprint, name_of
from ao_lab.measure.folders import check_folder, fields_of, windows_for
from ao_lab.quantization.groups import without_groups
from ao_lab.transforms.plan import PYTHON_ADVICE, TIED
from reference import Scheme

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
    with wrong_input():
        return config_named(one)


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


#: Fields of a configuration that say how large a model's weights are, in the words of Llama and of GPT-2.
SIZES = (
    "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "n_embd", "n_layer", "n_head", "n_inner",
)  # fmt: skip


def check_same_model(model: str | Path | nn.Module, wanted: Mapping[str, Any]) -> None:
    """WrongInput for a folder among configurations whose config.json describes another model than the one that is measured."""
    own = sizes_of(fields_of(model))
    for folder in (one for one in wanted.values() if isinstance(one, Path)):
        other = sizes_of(read_config(folder))
        if differ := [name for name in own if name in other and other[name] != own[name]]:
            name = differ[0]
            there, here = shown(other[name]), shown(own[name])
            raise WrongInput(
                f"{folder} is no version of {name_of(model)}: {name} is {there} there and {here} here; "
                "give a folder that was quantized from this model, or compare the two with ao-lab eval"
            )


def check_same_tokens(
    wanted: Mapping[str, Any], source: Text, windows: Windows, limit: int, length: int | None
) -> None:
    """WrongInput for a folder among configurations whose own tokenizer reads the text as other tokens than the model's."""
    for folder in (one for one in wanted.values() if isinstance(one, Path)):
        if (folder / "tokenizer.json").is_file():
            own, _ = windows_for(folder, None, source, limit, length)
            if not torch.equal(own.ids, windows.ids):
                raise WrongInput(
                    f"{folder} is no version of this model: its tokenizer.json reads the text as other tokens; give a folder "
                    "that was quantized from this model, or compare the two with ao-lab eval"
                )


def sizes_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration says of sizes; of a model of several parts, what its text model has."""
    text = as_fields(fields.get("text_config"))
    return {name: value for name in SIZES if (value := text.get(name, fields.get(name))) is not None}


def files_of(folder: Path) -> Written:
    """The layout that a folder's config.json names, and the bytes of its tensors."""
    described = read_config(folder).get("quantization_config")
    method = described.get("quant_method") if isinstance(described, dict) else None
    specs = look_at(folder).specs if has_weights(folder) else {}
    size = sum(spec.bytes for spec in specs.values())
    return Written(str(method or ""), size or sum(file.stat().st_size for file in folder.glob("*.bin")))


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


#: The beginning of the reason of a layer whose weight is the embedding.
SHARED = TIED.partition("{}")[0]
#: The beginning of a reason that names a layer's shape.
SHAPE = re.compile(r"^shape \([^)]*\): ")


def reasons_of(report: Any) -> dict[str, int]:
    """How many linear layers were left for which reason, the most frequent first, without advice to callers of `quantize_` and
    without heads that are the embedding."""
    kept = (
        one
        for one in report.layers
        if not one.changed
        and len(one.shape) == 2
        and "Embedding" not in one.kind
        and not one.reason.startswith(SHARED)
    )
    reasons = (SHAPE.sub("", without_groups(one.reason.partition(PYTHON_ADVICE)[0])) for one in kept)
    return dict(Counter(reasons).most_common())
