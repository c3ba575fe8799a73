"""`save_pretrained` and `load_pretrained`: quantized models as safetensors and config.json, without pickled classes.

Two layouts. "compressed-tensors": every weight in a format that transformers, vLLM and SGLang read
(`ao_lab.checkpoint.export`), its values and how inputs are quantized bit for bit. "ao_lab": every part of every weight as a
tensor of its own, NAME.codes, NAME.scale and so on, as `reference.quantize` makes them, for all schemes, embeddings and
experts; transformers reads it after `import ao_lab`. "auto" takes the first where a plain `from_pretrained(folder)`, and
vLLM's reading of scales in the model's dtype, compute the same model, and otherwise the second, with a UserWarning that says
why and what to do. `config.for_layout("compressed-tensors")` makes the first kind.

In both, the metadata of the safetensors files holds, for each quantized weight, its whole record as JSON ("ao_lab"), so that
`load_pretrained` gives back the same codes, scales and recipe; weights that modules share are stored once.

Of our own layout `config.json` says quant_method "ao_lab". transformers skips a method that it does not know, and would go
on with random weights where it finds none under the names that it expects. Two things prevent that: the weights are not in
model.safetensors (`ao_lab.checkpoint.io.shards.OWN`), and "transformers_weights", the field that names the file of weights,
holds a sentence, which transformers refuses and shows; after `import ao_lab` our quantizer puts the file's name there.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ao_lab.checkpoint.card_origin import history_of
from ao_lab.checkpoint.configuration import (
    OURS,
    configuration_of,
    file_of_weights,
    stem_of,
    whole_configuration,
)
from ao_lab.checkpoint.experts import TARGET, converted, ignored, published
from ao_lab.checkpoint.export import check_groups, quantization_config
from ao_lab.checkpoint.formats import quantization_of, records_of, tell
from ao_lab.checkpoint.io.files import refuse_file, refuse_folders, staged
from ao_lab.checkpoint.io.shards import (
    Tensors,
    has_weights,
    look_at,
    remove_others,
    weight_paths,
    write_files,
)
from ao_lab.checkpoint.io.strict_json import check_scheme_fields, shown
from ao_lab.checkpoint.model_builder import (
    CONFIG,
    QUANTIZATION,
    SETTINGS,
    built,
    check_kinds,
    check_state,
    fill,
    heads,
    planned_model,
    read_config,
    read_settings,
    settings_text,
)
from ao_lab.checkpoint.model_card import CARD, card_beside
from ao_lab.checkpoint.plain_readers import (
    FIELD,
    FLOAT32_SCALES,
    Reading,
    decoded_in_bfloat16,
    fallback_note,
    flat_inputs,
    grouped,
    is_adaptable,
    reading,
    refusal,
    unsupported_reasons,
    with_dequantizing,
    with_own_scales,
    with_row_groups,
)
from ao_lab.checkpoint.records import KEY, Records, Stored, taken_scales, whole_weights, without_spare_biases
from ao_lab.checkpoint.save_checks import check_finished, check_quantized, unwrapped
from ao_lab.config.recipe import Recipe
from ao_lab.kv_cache import KV_CACHE
from ao_lab.kv_cache.static_scales import cache_scheme_fields, cache_tensors, remember_scales
from ao_lab.quantization.plan import group_of
from ao_lab.tensor.metadata import PRESHUFFLED
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.transforms.layers import check_model, is_untied, rounded_buffers, shorten
from ao_lab.transforms.low_rank import unplaced_residuals, with_residuals
from ao_lab.transforms.training_records import write_training
from reference.arrays.namespace import choice

LOG = logging.getLogger(__name__)

LAYOUTS = ("auto", "compressed-tensors", "ao_lab")


@dataclass(frozen=True)
class Saved:
    """What `save_pretrained` wrote: the layout, the files, their bytes, why it is not compressed-tensors, limits for those
    who load the folder without this library, and the bits of a quantized weight in the files, scales and zero points
    included."""

    layout: str
    files: tuple[Path, ...]
    bytes: int
    reasons: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    bits: float = 0.0

    def __str__(self) -> str:
        """The folder, the layout, and each reason once, with the first weight that it is of and how many."""
        folder = self.files[0].parent if self.files else ""
        size = f"weights {self.bytes / 1e6:,.3f} MB, {self.bits:.4g} bits per quantized weight"
        head = f"{folder}: layout {self.layout}, {len(self.files)} files, {size}"
        told = [f"  not compressed-tensors: {one}" for one in grouped(self.reasons)]
        return "\n".join([head, *told, *(f"  {one}" for one in self.limits)])


def save_pretrained(
    model: nn.Module,
    directory: str | Path,
    *,
    layout: str = "auto",
    config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 5 * 10**9,
    base_model: str | None = None,
    tokenizer: Any = None,
) -> Saved:
    """Save a quantized model to a folder: model.safetensors (sharded above `max_shard_bytes`), config.json and a model card.

    config: the model's own configuration. Default: `model.config`, as transformers' models have it. Their generation_config is
    saved as generation_config.json, without its compile_config; a UserWarning names settings that `generate()` ignores.
    tokenizer: a tokenizer or a processor that is saved beside the model by its own save_pretrained. Default: none.
    base_model: what the model card names, a name on the Hub or a folder. Default: where transformers loaded the model from.
    layout: "auto" writes "compressed-tensors" if transformers and vLLM compute the same model from it, else "ao_lab", with a
    UserWarning. "compressed-tensors" by name is also written if only some loaders do (float32 scales of a bfloat16 model); see
    `Saved.limits`. For zero points, and for such scales of weight-only schemes, config.json tells transformers to dequantize
    when loading. Wrappers of torch.compile and DistributedDataParallel are removed.

    ValueError for a model without quantized weights, for an unfinished one (layers prepared for QAT, adapters, observers,
    parametrizations, an interrupted `quantize_`), for a generation_config that transformers could not load, and if
    layout="compressed-tensors" cannot store the model, and for the folder of the unquantized model that this one was read from,
    whose weights would be lost. Nothing has been written then. If writing fails (OSError), earlier files
    of the folder are unchanged.
    """
    saved = write_model(model, Path(directory), layout, config, max_shard_bytes, None, base_model, tokenizer)
    if saved.reasons:
        warnings.warn(fallback_note(saved.reasons, is_adaptable(model)), UserWarning, stacklevel=2)
    if rounded := {name for _, name, _ in rounded_buffers(model)}:
        LOG.warning("%s: %s", ", ".join(sorted(rounded)), ROUNDED)
    if FLOAT32_SCALES in saved.limits and history_of(model).trained:
        warnings.warn(f"{FLOAT32_SCALES}: {BEFORE_CONVERT}", UserWarning, stacklevel=2)
    return saved


#: What is said of buffers that a cast of the model rounded.
ROUNDED = (
    "rounded by a cast of this model, in float32 in whatever loads the folder, so that outputs differ a little; load the dense "
    "model with from_pretrained(dtype=torch.bfloat16), or evaluate the loaded folder"
)
#: What keeps the values that a model was trained for.
BEFORE_CONVERT = "after QAT in float32, model.to(torch.bfloat16) before step='convert'"


def write_model(
    model: nn.Module,
    folder: Path,
    layout: str,
    config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 5 * 10**9,
    beside: Mapping[str, torch.Tensor] | None = None,
    base_model: str | None = None,
    tokenizer: Any = None,
) -> Saved:
    """`save_pretrained` without its warning, and with tensors beside the model's own.

    beside: tensors that belong to its files and that the model has no place for (a head that predicts later tokens). They are
    stored as they are, and readers of compressed-tensors are told so.
    """
    choice(layout, LAYOUTS, "layout")
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise TypeError(
            f"tokenizer has no save_pretrained, which its files are written by; got {type(tokenizer).__name__}"
        )
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes is at least 1, got {max_shard_bytes}")
    check_model(model)
    refuse_file(folder)
    model = unwrapped(model)
    _refuse_source(model, folder)
    check_finished(model)
    check_quantized(model, "model.save_pretrained saves")
    if empty := [name for name, value in model.state_dict(keep_vars=True).items() if value.is_meta]:
        raise ValueError(f"{empty[:5]} are on the meta device, without values; load them first")
    settings = settings_text(model)
    given = dict(config) if config is not None else configuration_of(model)
    stored, reasons = _chosen(model, layout, _dtype_of(given))
    _keep_beside(stored, {**cache_tensors(model), **(beside or {})})
    if (scheme := cache_scheme_fields(model)) is not None:
        stored.config = {**stored.config, "kv_cache_scheme": scheme}
    used = stored.config["quant_method"]
    recipes = [json.loads(text) for text in stored.recipes]
    for recipe in recipes:
        # What could not be read again is not written: a name that is no printable text, for instance.
        check_scheme_fields(recipe["weight"], "the scheme of a weight")
    folder.mkdir(parents=True, exist_ok=True)
    refuse_folders([*weight_paths(folder), *(folder / name for name in (CONFIG, SETTINGS, CARD))])
    records = {"recipes": recipes, "weights": stored.records, "shared": stored.shared, "dense": stored.dense}
    metadata = {"format": "pt", KEY: json.dumps(records)}
    with staged(folder, lambda names: remove_others(folder, names)) as place:
        written = write_files(place, stored.tensors, metadata, max_shard_bytes, stem_of(stored.config))
        whole = whole_configuration(given, stored.config, len(written))
        (place / CONFIG).write_text(json.dumps(whole, indent=2, default=str) + "\n")
        if settings is not None:
            (place / SETTINGS).write_text(settings)
        before = set(place.iterdir())
        if tokenizer is not None:
            tokenizer.save_pretrained(str(place))
        added = sorted(set(place.iterdir()) - before)
    write_training(model, folder)  # of a checkpoint that lay here
    files = [folder / path.name for path in written]
    changes = history_of(model).changes if used == "compressed-tensors" else ()
    more = _beside(folder, model, settings, reasons or [*changes, *stored.limits], base_model)
    size = sum(file.stat().st_size for file in files)
    LOG.info("saved %s: layout %s, %d bytes of weights in %d files", folder, used, size, len(files))
    every = (*files, folder / CONFIG, *more, *(folder / path.name for path in added))
    return Saved(used, every, size, tuple(reasons), tuple(stored.limits), stored.bits())


def _refuse_source(model: nn.Module, folder: Path) -> None:
    """ValueError for the folder that a transformers model was read from, where its weights are not quantized."""
    source = getattr(getattr(model, "config", None), "_name_or_path", "")
    if not source or not has_weights(folder) or Path(source).resolve() != folder.resolve():
        return
    if "quantization_config" not in json.loads((folder / CONFIG).read_text()):
        raise ValueError(
            f"{folder} has the unquantized weights that this model was read from, which would be lost; save to another folder, "
            f"or delete its weights before"
        )


def _keep_beside(stored: Stored, beside: Mapping[str, torch.Tensor]) -> None:
    """Put tensors that are none of the model's beside it; programs that do read them must not take them for quantized ones."""
    for name, tensor in beside.items():
        if name in stored.tensors:
            raise ValueError(f"{name} is a tensor of the model and also one of its other files; rename one")
        stored.keep(name, tensor)
    if "ignore" in stored.config:
        modules = {name.rpartition(".")[0] for name, t in beside.items() if t.dim() > 1}
        stored.config = {**stored.config, "ignore": sorted({*stored.config["ignore"], *modules})}


