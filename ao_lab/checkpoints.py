"""`save_pretrained` and `load_pretrained`: quantized models as safetensors and config.json, without pickled classes.

Two layouts. "compressed-tensors": every weight in a format that transformers, vLLM and SGLang read (`ao_lab.exports`), equal to
`dequantize` bit for bit in bfloat16. "ao_lab": every part of every weight as a tensor of its own, NAME.codes, NAME.scale and
so on, as `reference.quantize` makes them, for all schemes, embeddings and experts. "auto" takes the first where it can say
everything, and says why where it cannot.

In both, the metadata of the safetensors files holds, for each quantized weight, its whole record as JSON ("ao_lab"), so that
`load_pretrained` gives back the same codes, scales and recipe; weights that modules share are stored once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ao_lab.checkpoint_files import Folder, look_at, write_files
from ao_lab.checkpoint_models import CONFIG, QUANTIZATION, built, check_kinds, check_state, fill
from ao_lab.checkpoint_records import KEY, Records, read_records, whole_weights
from ao_lab.export_config import check_groups, quantization_config
from ao_lab.exports import written
from ao_lab.recipes import Recipe
from ao_lab.strict_json import read_object, shown
from ao_lab.tensor import QuantizedTensor
from ao_lab.tensor_meta import PARTS, described
from reference.errors import choice

LAYOUTS = ("auto", "compressed-tensors", "ao_lab")
OURS = {"quant_method": "ao_lab", "version": 1}
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Saved:
    """What `save_pretrained` wrote: the layout, the files, their bytes, and what kept it from compressed-tensors."""

    layout: str
    files: tuple[Path, ...]
    bytes: int
    reasons: tuple[str, ...] = ()


@dataclass
class Stored:
    """Tensors by name, the records of quantized weights among them, and the configuration."""

    tensors: Tensors = field(default_factory=dict)
    #: By the weight's name: the place of its description, its shape, and where it lies.
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: Names of one and the same tensor: the other name of each.
    shared: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    #: Descriptions as JSON, once each, and their places in the list of them.
    recipes: dict[str, int] = field(default_factory=dict)
    #: dtypes of the tensors that are not quantized.
    dense: dict[str, str] = field(default_factory=dict)

    def record(self, name: str, t: QuantizedTensor, **fields: Any) -> None:
        """What is to be known of a quantized weight; its description, which many share, by its place."""
        place = self.recipes.setdefault(json.dumps(described(t.meta)), len(self.recipes))
        self.records[name] = {"recipe": place, "shape": list(t.shape), **fields}

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """A tensor as it is."""
        self.tensors[name] = tensor
        self.dense[name] = str(tensor.dtype).removeprefix("torch.")


def save_pretrained(
    model: nn.Module,
    directory: str | Path,
    *,
    layout: str = "auto",
    config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> Saved:
    """Write a quantized model to a folder: model.safetensors (in shards above `max_shard_bytes`) and config.json.

    `config`: the model's own configuration, by default `model.config` as transformers' models have it. The tokenizer is the
    caller's. ValueError for a model without quantized weights, and where layout="compressed-tensors" cannot say them.
    """
    choice(layout, LAYOUTS, "layout")
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes is at least 1, got {max_shard_bytes}")
    if not any(isinstance(p, QuantizedTensor) for p in model.parameters()):
        raise ValueError("the model has no quantized weights; call quantize_ first")
    if empty := [name for name, value in model.state_dict(keep_vars=True).items() if value.is_meta]:
        raise ValueError(f"{empty[:5]} are on the meta device, without numbers; load them first")
    reasons: list[str] = []
    stored = None if layout == "ao_lab" else _compressed(model, reasons)
    if stored is None and layout == "compressed-tensors":
        raise ValueError("compressed-tensors cannot hold this model: " + "; ".join(reasons[:5]))
    used = "compressed-tensors" if stored is not None else "ao_lab"
    stored = stored if stored is not None else _own(model)
    given = dict(config) if config is not None else _config_of(model)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    recipes = [json.loads(text) for text in stored.recipes]
    records = {"recipes": recipes, "weights": stored.records, "shared": stored.shared, "dense": stored.dense}
    metadata = {"format": "pt", KEY: json.dumps(records)}
    files = write_files(folder, stored.tensors, metadata, max_shard_bytes)
    text = json.dumps({**given, QUANTIZATION: stored.config}, indent=2, default=str) + "\n"
    (folder / CONFIG).write_text(text)
    return Saved(used, (*files, folder / CONFIG), sum(file.stat().st_size for file in files), tuple(reasons))


def load_pretrained(
    directory: str | Path, model: nn.Module | None = None, *, dtype: torch.dtype | None = None
) -> nn.Module:
    """The model of a folder that `save_pretrained` wrote, its weights quantized as they were; or of torchao's safetensors.

    `model`: where the weights go, a model of the same structure; without it transformers builds the one that config.json
    describes: of the class that it names, or else a language model. `dtype`: what floating-point numbers become, and in what
    quantized weights compute; None: as they were saved.

    Files, records, configuration and shapes are compared with each other before a tensor is read, and the model is changed at
    the very end, all of it or nothing. ValueError that names the file and the rule where something does not fit, or where no
    record says what the tensors mean; FileNotFoundError where files are missing. Nothing is executed.
    """
    folder = look_at(Path(directory))
    records = records_of(folder)
    _check_configuration(folder.path, records)
    shapes = records.shapes(folder)
    target = model if model is not None else built(folder.path, shapes, dtype)
    check_state(target, shapes, str(folder.path))
    check_kinds(target, {name: folder.specs[name] for name in records.dense}, str(folder.path))
    state = whole_weights(folder, records)
    if dtype is not None:
        state = {
            name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()
        }
    fill(target, state)
    return target


def records_of(folder: Folder) -> Records:
    """What the metadata of a folder says of its tensors, ours or torchao's; ValueError where it says nothing."""
    if KEY in folder.metadata:
        return read_records(folder)
    from ao_lab.torchao_files import TORCHAO_KEY, read_torchao_records

    if TORCHAO_KEY in folder.metadata:
        return read_torchao_records(folder)
    raise ValueError(
        f"{folder.path} holds no records of ao_lab; transformers' from_pretrained reads folders of other writers"
    )


