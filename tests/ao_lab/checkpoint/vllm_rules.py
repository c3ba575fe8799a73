"""Which of vLLM's kernels a group of a compressed-tensors configuration gets: vLLM's own rules, as a table.

Read from vllm-project/vllm, vllm/model_executor/layers/quantization/compressed_tensors/compressed_tensors.py,
`CompressedTensorsConfig._get_scheme_from_parts`, at commit e9476487b4856bd75dd3381dc60fd6cb86aade2e, and
`is_activation_quantization_format` of utils.py beside it. The first rule that matches decides; a group that none matches is
refused by vLLM when it loads. Which GPU has the kernels is not in the table. 4-bit integers beside 8-bit inputs of either
type are taken by W4A8Fp8, on compute capability 9.0 alone, whose kernel makes inputs float8: integer inputs are another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Formats that may quantize inputs there.
ACTIVATIONS = ("naive-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized")
#: Of a rule's `inputs`: whatever there is.
ANY = "any"
Fields = Mapping[str, tuple[Any, ...]]

SYMMETRIC: Fields = {"symmetric": (True,)}
CHANNELS: Fields = {"strategy": ("tensor", "channel")}
FP8: Fields = {
    "type": ("float",), "symmetric": (True,), "dynamic": (False,), "strategy": ("tensor", "channel", "block"),
}  # fmt: skip
NVFP4: Fields = {
    "type": ("float",), "num_bits": (4,), "strategy": ("tensor_group",), "group_size": (16,), "symmetric": (True,),
}  # fmt: skip
MX: Fields = {"type": ("float",), "strategy": ("group",), "group_size": (32,), "symmetric": (True,)}
TOKENS: Fields = {"strategy": ("token",), "dynamic": (True,)}


@dataclass(frozen=True)
class Rule:
    """A scheme of vLLM: what weights and inputs (None: not quantized) it takes, in which formats (none: in all)."""

    scheme: str
    weights: Fields
    inputs: Fields | str | None = ANY
    formats: tuple[str, ...] = field(default=())
    #: The type in which its kernel takes inputs, where its rule does not ask for it.
    computes: str | None = None

    def matches(self, group: Mapping[str, Any], fmt: str) -> bool:
        """Whether it takes a group of `config_groups`."""
        weights, inputs = group.get("weights"), group.get("input_activations")
        if weights is None or not _fits(weights, self.weights) or (self.formats and fmt not in self.formats):
            return False
        if isinstance(self.inputs, str):
            return self.inputs == ANY or inputs is not None
        if self.inputs is None or inputs is None:
            return self.inputs is None and inputs is None
        return _fits(inputs, self.inputs)


RULES = (
    Rule("CompressedTensorsW4A16Fp4", NVFP4, None),
    Rule("CompressedTensorsW4A4Mxfp4", {**MX, "num_bits": (4,)}),
    Rule("CompressedTensorsW8A8Mxfp8", {**MX, "num_bits": (8,), "scale_dtype": ("uint8",)}),
    Rule(
        "CompressedTensorsW4A8Fp8",
        {**SYMMETRIC, "num_bits": (4,), "strategy": ("group",), "dynamic": (False,)},
        {**TOKENS, **SYMMETRIC, "num_bits": (8,)},
        computes="float",
    ),
    Rule(
        "CompressedTensorsWNA16",
        {"num_bits": (4, 8), "strategy": ("channel", "group"), "dynamic": (False,)},
        None,
        ("pack-quantized",),
    ),
    Rule("QuantSpecScheme", NVFP4, NVFP4, ACTIVATIONS),
    Rule("CompressedTensorsW8A8Fp8", FP8, {"type": ("float",), "dynamic": (True, "local")}, ACTIVATIONS),
    Rule(
        "CompressedTensorsW8A8Fp8",
        FP8,
        {"type": ("float",), "symmetric": (True,), "strategy": ("tensor",)},
        ACTIVATIONS,
    ),
    Rule("CompressedTensorsW8A16Fp8", FP8, ANY, ACTIVATIONS),
    Rule(
        "CompressedTensorsW8A8Int8",
        {**CHANNELS, **SYMMETRIC, "num_bits": (8,), "dynamic": (False,)},
        {"num_bits": (8,), "strategy": ("tensor",), "dynamic": (False,)},
        ACTIVATIONS,
    ),
    Rule(
        "CompressedTensorsW8A8Int8",
        {**CHANNELS, **SYMMETRIC, "num_bits": (8,), "dynamic": (False,)},
        {**TOKENS, "num_bits": (8,)},
        ACTIVATIONS,
    ),
    Rule(
        "CompressedTensorsW4A8Int",
        {**SYMMETRIC, "num_bits": (4,), "strategy": ("group", "channel"), "dynamic": (False,)},
        {**TOKENS, "num_bits": (8,)},
        ACTIVATIONS,
    ),
)


def vllm_rule(group: Mapping[str, Any], fmt: str) -> Rule | None:
    """The rule by which vLLM takes a group of `config_groups`; None where it refuses it. `fmt`: of the whole model."""
    own = group.get("format") or fmt
    return next((rule for rule in RULES if rule.matches(group, own)), None)


def refused_by_vllm(quantization: Mapping[str, Any]) -> list[str]:
    """The groups of a `quantization_config` that vLLM refuses or computes otherwise, a sentence each."""
    told = []
    for name, group in quantization["config_groups"].items():
        rule = vllm_rule(group, quantization["format"])
        weights, inputs = group["weights"], group.get("input_activations")
        other = rule is not None and rule.computes is not None and inputs and inputs["type"] != rule.computes
        if rule is not None and not other:
            continue
        beside = "" if inputs is None else f" beside inputs of {_shown(inputs)}"
        own = group.get("format") or quantization["format"]
        told.append(f"{name}: vLLM has no scheme for weights of {_shown(weights)}{beside} in {own}")
    return told


def _fits(given: Mapping[str, Any], wanted: Fields) -> bool:
    return all(_plain(given.get(name)) in values for name, values in wanted.items())


def _plain(value: Any) -> Any:
    return value.removeprefix("torch.") if isinstance(value, str) else value


def _shown(arguments: Mapping[str, Any]) -> str:
    return f"{arguments['num_bits']}-bit {arguments['type']}, {arguments['strategy']}"
