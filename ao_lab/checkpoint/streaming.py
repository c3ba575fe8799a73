"""`quantize_pretrained`: quantize a folder's weights while they are read, one tensor after the other.

The dense model never exists: it is built on the meta device, where tensors have shapes alone, `ao_lab.quantization.plan`
says what becomes of each parameter, and each tensor is read, quantized and let go. Memory is the quantized model and one
layer. The result is that of loading the folder and calling `quantize_`, bit for bit.

Models of transformers are read by transformers itself: what it renames, merges into batched experts, ties or casts, and buffers
that no file has, are its affair. Its loader asks a quantizer about each parameter. Any other model is built by the caller's
function; its folder holds safetensors under the names of its state_dict.

The quantizer is that of `ao_lab.HfConfig` (`ao_lab.checkpoint.transformers.quantizer`), with more to carry: any filter, a
device, observers, progress. Here it leaves nothing behind: the model is one that was loaded and then given to `quantize_`.
With a quantizer transformers reads in one thread and keeps no tensor that it has handed over.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ao_lab.checkpoint.api import load_pretrained
from ao_lab.checkpoint.experts import left_out_layers
from ao_lab.checkpoint.formats import TORCHAO_KEY, quantization_of
from ao_lab.checkpoint.io.shards import Folder, has_weights, look_at
from ao_lab.checkpoint.model_builder import CONFIG, dense_model, parameters_without_memory
from ao_lab.checkpoint.records import KEY
from ao_lab.checkpoint.transformers.config import HfConfig
from ao_lab.config.base import Config, FqnToConfig, Observer
from ao_lab.install.extras import needed
from ao_lab.quantization.api import (
    StreamedWeights,
    keep_report,
    quantize_,
    required_observers,
)
from ao_lab.quantization.groups import warn_of_undivided
from ao_lab.quantization.plan import ALREADY, QuantizationPlan, planned
from ao_lab.quantization.report import explain, keep_configuration
from ao_lab.transforms.plan import Device, Filter, Progress
from ao_lab.transforms.telling import telling


def quantize_pretrained(
    directory: str | Path,
    config: Config | FqnToConfig,
    filter_fn: Filter | None = None,
    device: Device = None,
    *,
    build: Callable[[], nn.Module] | None = None,
    dtype: torch.dtype | None = None,
    observers: Mapping[str, Observer] | None = None,
    calibration: Iterable[Any] | None = None,
    methods: Iterable[Any] = (),
    blocks: str | None = None,
    resume: str | Path | None = None,
    prefix: str = "quantized",
    progress: Progress | bool | None = None,
) -> nn.Module:
    """Load a folder's model quantized as by `quantize_`, weight by weight: same arguments, bitwise equal weights; see
    `explain(model)`.

    directory: what transformers' save_pretrained wrote, or, with `build`, safetensors files (one, or shards with an index) with
    the names of the state_dict of the model that `build()` makes. device: where weights are quantized and the model is
    afterwards. Default: the CPU. dtype: of unquantized weights. Default: as saved, or as `build()` makes them. observers: of an
    earlier `calibrate` of the same model.

    calibration, methods, blocks, resume, prefix, progress: as for `quantize_`. The weights of a transformers model stay in
    their files (what transformers merges or casts, and models that `build()` makes, are in host memory), one block at a time is
    on `device`, and activations wait in host memory; with `resume` finished blocks are memory-mapped too, so that the whole
    model is never in memory before the end.

    If the folder holds quantized weights, ours or another library's, they are loaded as by `load_pretrained`; `config` applies
    to those that are not quantized.

    Raises as `quantize_` does, ValueError if names or shapes do not fit, both before the first tensor is read, and for a folder
    of quantized weights with nothing left to quantize; FileNotFoundError if there are no weights.
    """
    folder = Path(directory)
    run = partial(
        quantize_, config=config, filter_fn=filter_fn, device=device, observers=observers, progress=progress
    )
    empty = None if build is None else partial(_on_meta, build, dtype)
    how = blocks is not None or resume is not None or prefix != "quantized"
    if calibration is not None or methods != () or how:
        run = partial(
            run, calibration=calibration, methods=methods, blocks=blocks, resume=resume, prefix=prefix
        )
        run = partial(run, device="cpu" if device is None else device, offload=calibration is not None)
        return _calibrated(folder, empty, dtype, run)
    if is_quantized(folder):
        return quantized_further(folder, empty, dtype, run)
    if build is None:
        with telling(progress, "quantize", long=False) as told:
            return read_by_transformers(folder, config, filter_fn, device, dtype, observers, told)
    model = _on_meta(build, dtype)
    plan = planned(model, config, filter_fn, device, streamed=True)
    with telling(progress, "quantize", long=False) as told:
        fill(model, folder, StreamedWeights(plan, required_observers(plan, observers), device, told))
    keep_report(model, plan)
    keep_configuration(model, config)
    warn_of_undivided(plan, config)
    return model


def _calibrated(
    folder: Path,
    empty: Callable[[], nn.Module] | None,
    dtype: torch.dtype | None,
    run: Callable[[nn.Module], object],
) -> nn.Module:
    """The model of a folder, quantized by methods block by block. empty: makes the caller's model without memory."""
    if is_quantized(folder):
        model = load_pretrained(folder, empty and empty(), dtype=dtype)
    elif empty is None:
        model = dense_of_files(folder, dtype)
    else:
        model = empty()
        fill(model, folder, StreamedWeights(QuantizationPlan(), {}, None, None))
    run(model)
    return model


