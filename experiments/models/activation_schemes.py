"""Which scheme quantizes the activations when a scheme quantizes the weights.

By default the same one: both operands of a matmul in one format. Some schemes are for weights only; the scheme of their
activations is named here, one entry each, and appears in the `setting` of every row that uses it. A scheme is weight-only where

* its blocks extend along both axes (128x128, 16x16), so that scales would mix tokens: the 1-row counterpart is used;
* its blocks extend over the flattened tensor, or its zero point is a float (NF4, tinygemm): kernels for these take activations
  in another format, int8 per token here, as in torchao's int4 weight with int8 dynamic activation.
"""

from __future__ import annotations

from ao_lab.config.recipe import named
from reference import Scheme

ACTIVATIONS = {
    "fp8_128x128": "fp8_1x128",
    "fp8_128x128_e5m2": "fp8_1x128_e5m2",
    "torchao.fp8_128x128_inference": "torchao.fp8_1x128_inference",
    "torchao.fp8_128x128_inference_e5m2": "torchao.fp8_1x128_inference_e5m2",
    "te.nvfp4_16x16": "te.nvfp4",
    "nf4": "int8_rowwise",
    "torchao.nf4": "torchao.int8_rowwise_asymmetric",
    "torchao.int4_g32_tinygemm": "torchao.int8_rowwise_asymmetric",
    "torchao.int4_g64_tinygemm": "torchao.int8_rowwise_asymmetric",
    "torchao.int4_g128_tinygemm": "torchao.int8_rowwise_asymmetric",
    "torchao.int4_g256_tinygemm": "torchao.int8_rowwise_asymmetric",
}

WEIGHTS = "weights"


def is_weight_only(scheme: Scheme) -> bool:
    """Whether activations need another scheme; see the text above."""
    scale = scheme.scale
    shared = isinstance(scale.block, tuple) or scale.flat_size > 0
    return shared or (scheme.zero is not None and scheme.zero.rule == "value")


def activation_scheme(weight_scheme: str) -> str:
    """The activations' scheme; ValueError where a weight-only scheme has none in ACTIVATIONS."""
    if weight_scheme in ACTIVATIONS:
        return ACTIVATIONS[weight_scheme]
    if is_weight_only(named(weight_scheme)):
        raise ValueError(
            f"scheme {weight_scheme!r} is for weights only (its blocks mix tokens, or its zero point is a float): "
            "name the scheme of the activations in experiments.models.activation_schemes.ACTIVATIONS"
        )
    return weight_scheme


def setting_name(activations: str | None) -> str:
    """The setting of rows: "weights", or "weights + activations in X"."""
    return WEIGHTS if activations is None else f"{WEIGHTS} + activations in {activations}"


def activations_of(setting: str) -> str | None:
    """The activations' scheme that a setting names, or None."""
    head, _, name = setting.partition(" + activations in ")
    if head != WEIGHTS:
        raise ValueError(f"a setting is 'weights' or 'weights + activations in X', got {setting!r}")
    return name or None