def _check_configuration(path: Path, records: Records) -> None:
    """config.json, where there is one, says the same of quantized weights as the records do."""
    if not (path / CONFIG).exists():
        return
    given = read_object(path / CONFIG, nonfinite=True).get(QUANTIZATION)
    if given is None:
        return
    where = f"{QUANTIZATION} of {path / CONFIG}"
    if not isinstance(given, dict):
        raise ValueError(f"{where} is an object, got {shown(given)}; fetch it again")
    methods = {weight.method for weight in records.weights.values()}
    method = given.get("quant_method")
    if not isinstance(method, str) or (methods and methods != {method}):
        raise ValueError(
            f"{where}: quant_method is {shown(method)}, the files hold {', '.join(sorted(methods))}; fetch it again"
        )
    if method == OURS["quant_method"] and given.get("version") != OURS["version"]:
        raise ValueError(
            f"{where}: version is {OURS['version']}, got {shown(given.get('version'))}; install another ao_lab"
        )
    if method == "compressed-tensors":
        check_groups(given, [(w.format, w.meta.recipe) for w in records.weights.values()], where)


def _compressed(model: nn.Module, reasons: list[str]) -> Stored | None:
    """The model in compressed-tensors' formats; None, with reasons, where something does not fit."""
    stored = Stored()
    layers: dict[str, tuple[str, Recipe, bool]] = {}
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    state = _state(model, stored)
    if is_untied(model):
        # Where the table and the head are no longer one, readers tie nothing else either: a bias of theirs, for instance.
        parted = [name for name, one in stored.shared.items() if not isinstance(state[one], QuantizedTensor)]
        state.update({name: state[stored.shared.pop(name)] for name in parted})
    for name, value in state.items():
        path = name.removesuffix(".weight")
        if not isinstance(value, QuantizedTensor):
            stored.keep(name, value)
            continue
        try:
            if path not in linears or path == name:
                raise ValueError(f"{name} is no weight of nn.Linear")
            fmt, tensors = written(value)
        except ValueError as error:
            reasons.append(str(error))
            continue
        layers[path] = (fmt, value.recipe, value.input_scale is not None)
        stored.tensors.update({f"{path}.{key}": tensor for key, tensor in tensors.items()})
        outer = None if value.outer is None else value.outer.item()
        stored.record(name, value, format=fmt, parts=list(tensors), outer=outer)
    if reasons:
        return None
    try:
        stored.config = quantization_config(layers, sorted(linears - set(layers)))
    except ValueError as error:
        reasons.append(str(error))
        return None
    return stored


def _own(model: nn.Module) -> Stored:
    """The model in our layout."""
    stored = Stored(config=OURS)
    for name, value in _state(model, stored).items():
        if not isinstance(value, QuantizedTensor):
            stored.keep(name, value)
            continue
        parts = {part: getattr(value, part) for part in PARTS if getattr(value, part) is not None}
        stored.tensors.update({f"{name}.{part}": tensor for part, tensor in parts.items()})
        stored.record(name, value, format="ao_lab", parts=list(parts))
    return stored


def _state(model: nn.Module, stored: Stored) -> Tensors:
    """The model's state, each tensor once; the other names of shared ones go to `stored.shared`."""
    seen: dict[Any, str] = {}
    state: Tensors = {}
    for name, value in model.state_dict(keep_vars=True).items():
        key = _place(value) if value.numel() else name
        if key in seen:
            stored.shared[name] = seen[key]
        else:
            seen[key] = name
            state[name] = value.detach()
    return state


def _place(value: torch.Tensor) -> tuple[Any, ...]:
    """What two names of one tensor have in common: memory, and how it is read."""
    if isinstance(value, QuantizedTensor):
        return value.meta, *(None if part is None else _place(part) for part in value.parts.values())
    return value.data_ptr(), tuple(value.shape), value.stride(), value.dtype


def _config_of(model: nn.Module) -> dict[str, Any]:
    """The configuration of a transformers model, as its save_pretrained would write it; {} for others."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return {}
    made: dict[str, Any] = config.to_dict()
    made["architectures"] = [type(model).__name__]
    made["dtype"] = str(model.dtype).removeprefix("torch.")
    return {**made, "tie_word_embeddings": False} if is_untied(model) else made


def is_untied(model: nn.Module) -> bool:
    """Whether a transformers model has a table and a head with weights of their own; quantizing one of two parts them."""
    if not hasattr(model, "get_output_embeddings"):
        return False
    try:
        head, table = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
    except NotImplementedError:  # a model without a table (Wav2Vec2)
        return False
    return head is not None and table is not None and head.weight is not table.weight


__all__ = ["Saved", "load_pretrained", "records_of", "save_pretrained"]
