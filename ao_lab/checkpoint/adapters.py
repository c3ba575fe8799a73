"""Adapters of `QATConfig(lora=LoRA(...))` as folders of PEFT: written for everyone, read back to go on with training.

A folder has `adapter_config.json` and `adapter_model.safetensors` with PEFT's names (`base_model.model.NAME.lora_A.weight`), so
`peft.PeftModel.from_pretrained(base, folder)`, transformers' `load_adapter` and servers that take LoRA read it without this
library. PEFT computes y = W x + (alpha / rank) B (A x) on the base that it is given, as layers here do: on the quantized
weights that the adapters were trained beside these are the same outputs (but for the order of float sums), on the dense weights
those of the dense sum. The metadata of the safetensors file names the quantization of each layer, which readers of PEFT ignore.
"""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from math import isclose, sqrt
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ao_lab.checkpoint.io.files import page, refuse_file, save_file, staged, without
from ao_lab.checkpoint.io.markdown import base_name, span
from ao_lab.checkpoint.io.patterns import compiled
from ao_lab.checkpoint.io.strict_json import parsed_object, read_object
from ao_lab.checkpoint.model_card import CARD, WRITTEN, is_ours
from ao_lab.checkpoint.save_checks import PREFIXES, unwrapped
from ao_lab.install.versions import __version__
from ao_lab.qat.layers import ADAPTERS
from ao_lab.qat.lora import LoRALinear, LoRASumLinear
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.transforms.layers import check_model, shorten

LOG = logging.getLogger(__name__)

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
#: The key of the safetensors file's metadata that holds, as JSON, what each layer with an adapter multiplies with.
KEY = "ao_lab"
#: What PEFT puts before the names of a model's modules, and what it calls the parts.
PREFIX = "base_model.model."
PARTS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}
#: PEFT's name of the task by the end of a model's class.
TASKS = {
    "ForCausalLM": "CAUSAL_LM", "ForConditionalGeneration": "SEQ_2_SEQ_LM", "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS", "ForQuestionAnswering": "QUESTION_ANS",
}  # fmt: skip

Layers = dict[str, LoRALinear | LoRASumLinear]