def _chosen(model: nn.Module, layout: str, dtype: torch.dtype | None) -> tuple[Stored, list[str]]:
    """The model in a layout, and what kept "auto" from compressed-tensors; ValueError where a layout cannot hold it."""
    if layout == "ao_lab":
        return _own(model), []
    reasons: list[str] = []
    stored = _compressed(model, reasons, dtype)
    if stored is not None and (layout == "compressed-tensors" or not stored.inexact):
        return stored, []
    if layout == "compressed-tensors":
        raise ValueError(refusal(reasons, is_adaptable(model)))
    return _own(model), reasons or list(stored.inexact if stored is not None else ())


def stored_as(model: nn.Module, layout: str) -> Stored:
    """What a layout holds of a model, which may be on the meta device: then nothing is written, and tensors take no memory."""
    return _chosen(model, layout, _dtype_of(configuration_of(model)))[0]


def obstacles(model: nn.Module) -> list[str]:
    """What keeps a quantized model out of compressed-tensors, by its layers, shapes and schemes: a sentence each, "LAYER: why".

    The model may be on the meta device: so it is known before a weight is read. What rounding does to values is not looked at.
    A layout that readers find, but whose products they cannot compute in the model's dtype, is an obstacle too.
    """
    reasons: list[str] = []
    _compressed(model, reasons, _dtype_of(configuration_of(model)))
    for name, weight in model.named_parameters():
        if (
            isinstance(weight, QuantizedTensor)
            and decoded_in_bfloat16(weight.scheme)
            and weight.dtype != torch.bfloat16
        ):
            dtype = str(weight.dtype).removeprefix("torch.")
            reasons.append(
                f"{name}: loaders make weights of {weight.scheme.name} in bfloat16, and the model is saved in {dtype} "
                "(model.to(torch.bfloat16) before saving changes that)"
            )
    return reasons


