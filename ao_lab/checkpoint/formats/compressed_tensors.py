"""Folders in compressed-tensors' formats, by any author: llm-compressor, vLLM's users, models published quantized.

A module's tensors are what its format and its group of config_groups say (`compressed_tensors_groups`, `_weights`). What
changes a model beyond its weights is refused: transforms, sparse formats, quantized outputs. A quantized key-value cache is no
part of the weights: its scales are left out, with a warning, and the cache is computed in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ao_lab.checkpoint.formats import model_dtype, reader
from ao_lab.checkpoint.formats.compressed_tensors_weights import (
    LAYOUTS,
    Group,
    Layout,
    Modules,
    groups_of,
    like,
    names_in,
    quantized_of,
    scheme_of,
    shape_of,
    sizes_fit,
    specs_of,
)
from ao_lab.checkpoint.io.shards import Folder, Spec, Specs, Tensors
from ao_lab.checkpoint.io.strict_json import shown
from ao_lab.checkpoint.records import Records, Weight
from ao_lab.config.compressed_tensors import reader_activation
from ao_lab.config.recipe import Recipe
from ao_lab.tensor.metadata import Meta
from ao_lab.tensor.quantized_tensor import QuantizedTensor, from_quantized
from reference import Scales, Scheme
from reference.quantize.blocks import Blocks

# Quantized inputs of compressed-tensors' layers: their record, and the static scales that a folder brings.

SCALE, ZERO, OUTER = "input_scale", "input_zero_point", "input_global_scale"
INPUT_PARTS = (SCALE, ZERO, OUTER)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def inputs_of(arguments: Mapping[str, Any] | None, found: Specs, length: int) -> tuple[Scheme | None, Specs]:
    """The record of a layer's inputs of this length (None: not quantized) and its static tensors; ValueError for others."""
    scheme = None if arguments is None else reader_activation(arguments)
    if scheme is not None:
        Blocks.of((1, length), scheme.scale, -1)
    specs: Specs = {}
    if arguments is not None and scheme is not None and arguments.get("dynamic", False) is not True:
        part = SCALE if scheme.outer is None else OUTER
        if part not in found:
            raise ValueError(f"static inputs have a {part}, which the files lack; fetch the folder again")
        specs[part] = Spec(found[part].dtype, like(found[part].shape, (1,)))
        if found[part].dtype not in FLOATS:
            raise ValueError(f"{part} is a float, got {found[part]}; fetch the folder again")
        if ZERO in found and part == SCALE:
            # Symmetric inputs of earlier versions have one, which is 0.
            specs[ZERO] = Spec(found[ZERO].dtype, like(found[ZERO].shape, (1,)))
    if more := [part for part in found if part in INPUT_PARTS and part not in specs]:
        raise ValueError(
            f"{more[0]} belongs to static inputs, which its group does not have; fetch the folder again"
        )
    return scheme, specs


def static_scales(tensors: Mapping[str, torch.Tensor]) -> Scales | None:
    """The static scales of a layer's input; ValueError where a zero point is not that of symmetric inputs."""
    if ZERO in tensors and bool((tensors[ZERO].to(torch.float32) != 0).any()):
        raise ValueError(f"symmetric inputs have an {ZERO} that is not 0; fetch the folder again")
    for part in (SCALE, OUTER):
        if part in tensors:
            stored = tensors[part].to(torch.float32).reshape(())
            return Scales(stored) if part == SCALE else Scales(None, stored)
    return None


#: Tensors of a quantized module's weight, by what follows its name.
PARTS = (
    "weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_global_scale", "weight_g_idx",
)  # fmt: skip
#: Scales of the key-value cache, and of queries; of k_proj and v_proj in folders of earlier versions.
CACHE = (
    "k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point", "q_zero_point", "k_global_scale", "v_global_scale",
    "k_proj.output_scale", "v_proj.output_scale", "k_proj.output_zero_point", "v_proj.output_zero_point",
)  # fmt: skip
CACHE_REASON = "scales of a quantized key-value cache, which ao_lab computes in the model's dtype"
#: Statuses of folders whose weights are stored quantized.
COMPRESSED = "compressed"


@reader("compressed-tensors")
def read(folder: Folder, given: Mapping[str, Any]) -> Records:
    """The records of a folder; ValueError that names it and the rule for what cannot be read."""
    where = f"quantization_config of {folder.path / 'config.json'}"
    _check_whole(given, where)
    modules = _modules(folder)
    decide = Modules(groups_of(given, where), names_in(given.get("ignore"), f"{where}: ignore"), modules)
    shapes = _stored_shapes(folder, modules)
    dtype = model_dtype(folder)
    weights = {}
    for path, found in modules.items():
        try:
            weights[f"{path}.weight"] = _weight(path, found, decide, shapes.get(path), dtype)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{shown(path)} in {folder.path}: {error}") from error
    cache = [name for name in folder.specs if name.endswith(tuple(f".{end}" for end in CACHE))]
    return Records(weights, (), {}, left_out=dict.fromkeys(cache, CACHE_REASON))


