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

from ao_lab.checkpoint_files import Files, read_files, write_files
from ao_lab.export_config import quantization_config
from ao_lab.exports import EXPORTS, written
from ao_lab.recipes import Recipe
from ao_lab.tensor import QuantizedTensor, from_quantized
from ao_lab.tensor_meta import PARTS, described, meta_from
from reference.errors import choice

LAYOUTS = ("auto", "compressed-tensors", "ao_lab")
CONFIG, QUANTIZATION = "config.json", "quantization_config"
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
    #: By the weight's name: `described`, its shape, and where it lies.
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: Names of one and the same tensor: the other name of each.
    shared: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


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
    if not any(isinstance(p, QuantizedTensor) for p in model.parameters()):
        raise ValueError("the model has no quantized weights; call quantize_ first")
    reasons: list[str] = []
    stored = None if layout == "ao_lab" else _compressed(model, reasons)
    if stored is None and layout == "compressed-tensors":
        raise ValueError("compressed-tensors cannot hold this model: " + "; ".join(reasons[:5]))
    used = "compressed-tensors" if stored is not None else "ao_lab"
    stored = stored if stored is not None else _own(model)
    given = dict(config) if config is not None else _config_of(model)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt", "ao_lab": json.dumps({"weights": stored.records, "shared": stored.shared})}
    files = write_files(folder, stored.tensors, metadata, max_shard_bytes)
    text = json.dumps({**given, QUANTIZATION: stored.config}, indent=2, default=str) + "\n"
    (folder / CONFIG).write_text(text)
    return Saved(used, (*files, folder / CONFIG), sum(file.stat().st_size for file in files), tuple(reasons))


def load_pretrained(
    directory: str | Path, model: nn.Module | None = None, *, dtype: torch.dtype | None = None
) -> nn.Module:
    """The model of a folder that `save_pretrained` wrote, its weights quantized as they were.

    `model`: where the weights go, a model of the same structure; without it transformers builds the one that config.json
    describes, in `dtype`. ValueError where names or shapes do not fit, or where no record says what the tensors mean.
    """
    folder = Path(directory)
    files = read_files(folder)
    if "ao_lab" not in files.metadata:
        raise ValueError(
            f"{folder} holds no records of ao_lab; transformers' from_pretrained reads folders of other writers"
        )
    header = json.loads(files.metadata["ao_lab"])
    state = loaded_state(files, header["weights"])
    for name, other in header["shared"].items():
        state[name] = state[other]
    target = model if model is not None else _built(folder, dtype)
    _fill(target, state)
    return target


def loaded_state(files: Files, records: Mapping[str, dict[str, Any]]) -> Tensors:
    """All tensors of a folder by the names of the model, quantized ones whole."""
    tensors = dict(files.tensors)
    made: Tensors = {name: _whole(name, record, tensors) for name, record in records.items()}
    return {**tensors, **made}


def _whole(name: str, record: dict[str, Any], tensors: Tensors) -> QuantizedTensor:
    """One quantized weight; the tensors that it is made of are taken out."""
    meta, shape = meta_from(record), tuple(record["shape"])
    if record["format"] == "ao_lab":
        return QuantizedTensor({part: tensors.pop(f"{name}.{part}") for part in record["parts"]}, meta, shape)
    export = next(export for export in EXPORTS if export.name == record["format"])
    path = name.removesuffix("weight")
    found = {key: tensors.pop(path + key) for key in record["parts"]}
    q = export.read(found, meta.recipe.weight, shape)
    parts = from_quantized(q, meta.recipe, meta.dtype).parts
    if record["outer"] is not None:
        parts["outer"] = torch.tensor(record["outer"], dtype=torch.float32)
    for part, key in (("input_scale", "input_scale"), ("input_zero", "input_zero_point")):
        parts[part] = found[key].reshape(()) if key in found else None
    return QuantizedTensor(parts, meta, shape)


def _compressed(model: nn.Module, reasons: list[str]) -> Stored | None:
    """The model in compressed-tensors' formats; None, with reasons, where something does not fit."""
    stored = Stored()
    layers: dict[str, tuple[str, Recipe, bool]] = {}
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name, value in _state(model, stored).items():
        path = name.removesuffix(".weight")
        if not isinstance(value, QuantizedTensor):
            stored.tensors[name] = value
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
        stored.records[name] = _record(value, format=fmt, parts=list(tensors), outer=outer)
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
            stored.tensors[name] = value
            continue
        parts = {part: getattr(value, part) for part in PARTS if getattr(value, part) is not None}
        stored.tensors.update({f"{name}.{part}": tensor for part, tensor in parts.items()})
        stored.records[name] = _record(value, format="ao_lab", parts=list(parts))
    return stored


def _record(t: QuantizedTensor, **fields: Any) -> dict[str, Any]:
    return {**described(t.meta), "shape": list(t.shape), **fields}


def _state(model: nn.Module, stored: Stored) -> Tensors:
    """The model's state, each tensor once; the other names of shared ones go to `stored.shared`."""
    seen: dict[Any, str] = {}
    state: Tensors = {}
    for name, value in model.state_dict(keep_vars=True).items():
        plain = value.codes if isinstance(value, QuantizedTensor) else value
        key = (plain.data_ptr(), tuple(plain.shape), plain.stride(), plain.dtype) if plain.numel() else name
        if key in seen:
            stored.shared[name] = seen[key]
        else:
            seen[key] = name
            state[name] = value.detach()
    return state


def _config_of(model: nn.Module) -> dict[str, Any]:
    """The configuration of a transformers model, as its save_pretrained would write it; {} for others."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return {}
    made: dict[str, Any] = config.to_dict()
    made["architectures"] = made.get("architectures") or [type(model).__name__]
    try:
        head, table = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
    except NotImplementedError:  # a model without a table (Wav2Vec2)
        return made
    if head is not None and table is not None and head.weight is not table.weight:
        # Quantizing one of two shared weights parts them.
        made["tie_word_embeddings"] = False
    return made


def _built(folder: Path, dtype: torch.dtype | None) -> nn.Module:
    """An empty model of the folder's configuration, by transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = json.loads((folder / CONFIG).read_text())
    fields.pop(QUANTIZATION)
    if "model_type" not in fields:
        raise ValueError(
            f"{folder / CONFIG} describes no model of transformers; give load_pretrained a model to fill"
        )
    config = AutoConfig.for_model(**fields)
    build: Any = AutoModelForCausalLM.from_config
    made: nn.Module = build(config, dtype=dtype or config.dtype or torch.float32)
    return made.eval()


def _fill(model: nn.Module, state: Tensors) -> None:
    """Give every parameter and buffer of the model its tensor; ValueError where names or shapes do not fit."""
    expected = dict(model.state_dict(keep_vars=True))
    missing, unknown = sorted(set(expected) - set(state)), sorted(set(state) - set(expected))
    if missing or unknown:
        raise ValueError(f"the folder lacks {missing[:5]} and has {unknown[:5]}, which the model lacks")
    for name, value in state.items():
        if value.shape != expected[name].shape:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}, the model's {tuple(expected[name].shape)}"
            )
    parameters: dict[int, nn.Parameter] = {}
    for name, value in state.items():
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        if leaf in owner._buffers:
            owner._buffers[leaf] = value
        else:
            old = expected[name]
            trains = old.requires_grad and not isinstance(value, QuantizedTensor)
            owner._parameters[leaf] = parameters.setdefault(
                id(value), nn.Parameter(value, requires_grad=trains)
            )


__all__ = ["Saved", "load_pretrained", "loaded_state", "save_pretrained"]