def _dtype_of(config: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype in which readers make the model; None where its configuration says none."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    found = getattr(torch, name, None) if name else None
    return found if isinstance(found, torch.dtype) else None


def _beside(
    folder: Path,
    model: nn.Module,
    settings: str | None,
    reasons: Sequence[str],
    base_model: str | None = None,
) -> list[Path]:
    """The files of generation settings, where the model has any, and the model card, where nobody else's is there."""
    if settings is None:  # another model's, saved here before
        (folder / SETTINGS).unlink(missing_ok=True)
    cache = getattr(model, KV_CACHE, None)
    told = "No file holds it, but here generate() stored {}; `ao_lab.use_kv_cache_` sets it again"
    said = [] if cache is None else [told.format(cache.recipe)]
    base = base_model or str(getattr(getattr(model, "config", None), "_name_or_path", None) or "")
    card = card_beside(
        folder,
        notes=reasons,
        beside=said,
        base_model=base or None,
        base_folder=Path(base) if base and Path(base).is_dir() else None,
        history=history_of(model),
    )
    return [*([] if settings is None else [folder / SETTINGS]), *([] if card is None else [card])]


def load_pretrained(
    directory: str | Path, model: nn.Module | None = None, *, dtype: torch.dtype | None = None
) -> nn.Module:
    """Load a model from a folder of `save_pretrained`, or of another library, and keep its weights quantized.

    `ao_lab.checkpoint.formats` has the supported formats (torchao, compressed-tensors, ModelOpt, ...), by quant_method in
    config.json. The dequantized value of each weight is bitwise that of its library; `explain(model)` says which library stored
    it. A UserWarning names what is not loaded, such as scales of a KV cache. Outputs are bitwise those of the model that was
    saved. If transformers alone loads the folder, its compressed-tensors layers dequantize and torch multiplies: the sums then
    have another order where one of our kernels for few tokens runs (one token on a CPU);
    `weight.with_recipe(kernel="dequantize")` is bitwise equal.

    model: a model of the same architecture to load into; it keeps its own generation_config, and its tensors stay on their
    devices ("meta": a CPU's). Default: transformers builds the
    class that config.json names, or else a causal language model, with the folder's generation_config.json. dtype: of
    floating-point tensors, and of the computation with quantized weights. Default: as saved.

    Files, records, configuration and shapes are checked before a tensor is read, and the model is changed at the very end, as a
    whole or not at all. ValueError that names the file and the rule if something does not fit, or if nothing describes what the
    tensors mean; FileNotFoundError for missing files. No code of the folder is executed.
    """
    folder = look_at(Path(directory))
    records = records_of(folder)
    if KEY in folder.metadata:
        check_configuration(folder.path, records)
    scheme = quantization_of(folder.path)
    records, scales = taken_scales(folder, records, (scheme or {}).get("kv_cache_scheme"))
    count = len(records.shapes(folder))
    target = model if model is not None else planned_model(folder.path, count, dtype)
    records = converted(records, folder, target)
    with ExitStack() as changes:
        changes.enter_context(with_residuals(target, records.specs(folder)))
        records = without_spare_biases(records, folder, target)
        check_state(target, records.shapes(folder), str(folder.path))
        check_kinds(target, records.specs(folder), str(folder.path))
        settings = None if model is not None else read_settings(folder.path, target)
        if model is None:
            target = built(folder.path, count, dtype)
            changes.enter_context(with_residuals(target, records.specs(folder)))
        state = whole_weights(folder, records)
        if dtype is not None:
            state = {n: x.to(dtype) if x.is_floating_point() else x for n, x in state.items()}
        fill(target, state)
    if settings is not None:
        target.generation_config = settings
    tell(target, records, folder)
    if scales:
        remember_scales(target, scales)
    LOG.info("loaded %s: %d quantized weights", folder.path, len(records.weights))
    return target


def check_configuration(path: Path, records: Records) -> None:
    """config.json, where there is one, says the same of quantized weights as the records do."""
    if not (path / CONFIG).exists():
        return
    given = read_config(path).get(QUANTIZATION)
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
    if method == OURS["quant_method"]:
        file_of_weights(given, where)
    if method == "compressed-tensors":
        check_groups(given, [(w.format, w.meta.recipe) for w in records.weights.values()], where)


def _compressed(model: nn.Module, reasons: list[str], dtype: torch.dtype | None = None) -> Stored | None:
    """The model in compressed-tensors' formats; None, with reasons, where something does not fit."""
    stored = Stored()
    layers: dict[str, tuple[str, Recipe, bool]] = {}
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    #: Whether a layer lies there without a tensor called weight.
    bare: dict[str, bool] = {}
    readings: dict[str, Reading] = {}
    state = _state(model, stored)
    if is_untied(model):
        # Where the table and the head are no longer one, readers tie nothing else either: a bias of theirs, for instance.
        parted = [name for name, one in stored.shared.items() if not isinstance(state[one], QuantizedTensor)]
        state.update({name: state[stored.shared.pop(name)] for name in parted})
    named = published(model, state, reasons)
    if reasons:
        return None
    old = {new: name for name, new in named.renamed.items()}
    stored.shared = {named.renamed.get(a, a): named.renamed.get(b, b) for a, b in stored.shared.items()}
    for name, value in named.tensors.items():
        path = name.removesuffix(".weight")
        if not isinstance(value, QuantizedTensor):
            stored.keep(name, value)
            continue
        value, host = value.plain, value.meta.layout == PRESHUFFLED
        try:
            module = TARGET if name in named.matrices else old.get(name, name).removesuffix(".weight")
            if (module not in linears and name not in named.matrices) or path == name:
                raise ValueError("it is not the weight of an nn.Linear")
            read = reading(value, dtype)
            # Dequantized while it loads, a weight is made in the dtype of its scales.
            if name in named.matrices or not read.dequantize:
                read = with_own_scales(read, value)
        except ValueError as error:
            reasons.append(f"{name}: {error}")
            continue
        layers[module] = (read.format, value.recipe, value.input_scale is not None)
        if name not in named.matrices:
            bare[module] = "weight" not in read.tensors
            readings[name] = read
        written = _on_host(read.tensors) if host else read.tensors
        stored.put({f"{path}.{key}": tensor for key, tensor in written.items()})
        outer = None if value.outer is None or value.is_meta else value.outer.item()
        stored.record(name, value, format=read.format, parts=list(read.tensors), outer=outer)
        stored.limits.update(dict.fromkeys(read.limits))
        if not read.exact:
            stored.inexact.update(dict.fromkeys(read.limits))
    reasons += unplaced_residuals(model)
    if not reasons:
        packed = [path for path, packed in bare.items() if packed]
        reasons += unsupported_reasons(model, list(bare), packed, is_untied(model))
    if reasons:
        return None
    layers = _with_row_groups(model, layers, stored)
    try:
        dense = ignored(model, named, sorted(linears - set(layers)))
        described_layers = quantization_config(layers, dense, heads(model))
        has_encoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False) is True
        stored.config, told = with_dequantizing(described_layers, readings, TARGET, has_encoder)
    except ValueError as error:
        reasons.append(str(error))
        return None
    stored.limits.update(dict.fromkeys(told))
    stored.limits.update(dict.fromkeys(_parted(stored)))
    if len(stored.config["config_groups"]) > 1 and not stored.config.get(FIELD):
        stored.limits["several schemes: transformers 5.23 loads them only without dequantize=True"] = None
    return stored