def save_adapter(
    model: nn.Module, directory: str | Path, *, base_model: str | None = None
) -> tuple[Path, ...]:
    """Write the adapters of a model prepared by `QATConfig(..., lora=LoRA(...))` as a folder of PEFT; returns the files.

    `adapter_config.json` has r, lora_alpha, lora_dropout and target_modules (rank_pattern and alpha_pattern where layers
    differ), `adapter_model.safetensors` the matrices A (rank, in) and B (out, rank) in the dtype that they train in, README.md
    the schemes of the weights beside which they trained, unless somebody else's is there. The model stays as it is.
    base_model: what adapter_config.json calls the base. Default: where transformers loaded the model from.

    Whoever loads it should load the base quantized in the same way: `quantize_(model, config)` of the same weights, or a folder
    that `ao_lab.save_pretrained` wrote of it. With `LoRA(rounds="sum")` the sum of weight and adapter is what was rounded in
    training: merge the adapter into the dense weights (PEFT's `merge_and_unload`) and quantize these.

    ValueError where the model has no adapters, for sharded adapters (FSDP2), for one layer in several places, and where other
    parameters train too (`LoRA(freeze_rest=False)`), which such a folder does not hold. Nothing has been written then; if
    writing fails (OSError), earlier files of the folder are unchanged.
    """
    check_model(model)
    model, folder = unwrapped(model), Path(directory)
    refuse_file(folder)
    layers = adapted(model)
    if not layers:
        raise ValueError(
            "save_adapter: the model has no adapters of QATConfig(..., lora=LoRA(...)); those of peft are saved by its own "
            "save_pretrained, and step='convert' has merged ours into the weights"
        )
    _check_whole(model, layers)
    _check_apart(model, layers)
    config = adapter_config(model, layers, base_model)
    tensors = {
        f"{PREFIX}{name}.{PARTS[part]}": getattr(layer, part).detach().cpu().contiguous()
        for name, layer in layers.items()
        for part in ADAPTERS
    }
    folder.mkdir(parents=True, exist_ok=True)
    writes_card = not (folder / CARD).is_file() or is_ours(page(folder / CARD) or "")
    with staged(folder) as place:
        save_file(tensors, place / WEIGHTS, {"format": "pt", KEY: json.dumps(multiplied(layers))})
        (place / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if writes_card:
            (place / CARD).write_text(adapter_card(config, layers), encoding="utf-8")
    LOG.info("saved %s: adapters of %d layers", folder, len(layers))
    return folder / CONFIG, folder / WEIGHTS, *[folder / CARD] * writes_card


def adapter_card(config: Mapping[str, Any], layers: Layers) -> str:
    """README.md of a folder of adapters: the base model, and by which schemes its weights were quantized in training."""
    base = config["base_model_name_or_path"]
    called = span(base_name(base)) if base else "a base model without a name"
    layers_of: dict[str, list[str]] = {}
    for name, recipe in multiplied(layers).items():
        layers_of.setdefault(recipe, []).append(name)
    beside = "\n".join(
        f"- {span(recipe)}: {len(names)} layer{'s' * (len(names) > 1)} ({kinds_of(names)})"
        for recipe, names in layers_of.items()
    )
    return (
        f"# LoRA adapters for {called}\n\nTrained with ao_lab beside weights of {called} in:\n\n{beside}\n\n"
        "adapter_config.json names the base model alone, and PEFT loads the adapters beside its weights as they are there, "
        "without a warning where these are not quantized so. Beside other weights outputs differ from those in training: "
        "quantize the base by the same configuration first, or load the folder into which it was saved so.\n\n"
        f"{WRITTEN}{__version__}.\n"
    )


def kinds_of(names: Iterable[str]) -> str:
    """The last parts of layers' names, each once."""
    return ", ".join(span(end) for end in sorted({name.rpartition(".")[2] for name in names}))


def adapted(model: nn.Module) -> Layers:
    """The layers with adapters, by the names that they have without wrappers around modules inside."""
    return {
        ".".join(part for part in path.split(".") if part not in PREFIXES): layer
        for path, layer in model.named_modules()
        if isinstance(layer, (LoRALinear, LoRASumLinear))
    }


def _check_whole(model: nn.Module, layers: Layers) -> None:
    """ValueError for what a folder of adapters could not hold, or not as it trains."""
    if "" in layers:
        raise ValueError("save_adapter: the model is one layer, and PEFT names layers inside of a model")
    sharded = [name for name, layer in layers.items() if hasattr(layer.lora_a, "full_tensor")]
    if sharded:
        raise ValueError(
            f"save_adapter: adapters of {shorten(sharded)} are sharded; gather them on all ranks "
            "(torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict=True), load that into a "
            "prepared model that is not sharded, and save this one"
        )
    own = {id(getattr(layer, part)) for layer in layers.values() for part in ADAPTERS}
    others = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in own]
    if others:
        raise ValueError(
            f"save_adapter: {shorten(others)} train too, and a folder of adapters does not hold them; prepare with "
            "LoRA(freeze_rest=True), or freeze them if they have not changed, or save the whole model (model.save_pretrained)"
        )


def _check_apart(model: nn.Module, layers: Layers) -> None:
    """ValueError for a layer that is called by several names: PEFT would put an adapter into the first place alone."""
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    shared = [name for name, layer in layers.items() if places[id(layer)] > 1]
    if shared:
        raise ValueError(
            f"save_adapter: in this model {shorten(shared)} stand in several places, and PEFT puts an adapter into the first "
            "alone, which is another model; save the whole model (model.save_pretrained, or torch.save of its state_dict)"
        )


def adapter_config(model: nn.Module, layers: Layers, base_model: str | None) -> dict[str, Any]:
    """PEFT's description of adapters."""
    ranks = {name: layer.lora.rank for name, layer in layers.items()}
    alphas = {name: _number(layer.lora.alpha or 2 * layer.lora.rank) for name, layer in layers.items()}
    rank, alpha = _usual(ranks.values()), _usual(alphas.values())
    name = base_model or str(getattr(getattr(model, "config", None), "_name_or_path", None) or "") or None
    return {
        "peft_type": "LORA",
        "task_type": next((task for end, task in TASKS.items() if type(model).__name__.endswith(end)), None),
        "base_model_name_or_path": name,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": _usual(layer.lora.dropout for layer in layers.values()),
        "target_modules": target_modules(model, layers),
        "rank_pattern": {pattern_of(name, layers): one for name, one in ranks.items() if one != rank},
        "alpha_pattern": {pattern_of(name, layers): one for name, one in alphas.items() if one != alpha},
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }


