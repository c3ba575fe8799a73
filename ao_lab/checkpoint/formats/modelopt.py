"""Folders of NVIDIA's Model Optimizer (`quant_method` "modelopt", or hf_quant_config.json): FP8 and NVFP4.

For a linear layer T (nvidia-modelopt 0.47, torch/export/unified_export_hf.py, quant_utils.py, convert_hf_config.py):

    FP8                          T.weight e4m3 (out, in), T.weight_scale float32, one for the weight; T.input_scale float32
    FP8_PER_CHANNEL_PER_TOKEN    T.weight e4m3, T.weight_scale float32 (out)
    FP8_PB_WO                    T.weight e4m3, T.weight_scale float32, one for each block of (128, 128)
    NVFP4, W4A16_NVFP4           T.weight uint8 (out, in / 2), the first of two in the low bits; T.weight_scale e4m3, one for
                                 each 16; T.weight_scale_2 float32, which multiplies them; NVFP4: T.input_scale float32

A weight of NVFP4 is code * (scale * scale_2) in float32, rounded once, and +0 for the code of -0; of FP8 code and scale are
rounded to the output's dtype and multiplied in it (torch/quantization/qtensor/nvfp4_tensor.py, fp8_tensor.py, `dequantize`).
Inputs are quantized with the folder's static scales by the default rules: which of NVIDIA's kernels computes them is not said
in a folder.

Which layers are quantized the files say; patterns of `exclude_modules` are not matched. What smooths inputs
(`pre_quant_scale`: AWQ, SVDQuant) is in no scheme. Scales of a quantized key-value cache are left out, with a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch

from ao_lab.checkpoint.formats import model_dtype, reader
from ao_lab.checkpoint.io.shards import Folder, Spec, Specs, Tensors
from ao_lab.checkpoint.io.strict_json import shown
from ao_lab.checkpoint.records import Records, Weight
from ao_lab.config.recipe import Recipe, block_name
from ao_lab.tensor.metadata import Meta
from ao_lab.tensor.quantized_tensor import QuantizedTensor, from_quantized
from reference import SCHEMES, Quantized, Scales, Scheme
from reference.formats.storage import packed_shape
from reference.quantize.blocks import Blocks
from reference.schemes.schemes import Block

WAY_OUT = "quantize the original model with ao_lab, or serve the folder with vLLM or TensorRT-LLM"
MIXED = "MIXED_PRECISION"
SCALE, OUTER, INPUT = "weight_scale", "weight_scale_2", "input_scale"
#: Tensors that change what a layer computes, beyond its weight.
SMOOTHING = ("pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b")
#: Of the key-value cache, beside the projections that fill it.
CACHE = ("k_proj.k_scale", "v_proj.v_scale", "k_proj.k_bias", "v_proj.v_bias", "attn.k_scale", "attn.v_scale")
CACHE_REASON = "scales of a quantized key-value cache, which ao_lab computes in the model's dtype"


@dataclass(frozen=True)
class Layout:
    """How weights of a quant_algo are stored: the default scheme whose elements and levels they have, blocks, and inputs."""

    record: str
    block: Block
    #: How a product of code and scale is rounded, as `Scheme.dequantize` says.
    dequantize: str
    #: The record of inputs; None: not quantized.
    inputs: str | None = None
    #: Whether inputs have a static scale.
    static: bool = False


LAYOUTS = {
    "FP8": Layout("fp8_tensorwise", "tensor", "target", "fp8_tensorwise", True),
    "FP8_PER_CHANNEL_PER_TOKEN": Layout("fp8_rowwise", -1, "target", "fp8_rowwise"),
    "FP8_PB_WO": Layout("fp8_128x128", (128, 128), "target"),
    "NVFP4": Layout("nvfp4", 16, "ieee", "nvfp4", True),
    "W4A16_NVFP4": Layout("nvfp4", 16, "ieee"),
}


@reader("modelopt", "modelopt_fp4")
def read(folder: Folder, given: Mapping[str, Any]) -> Records:
    """The records of a folder; ValueError that names it and the rule for what cannot be read."""
    details = given.get("quantization", given)
    if not isinstance(details, dict):
        raise ValueError(f"{folder.path}: quantization is an object, got {shown(details)}; fetch it again")
    dtype = model_dtype(folder)
    paths = [name.removesuffix(f".{SCALE}") for name in folder.specs if name.endswith(f".{SCALE}")]
    if not paths:
        raise ValueError(
            f"{folder.path} names a quantization and has no {SCALE} in its files; fetch it again"
        )
    weights = {}
    for path in paths:
        try:
            weights[f"{path}.weight"] = _weight(path, folder, layout_of(path, details), dtype)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{shown(path)} in {folder.path}: {error}") from error
    cache = [name for name in folder.specs if name.endswith(tuple(f".{end}" for end in CACHE))]
    return Records(weights, (), {}, left_out=dict.fromkeys(cache, CACHE_REASON))


def layout_of(path: str, details: Mapping[str, Any]) -> Layout:
    """How a layer's weight is stored: by the folder's quant_algo, or by its own in a folder of several."""
    algorithm, group = details.get("quant_algo"), _group_size(details)
    if algorithm == MIXED:
        layers = details.get("quantized_layers")
        own = layers.get(path) if isinstance(layers, dict) else None
        if not isinstance(own, dict):
            raise ValueError(
                f"quantized_layers of {MIXED} does not describe it, got {shown(own)}; fetch the folder again"
            )
        algorithm, group = own.get("quant_algo"), own.get("group_size")
    name = algorithm.upper() if isinstance(algorithm, str) else algorithm
    if not isinstance(name, str) or name not in LAYOUTS:
        raise ValueError(
            f"quant_algo is one of {', '.join(LAYOUTS)}, {MIXED}; got {shown(algorithm)}; {WAY_OUT}"
        )
    layout = LAYOUTS[name]
    if group is not None and isinstance(layout.block, int) and layout.block > 0:
        if type(group) is not int or group < 1:
            raise ValueError(f"group_size is a positive count, got {shown(group)}; fetch the folder again")
        return replace(layout, block=group)
    return layout


def _group_size(details: Mapping[str, Any]) -> Any:
    """group_size of a description: its own in hf_quant_config.json, that of the one group in config.json; None for neither."""
    found, groups = details.get("group_size"), details.get("config_groups")
    if found is not None or not isinstance(groups, dict) or len(groups) != 1:
        return found
    group = next(iter(groups.values()))
    weights = group.get("weights") if isinstance(group, dict) else None
    return weights.get("group_size") if isinstance(weights, dict) else None


def scheme_of(layout: Layout) -> Scheme:
    """The record of a weight."""
    model = SCHEMES[layout.record]
    short = model.name.partition("_")[0]
    name = f"modelopt.{short}_{block_name(layout.block)}"
    return replace(
        model, name=name, scale=replace(model.scale, block=layout.block), dequantize=layout.dequantize
    )


def _weight(path: str, folder: Folder, layout: Layout, dtype: torch.dtype) -> Weight:
    ends = ("weight", SCALE, OUTER, INPUT, *SMOOTHING)
    found = {end: folder.specs[f"{path}.{end}"] for end in ends if f"{path}.{end}" in folder.specs}
    if smoothed := [end for end in SMOOTHING if end in found]:
        raise ValueError(
            f"its {smoothed[0]} changes the layer's inputs, which no scheme describes; {WAY_OUT}"
        )
    scheme = scheme_of(layout)
    specs, shape = _specs(layout, scheme, found)
    for part, spec in specs.items():
        if found.get(part) != spec:
            raise ValueError(
                f"{part} is {spec} in {scheme.name}, got {found.get(part, 'none')}; fetch the folder again"
            )
    if more := [part for part in found if part not in specs]:
        raise ValueError(
            f"{more[0]} is no tensor of {scheme.name}, as its quant_algo has it; fetch the folder again"
        )
    inputs = None if layout.inputs is None else SCHEMES[layout.inputs]
    if inputs is not None:
        Blocks.of((1, shape[1]), inputs.scale, -1)
    recipe = Recipe(weight=scheme, activation=inputs)
    names = {part: f"{path}.{part}" for part in specs}
    result = partial(_quantized_weight, recipe, shape, dtype)
    return Weight(
        Meta(recipe, -1, dtype), shape, names, specs, result, "modelopt", scheme.name.partition(".")[2]
    )


def _specs(layout: Layout, scheme: Scheme, found: Specs) -> tuple[Specs, tuple[int, int]]:
    """What a weight's tensors are, and its shape."""
    fmt = scheme.format
    stored = found["weight"].shape if "weight" in found else ()
    if len(stored) != 2:
        raise ValueError(f"weight is a matrix, got shape {stored}; fetch the folder again")
    shape = (stored[0], stored[1] * 8 // fmt.bits)
    narrow = torch.uint8 if fmt.bits < 8 else torch.float8_e4m3fn
    result = {"weight": Spec(narrow, packed_shape(shape, fmt) if fmt.bits < 8 else shape)}
    blocks = Blocks.of(shape, scheme.scale, -1).scale_shape
    kind = torch.float32 if scheme.outer is None else torch.float8_e4m3fn
    result[SCALE] = Spec(kind, _like(found[SCALE].shape, blocks))
    if scheme.outer is not None:
        result[OUTER] = Spec(torch.float32, _like(found[OUTER].shape if OUTER in found else (), ()))
    if layout.static:
        result[INPUT] = Spec(torch.float32, _like(found[INPUT].shape if INPUT in found else (), ()))
    return result, shape


def _like(found: tuple[int, ...], blocks: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that is there where it is the blocks', with or without axes of length 1; else the blocks'."""
    squeezed = [tuple(n for n in shape if n != 1) for shape in (found, blocks)]
    return found if squeezed[0] == squeezed[1] and prod(found) == prod(blocks) else blocks


def _quantized_weight(
    recipe: Recipe, shape: tuple[int, int], dtype: torch.dtype, tensors: Tensors
) -> QuantizedTensor:
    """The weight of its tensors."""
    scheme = recipe.weight
    scale = tensors[SCALE].reshape(Blocks.of(shape, scheme.scale, -1).scale_shape)
    packed = scheme.format.bits < 8
    outer = tensors[OUTER].reshape(()) if OUTER in tensors else None
    stored = scale if scheme.outer is None else scale.view(torch.uint8)
    codes = tensors["weight"].view(torch.uint8)
    codes = _without_negative_zeros(codes) if packed else codes
    q = Quantized(codes, stored, outer, None, shape, 1, scheme, packed)
    return from_quantized(q, recipe, dtype, _static(recipe.activation, tensors))


def _without_negative_zeros(pairs: torch.Tensor) -> torch.Tensor:
    """Pairs of e2m1 codes with +0 for -0: the library's table of values has no -0."""
    low, high = pairs & 0x0F, pairs & 0xF0
    return torch.where(low == 0x08, 0, low) | torch.where(high == 0x80, 0, high)


def _static(inputs: Scheme | None, tensors: Tensors) -> Scales | None:
    """The static scale of inputs: of the second level where they have two."""
    if inputs is None or INPUT not in tensors:
        return None
    scale = tensors[INPUT].reshape(())
    return Scales(scale) if inputs.outer is None else Scales(None, scale)