def _parted(stored: Stored) -> list[str]:
    """What is to be said of layers that other programs join, and whose outer scales are not one."""
    groups: dict[object, dict[str, float]] = {}
    for name, record in stored.records.items():
        place = group_of(name)
        if place is not None and record.get("outer") is not None:
            groups.setdefault(place, {})[name] = record["outer"]
    apart = [list(one) for one in groups.values() if len(set(one.values())) > 1]
    return [
        f"global scales: vLLM joins {' and '.join(names)} and others like them, and takes one global scale for all; theirs "
        'differ, so that it computes another model. config.for_layout("compressed-tensors") gives them one'
        for names in apart[:1]
    ]


#: What is to be said of models of no transformers class, whose inputs nobody has seen.
TWO_AXES = (
    "per-token scales: of inputs with two axes (poolers, experts) transformers takes one scale for all tokens, vLLM one for "
    "each"
)


#: What is to be said of layers whose inputs have two axes, in a folder.
ROW_GROUPS = (
    "inputs of {} have two axes, of which transformers takes one per-token scale for all rows: config.json describes the scale "
    "of a row as that of a group as long as the row, which is the same; vLLM lists no kernel for such groups"
)


def _with_row_groups(
    model: nn.Module, layers: Mapping[str, tuple[str, Recipe, bool]], stored: Stored
) -> dict[str, tuple[str, Recipe, bool]]:
    """The layers; where inputs with two axes have a scale for each token, which transformers would take for all of them, as
    readers find it: of groups as long as a row. Layers not seen are a limit."""
    per_token = [
        path
        for path, (_, recipe, _) in layers.items()
        if recipe.activation and recipe.activation.scale.block == -1
    ]
    found = flat_inputs(model, per_token) if per_token else ([], [])
    if found is None:
        stored.limits[TWO_AXES] = None
        return dict(layers)
    flat, unseen = found
    if unseen:
        told = f"{', '.join(unseen[:3])}{' and others' if len(unseen) > 3 else ''}"
        limit = f"tokens: a small input did not reach {told}: whether their inputs have two axes is unknown"
        stored.limits[limit] = stored.inexact[limit] = None
    if flat:
        stored.limits[ROW_GROUPS.format(shorten(flat, 3))] = None
    lengths = {path: int(model.get_submodule(path).in_features) for path in flat}  # type: ignore[arg-type]
    return {
        path: (name, with_row_groups(recipe, lengths[path]) if path in lengths else recipe, static)
        for path, (name, recipe, static) in layers.items()
    }