def dense_of_files(folder: Path, dtype: torch.dtype | None = None) -> nn.Module:
    """A dense model of transformers on the CPU, its weights views of the files where these hold them as they are."""
    needed("transformers")
    _check_folder(folder)
    model, told = dense_model(folder, output_loading_info=True, dtype=dtype or "auto")
    _check_complete(folder, model, told)
    return model.eval()  # type: ignore[no-any-return]


def _on_meta(build: Callable[[], nn.Module], dtype: torch.dtype | None) -> nn.Module:
    """The caller's model, its parameters without memory."""
    with parameters_without_memory():
        model = build()
    if dtype is not None:
        model.to(dtype=dtype)
    return model


def read_by_transformers(
    folder: Path,
    config: Config | FqnToConfig,
    filter_fn: Filter | None,
    device: Device,
    dtype: torch.dtype | None,
    observers: Mapping[str, Observer] | None,
    progress: Progress | None,
) -> nn.Module:
    """The quantized model of a folder; see `ao_lab.checkpoint.streaming`."""
    needed("transformers")
    from ao_lab.checkpoint.transformers.quantizer import Job

    _check_folder(folder)
    job = Job(config, filter_fn, device, observers, progress)
    carrier = HfConfig()
    carrier.job = job
    given = {"output_loading_info": True, "quantization_config": carrier, "dtype": dtype or "auto"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            model, told = dense_model(folder, **given)
        finally:
            if job.error is not None:
                raise job.error
    _check_complete(folder, model, told)
    forget(model)
    job.finish(model)
    return model  # type: ignore[no-any-return]


def _check_folder(folder: Path) -> None:
    """ValueError where there is no configuration, or where files are not what they say."""
    if not (folder / CONFIG).is_file():
        raise ValueError(
            f"{folder} has no {CONFIG}; give a folder that transformers' save_pretrained wrote, or build="
        )
    if has_weights(folder):
        look_at(folder)


def _check_complete(folder: Path, model: Any, told: Mapping[str, Any]) -> None:
    """ValueError for weights that the folder lacks; a warning for layers that its configuration leaves out."""
    # Transformers would go on with random values.
    if told["missing_keys"]:
        raise ValueError(f"the folder has no weights for {sorted(told['missing_keys'])[:5]}")
    if has_weights(folder) and (left := left_out_layers(look_at(folder), model)):
        warnings.warn(
            f"{folder} has weights of {', '.join(left[:5])}{', ...' if len(left) > 5 else ''}, which its {CONFIG} leaves out: "
            "the model has fewer layers; correct their number there",
            UserWarning,
            stacklevel=4,
        )


def forget(model: Any) -> None:
    """Take what transformers notes of a quantizer off the model: to it, the model is an ordinary one. How the weights were
    renamed stays, which transformers 5.24 takes off too: saving undoes it, as with a model that was read dense."""
    conversions = getattr(model, "_weight_conversions", None)
    model.hf_quantizer.remove_quantization_config(model)
    model._weight_conversions = conversions
    del model.is_quantized
    for module in model.modules():
        # Some modules have a plain dictionary called config.
        getattr(getattr(module, "config", module), "__dict__", {}).pop("_is_quantized", None)


# `quantize_pretrained` of a folder that holds quantized weights: they stay as they are, what is dense is quantized.


def is_quantized(folder: Path) -> bool:
    """Whether a folder says that it holds quantized weights, in config.json or in its files' metadata."""
    if quantization_of(folder) is not None:
        return True
    return has_weights(folder) and not {KEY, TORCHAO_KEY}.isdisjoint(look_at(folder).metadata)


def quantized_further(
    folder: Path,
    empty: Callable[[], nn.Module] | None,
    dtype: torch.dtype | None,
    run: Callable[[nn.Module], object],
) -> nn.Module:
    """The model that `load_pretrained` makes of the folder, its dense weights quantized by `run`.

    ValueError that says what the folder holds where nothing is left to be quantized, or `run` cannot be applied to it.
    """
    model = load_pretrained(folder, empty and empty(), dtype=dtype)
    loaded = explain(model).changed
    try:
        run(model)
    except ValueError as error:
        kinds = sorted({layer.scheme for layer in loaded})
        # What cannot be changed are these weights: said once.
        rest = "" if ALREADY in str(error) else f" Of the rest: {error}"
        raise ValueError(
            f"{folder} is quantized already: {len(loaded)} weights in {', '.join(kinds[:4])} "
            f"({loaded[0].name if loaded else 'none'}, for instance), which stay as they are; give its unquantized base model."
            f"{rest}"
        ) from error
    return model


def fill(model: nn.Module, folder: Path, loading: StreamedWeights) -> None:
    """Give every parameter and buffer of a model its tensor, quantized where the plan says so."""
    found = look_at(folder)
    owners = owners_of(model)
    check_names(found, owners, model)
    for name, tensor in found.each(found.specs):
        assign(owners, name, tensor, loading)


def owners_of(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """For each name of the state_dict every place that has its tensor."""
    slots: dict[int, list[tuple[nn.Module, str]]] = {}
    result: dict[str, list[tuple[nn.Module, str]]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        path, _, leaf = name.rpartition(".")
        result[name] = slots.setdefault(id(value), [])
        result[name].append((model.get_submodule(path), leaf))
    return result


def check_names(folder: Folder, owners: dict[str, list[tuple[nn.Module, str]]], model: nn.Module) -> None:
    """ValueError where the files' names or shapes are not the model's, or where something stays without values."""
    for name, spec in folder.specs.items():
        if name in owners:
            owner, leaf = owners[name][0]
            wanted = tuple(getattr(owner, leaf).shape)
            if wanted != spec.shape:
                file = folder.files[name].name
                raise ValueError(f"{name} has shape {spec.shape} in {file}, the model's is {wanted}")
    given = {id(slots) for name, slots in owners.items() if name in folder.specs}
    missing = [name for name, slots in owners.items() if id(slots) not in given]
    unknown = sorted(set(folder.specs) - set(owners))
    if missing or unknown:
        raise ValueError(f"the folder lacks {missing[:5]} and has {unknown[:5]}, which the model lacks")
    empty = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in folder.specs]
    if empty:
        raise ValueError(f"{empty[:5]} are on the meta device and no file has them; build them with values")


def assign(
    owners: dict[str, list[tuple[nn.Module, str]]], name: str, found: torch.Tensor, loading: StreamedWeights
) -> None:
    """Put a tensor of a file where it belongs, cast as load_state_dict casts, and what it completes."""
    owner, leaf = owners[name][0]
    wanted: torch.Tensor = getattr(owner, leaf)
    cast = found.to(wanted.dtype)
    if name in loading.changes:
        values: dict[str, Any] = dict(loading.arrived(name, cast))
    else:
        # A tensor of a file is a view of it; the model outlives the file.
        value = cast.clone() if loading.device is None else cast.to(loading.device, copy=True)
        if isinstance(wanted, nn.Parameter):
            value = nn.Parameter(value, requires_grad=wanted.requires_grad)
        values = {name: value}
    for part, value in values.items():
        for module, key in owners[part]:
            (module._buffers if key in module._buffers else module._parameters)[key] = value


__all__ = ["is_quantized", "quantize_pretrained"]