def _usual(values: Iterable[Any]) -> Any:
    """The value of most layers."""
    return Counter(values).most_common(1)[0][0]


def _number(value: float) -> float | int:
    return int(value) if value == int(value) else value


#: Of a pattern of ranks PEFT takes the first that is the end of a name, as a regular expression.
AT_END = r"(.*\.)?({})$"


def pattern_of(name: str, names: Iterable[str]) -> str:
    """What PEFT finds a layer by: its name, where that is the end of no other layer's; else an expression of it alone."""
    plain = re.fullmatch(r"[\w.]+", name) is not None
    found = [one for one in names if plain and re.match(AT_END.format(name), one)]
    return name if found == [name] else f"^{re.escape(name)}"


def target_modules(model: nn.Module, layers: Layers) -> list[str] | str:
    """Last parts of names (`q_proj`), as PEFT's own folders have them, where these mean no other module; else whole names, or
    an expression of them where one is the end of another module's name."""
    ends = {name.rpartition(".")[2] for name in layers}
    paths = [path for path, _ in model.named_modules()]
    if sum(path.rpartition(".")[2] in ends for path in paths) == len(layers):
        return sorted(ends)
    others = [path for path in paths if path not in layers]
    if any(path.endswith(f".{name}") for path in others for name in layers):
        return "|".join(map(re.escape, sorted(layers)))
    return sorted(layers)


def multiplied(layers: Layers) -> dict[str, str]:
    """What the layers multiply with beside their adapters: the recipe of the quantized weight, in words."""
    return {name: recipe_of(layer) for name, layer in layers.items()}


def recipe_of(layer: LoRALinear | LoRASumLinear) -> str:
    """The recipe of a layer with an adapter; of rounds="sum" with that said."""
    if isinstance(layer, LoRASumLinear):
        return f"{layer.qat.recipe}, the sum is rounded"
    weight: Any = layer.weight
    held = getattr(weight, "_local_tensor", weight)
    return str(held.recipe) if isinstance(held, QuantizedTensor) else str(held.dtype)


def load_adapter(model: nn.Module, directory: str | Path) -> tuple[str, ...]:
    """Copy a folder of adapters into a model prepared by the same `QATConfig(..., lora=LoRA(...))`, to go on with training;
    returns the names of its layers.

    Folders of `save_adapter`, and those of PEFT whose adapters are of the same layers, rank and alpha / r. Values are rounded
    to the dtype of the model's adapters. A UserWarning where `save_adapter` wrote it beside weights that were quantized in
    another way.

    FileNotFoundError for a folder without adapters; ValueError where layers, shapes, alpha / r or the kind of adapter (DoRA,
    biases, PiSSA and others that change the base) differ, and for a model whose adapters are sharded or on meta. The model is
    unchanged then.
    """
    check_model(model)
    layers, folder = adapted(unwrapped(model)), Path(directory)
    if not layers:
        raise ValueError(
            "load_adapter: the model has no adapters; call quantize_(model, QATConfig(config, lora=LoRA(...))) first, or load "
            "the folder by peft.PeftModel.from_pretrained"
        )
    _check_held(layers)
    if not (folder / WEIGHTS).is_file() or not (folder / CONFIG).is_file():
        raise FileNotFoundError(without(folder, f"no {CONFIG} with {WEIGHTS}", "save_adapter or peft"))
    config = read_object(folder / CONFIG)
    _check_kind(config, folder)
    _check_factors(config, layers, folder)
    tensors, told = _read(folder / WEIGHTS)
    places = {
        f"{PREFIX}{name}.{PARTS[part]}": getattr(layer, part)
        for name, layer in layers.items()
        for part in ADAPTERS
    }
    _check_tensors(tensors, places, folder)
    with torch.no_grad():
        for name, place in places.items():
            place.copy_(tensors[name])
    _warn_of_other_weights(told, layers, folder)
    return tuple(layers)