def _own(model: nn.Module) -> Stored:
    """The model in our layout."""
    stored = Stored(config=OURS)
    for name, value in _state(model, stored).items():
        if not isinstance(value, QuantizedTensor):
            stored.keep(name, value)
            continue
        value, host = value.plain, value.meta.layout == PRESHUFFLED
        parts = {name: part for name, part in value.parts.items() if part is not None}
        parts = _on_host(parts) if host else parts
        stored.put({f"{name}.{part}": tensor for part, tensor in parts.items()})
        stored.record(name, value, format="ao_lab", parts=list(parts))
    return stored


def _on_host(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Parts of a preshuffled weight that were made plain to be written: a device would hold all weights twice."""
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _state(model: nn.Module, stored: Stored) -> Tensors:
    """The model's state, each tensor once; the other names of shared ones go to `stored.shared`."""
    seen: dict[Any, str] = {}
    state: Tensors = {}
    for name, value in model.state_dict(keep_vars=True).items():
        key = _memory_of(value) if value.numel() else name
        if key in seen:
            stored.shared[name] = seen[key]
        else:
            seen[key] = name
            state[name] = value.detach()
    return state


def _memory_of(value: torch.Tensor) -> tuple[Any, ...]:
    """What two names of one tensor have in common: memory, and how it is read; without memory itself."""
    if value.is_meta:
        return (id(value),)
    if isinstance(value, QuantizedTensor):
        return value.meta, *(None if part is None else _memory_of(part) for part in value.parts.values())
    return value.data_ptr(), tuple(value.shape), value.stride(), value.dtype


__all__ = [
    "Saved", "check_configuration", "load_pretrained", "obstacles", "save_pretrained", "stored_as", "write_model",
]  # fmt: skip
