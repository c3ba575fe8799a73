"""The `quantization_config` of a folder in compressed-tensors' formats: which layers are stored how, as data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ao_lab.checkpoint.io.strict_json import shown
from ao_lab.config.recipe import Recipe
from reference import Scheme

#: Storage of scales as compressed-tensors names it; float32 is its default.
SCALE_DTYPES = {"float8_e8m0fnu": "torch.uint8", "float8_e4m3fn": "torch.float8_e4m3fn"}


def quantization_config(layers: Mapping[str, tuple[str, Recipe, bool]], dense: list[str]) -> dict[str, Any]:
    """The configuration of a model: (format, recipe, whether inputs are static) of each quantized module, and the dense ones.

    One group for each different recipe. A single group is for all nn.Linear but the dense ones; several name their layers
    (transformers 5.23 reads those without dequantize=True only).
    """
    groups: dict[tuple[str, Recipe, bool], list[str]] = {}
    for name, how in layers.items():
        groups.setdefault(how, []).append(name)
    made = {}
    for index, ((name, recipe, static), members) in enumerate(groups.items()):
        made[f"group_{index}"] = {
            "targets": ["Linear"] if len(groups) == 1 else members,
            "weights": weight_arguments(recipe.weight),
            "input_activations": None
            if recipe.activation is None
            else input_arguments(recipe.activation, static),
            "output_activations": None,
            "format": name,
        }
    formats = {name for name, _, _ in groups}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": made,
        "ignore": sorted(dense),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def check_groups(given: Mapping[str, Any], weights: Iterable[tuple[str, Recipe]], where: str) -> None:
    """ValueError where a folder's configuration describes weights as none of these (format, recipe) are stored.

    Readers of compressed-tensors go by the configuration, `load_pretrained` by its records: they must mean one thing. Which
    layers a group is for (`targets`, `ignore`) is not looked at; no pattern of a file is ever matched.
    """
    known = {(fmt, recipe.weight.key): weight_arguments(recipe.weight) for fmt, recipe in weights}
    groups = given.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ValueError(f"{where} has no config_groups, got {shown(groups)}; fetch it again")
    for name, group in groups.items():
        arguments = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(arguments, dict) or not isinstance(group.get("targets"), list):
            raise ValueError(
                f"{where}: {shown(name)} names targets and describes weights, got {shown(group)}; fetch it again"
            )
        fmt = group.get("format") or given.get("format")
        wrong = [
            next(
                (key for key in wanted if arguments.get(key) != wanted[key]), "format" if kind != fmt else ""
            )
            for (kind, _), wanted in known.items()
        ]
        if not wrong:
            raise ValueError(
                f"{where}: {shown(name)} is there, and the records name no weights; fetch it again"
            )
        if all(wrong):
            got = arguments.get(wrong[0], fmt)
            raise ValueError(
                f"{where}: {shown(name)} is of no weight of the files: {wrong[0]} is {shown(got)}; fetch it again"
            )


def weight_arguments(scheme: Scheme) -> dict[str, Any]:
    """QuantizationArgs of a weight."""
    return {**_arguments(scheme, "channel"), "dynamic": False}


def input_arguments(scheme: Scheme, static: bool) -> dict[str, Any]:
    """QuantizationArgs of an input; ValueError for a scheme that compressed-tensors' readers do not compute."""
    scale = scheme.scale
    if scheme.outer is not None or isinstance(scale.block, tuple) or scale.flat_size:
        raise ValueError(f"compressed-tensors does not quantize inputs in {scheme.name} as they come")
    return {**_arguments(scheme, "token"), "dynamic": not static}


def _arguments(scheme: Scheme, row: str) -> dict[str, Any]:
    block, fmt = scheme.scale.block, scheme.format
    if fmt.kind not in ("int", "float") or fmt.fraction_bits:
        raise ValueError(f"compressed-tensors has no elements {fmt.name}")
    if fmt.kind == "float" and fmt.name not in ("float8_e4m3fn", "float6_e2m3fn", "float4_e2m1fn"):
        raise ValueError(f"compressed-tensors has no elements {fmt.name}")
    strategy = {"-1": row, "tensor": "tensor"}.get(
        str(block), "block" if isinstance(block, tuple) else "group"
    )
    made: dict[str, Any] = {
        "num_bits": fmt.bits,
        "type": fmt.kind,
        "symmetric": scheme.zero is None,
        "strategy": "tensor_group" if scheme.outer is not None else strategy,
        "group_size": block if strategy == "group" else None,
        "block_structure": list(block) if isinstance(block, tuple) else None,
    }
    storage = SCALE_DTYPES.get(scheme.scale.storage)
    return made if storage is None else {**made, "scale_dtype": storage, "zp_dtype": storage}


__all__ = ["check_groups", "input_arguments", "quantization_config", "weight_arguments"]