def _read(path: Path) -> tuple[dict[str, torch.Tensor], str | None]:
    """The tensors of a file and what its metadata has under `KEY`; ValueError where it is no safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
            return tensors, (file.metadata() or {}).get(KEY)
    except SafetensorError as error:
        raise ValueError(
            f"{path} is no safetensors file, or an incomplete one: {error}; fetch it again"
        ) from error


def _check_held(layers: Layers) -> None:
    """ValueError for adapters that no value of a file can be copied to as it is."""
    for name, layer in layers.items():
        if hasattr(layer.lora_a, "full_tensor") or layer.lora_a.is_meta:
            where = "on meta, without values" if layer.lora_a.is_meta else "sharded"
            raise ValueError(
                f"load_adapter: the adapters of {name} are {where}; load them into a prepared model that is whole and on a "
                "device, and shard it afterwards"
            )


#: Beginnings of adapters (PEFT's init_lora_weights) that change the base's weights too, which a folder of adapters lacks.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def _check_kind(config: Mapping[str, Any], folder: Path) -> None:
    """ValueError for adapters of another kind, or of another base."""
    kind = str(config.get("peft_type"))
    others = [name for name in ("use_dora", "lora_bias", "alora_invocation_tokens") if config.get(name)]
    if kind != "LORA" or others:
        raise ValueError(
            f"{folder}: adapters of peft_type {kind}{''.join(f', {name}' for name in others)}; load_adapter takes plain LoRA: "
            "load them by peft.PeftModel.from_pretrained"
        )
    begin = str(config.get("init_lora_weights"))
    if begin.lower().startswith(CHANGES_BASE):
        raise ValueError(
            f"{folder}: adapters that began as {begin}, which changed the weights of the base too; load_adapter takes those of "
            "an unchanged base: load them by peft.PeftModel.from_pretrained, or have PEFT convert them "
            "(save_pretrained with path_initial_model_for_weight_conversion)"
        )


def _check_factors(config: Mapping[str, Any], layers: Layers, folder: Path) -> None:
    """ValueError for a layer of another rank, or of another factor."""
    for name, layer in layers.items():
        rank = _of_layer(config, name, "rank_pattern", "r")
        alpha = _of_layer(config, name, "alpha_pattern", "lora_alpha")
        factor = alpha / (sqrt(rank) if config.get("use_rslora") else rank)
        # As far as alpha / rank is rounded itself.
        if rank != layer.lora.rank or not isclose(factor, layer.lora.factor, rel_tol=1e-12):
            raise ValueError(
                f"{folder}: {name} has rank {rank:g} and alpha / rank {factor:g}, in the model rank {layer.lora.rank} and "
                f"{layer.lora.factor:g}; prepare the model with LoRA({rank:g}, alpha={_number(factor * rank)})"
            )


def _of_layer(config: Mapping[str, Any], name: str, pattern: str, usual: str) -> float:
    """A number of a layer, by the first pattern that PEFT takes; ValueError where the file holds none that a layer can have."""
    patterns = config.get(pattern) or {}
    if not isinstance(patterns, dict):
        raise ValueError(f"{CONFIG}: {pattern} is an object of names and numbers, got {patterns!r}")
    found = next((key for key in patterns if compiled(AT_END.format(key)).matches(name)), None)
    value = config.get(usual) if found is None else patterns[found]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"{CONFIG}: {usual} of {name} is a positive number, got {value!r}")
    return value


def _check_tensors(
    tensors: Mapping[str, torch.Tensor], places: Mapping[str, torch.Tensor], folder: Path
) -> None:
    """ValueError for names and shapes that are not those of the model's adapters."""
    told = {"lacks": places.keys() - tensors.keys(), "has": tensors.keys() - places.keys()}
    if said := [f"{what} {shorten(sorted(names), 3)}" for what, names in told.items() if names]:
        raise ValueError(
            f"{folder} {' and '.join(said)}: its adapters are of other layers than the model's; prepare the model with the "
            "configuration and the filter_fn that it was trained with"
        )
    for name, place in places.items():
        if tensors[name].shape != place.shape:
            raise ValueError(
                f"{folder}: {name} has shape {tuple(tensors[name].shape)}, the model's adapter {tuple(place.shape)}; the base "
                "is another model, or the rank is another"
            )


def _warn_of_other_weights(told: str | None, layers: Layers, folder: Path) -> None:
    """A UserWarning where adapters were trained beside weights that were quantized otherwise."""
    if told is None:
        return
    saved, now = parsed_object(told, f"{folder / WEIGHTS}"), multiplied(layers)
    differ = [name for name, recipe in now.items() if saved.get(name, recipe) != recipe]
    if differ:
        warnings.warn(
            f"{folder}: the adapters were trained on weights quantized as {saved[differ[0]]}, and this model has "
            f"{now[differ[0]]} ({shorten(differ, 3)})",
            UserWarning,
            stacklevel=3,
        )


__all__ = ["load_adapter", "save_adapter"]