def _check_whole(given: Mapping[str, Any], where: str) -> None:
    """ValueError for what changes a model beyond its weights, or where weights are not stored quantized."""
    for key in ("transform_config", "sparsity_config", "moe_sparsity_config"):
        value = given.get(key)
        if value and not (isinstance(value, dict) and value.get("format") == "dense"):
            raise ValueError(
                f"{where} has a {key}, which no scheme of ao_lab says; load it with transformers"
            )
    status = given.get("quantization_status", COMPRESSED)
    if status != COMPRESSED:
        raise ValueError(
            f"{where}: quantization_status is {shown(status)}: its weights are not stored quantized; ao_lab reads "
            f"{COMPRESSED!r} folders"
        )


def _modules(folder: Folder) -> dict[str, Specs]:
    """The tensors of each module that has scales of a weight."""
    paths = [name.removesuffix(".weight_scale") for name in folder.specs if name.endswith(".weight_scale")]
    paths += [name.removesuffix(".weight_packed") for name in folder.specs if name.endswith(".weight_packed")]
    ends = (*PARTS, *INPUT_PARTS)
    return {
        path: {end: folder.specs[f"{path}.{end}"] for end in ends if f"{path}.{end}" in folder.specs}
        for path in dict.fromkeys(paths)
    }


def _stored_shapes(folder: Folder, modules: Mapping[str, Specs]) -> dict[str, tuple[int, ...]]:
    """What weight_shape says of each module: two numbers, read with the headers."""
    wanted = [
        path
        for path, found in modules.items()
        if "weight_shape" in found and sizes_fit(found["weight_shape"])
    ]
    read = folder.read([f"{path}.weight_shape" for path in wanted])
    return {path: tuple(read[f"{path}.weight_shape"].flatten().tolist()) for path in wanted}


def _weight(
    path: str, found: Specs, decide: Modules, stored: tuple[int, ...] | None, dtype: torch.dtype
) -> Weight:
    """The record of a module's weight, by the group that its tensors fit."""
    groups = decide.groups_for(path)
    if not groups:
        raise ValueError(
            "it has quantized tensors, and no group of quantization_config is for it; fetch the folder again"
        )
    result: dict[str, Weight] = {}
    errors: list[Exception] = []
    for group in groups:
        try:
            result[group.name] = _of_group(path, found, group, stored, dtype)
        except ValueError as error:
            errors.append(error)
    if not result:
        raise errors[0]
    if len({weight.meta for weight in result.values()}) != 1:
        names = " and ".join(map(shown, result))
        raise ValueError(
            f"groups {names} may both be its own; a file knows no classes, so name its module in a target"
        )
    return next(iter(result.values()))


def _of_group(
    path: str, found: Specs, group: Group, stored: tuple[int, ...] | None, dtype: torch.dtype
) -> Weight:
    layout = LAYOUTS.get(group.format)
    if layout is None:
        raise ValueError(
            f"format {shown(group.format)} is none of {', '.join(LAYOUTS)}; load it with transformers"
        )
    if lacks := [part for part in (layout.codes, "weight_scale") if part not in found]:
        raise ValueError(
            f"format {group.format} has a {lacks[0]}, which the files lack; fetch the folder again"
        )
    scale = found["weight_scale"]
    scheme = scheme_of(group.weights, layout, scale.dtype)
    shape = shape_of(layout, found, group.weights, stored)
    specs = specs_of(layout, scheme, shape, found)
    for part, spec in specs.items():
        if found.get(part) != spec:
            raise ValueError(f"{part} is {spec} in {group.format} of {scheme.name}, got {found.get(part)}")
    if more := [part for part in found if part in PARTS and part not in specs]:
        raise ValueError(f"{more[0]} is no tensor of {group.format}")
    activation, static = inputs_of(group.inputs, found, shape[1])
    specs |= static
    # A scale of 16 bits is also the dtype of what the library makes of a weight.
    computes = scale.dtype if scale.dtype in (torch.bfloat16, torch.float16) else dtype
    recipe = Recipe(weight=scheme, activation=activation)
    names = {part: f"{path}.{part}" for part in specs}
    make = partial(_quantized_weight, layout, scheme, shape, recipe, computes)
    return Weight(Meta(recipe, -1, computes), shape, names, specs, make, "compressed-tensors", group.format)


def _quantized_weight(
    layout: Layout,
    scheme: Scheme,
    shape: tuple[int, int],
    recipe: Recipe,
    dtype: torch.dtype,
    tensors: Tensors,
) -> QuantizedTensor:
    q = quantized_of(layout, scheme, shape, tensors)
    scales = static_scales(tensors)
    return from_quantized(q, replace(recipe, weight=q.scheme), dtype, scales)
