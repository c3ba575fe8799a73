"""The `quantization_config` of a folder in compressed-tensors' formats: which layers are stored how, as data."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ao_lab.checkpoint.io.strict_json import shown
from ao_lab.config.compressed_tensors import input_arguments, weight_arguments
from ao_lab.config.recipe import Recipe


def quantization_config(
    layers: Mapping[str, tuple[str, Recipe, bool]], dense: list[str], heads: Collection[str] = ()
) -> dict[str, Any]:
    """The configuration of a model: (format, recipe, whether inputs are static) of each quantized module, and the dense ones.

    One group for each different recipe. A single group is for all nn.Linear but the dense ones; several name their layers
    (transformers 5.23 reads those without dequantize=True only). `heads`: modules that compute logits. vLLM's layer for them
    (ParallelLMHead) is no linear layer to it, so the group of a quantized one names it too, wherever it lies.
    """
    groups: dict[tuple[str, Recipe, bool], list[str]] = {}
    for name, how in layers.items():
        groups.setdefault(how, []).append(name)
    result = {}
    for index, ((name, recipe, static), members) in enumerate(groups.items()):
        result[f"group_{index}"] = {
            "targets": [*(["Linear"] if len(groups) == 1 else members), *_named_heads(members, heads)],
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
        "config_groups": result,
        "ignore": sorted(dense),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _named_heads(members: Collection[str], heads: Collection[str]) -> list[str]:
    """Patterns for the heads among a group's layers."""
    leaves = {name.rpartition(".")[2] for name in heads if name in members}
    return [f"re:.*{re.escape(leaf)}$" for leaf in sorted(leaves)]


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


__all__ = ["check_groups", "quantization_config"]
