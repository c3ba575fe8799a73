"""The trained model with quantized linear layers: a copy whose weights `quantize_` has quantized, and whose inputs may be too.

Every linear layer is quantized, the ones inside the blocks and lm_head; the embedding and the norms stay as they are. Weight
blocks run along the input features (the last axis of ``nn.Linear.weight``), activation blocks along the features of each
token, so both run along the axis that the matmul sums over. Activation scales are dynamic: found anew for each input, and
where one scale is over a whole tensor, for each sequence of a batch. The matmul itself is in float32 with the
dequantized weight, so that what is measured is the format and not an accumulator.

Which scheme quantizes the activations when a scheme quantizes the weights.

By default the same one: both operands of a matmul in one format. Some schemes are for weights only; the scheme of their
activations is named here, one entry each, and appears in the `setting` of every row that uses it. A scheme is weight-only where

* its blocks extend along both axes (128x128, 16x16), so that scales would mix tokens: the 1-row counterpart is used;
* its blocks extend over the flattened tensor, or its zero point is a float (NF4, tinygemm): kernels for these take activations
  in another format, int8 per token here, as in torchao's int4 weight with int8 dynamic activation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import fast
from ao_lab.config.base import SchemeConfig
from ao_lab.config.recipe import named
from ao_lab.quantization.api import quantize_
from ao_lab.quantization.groups import told_elsewhere
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from experiments.data.evaluation import Stored, stored, stored_plain
from experiments.models.llama import LanguageModel
from reference import SCHEMES, Scheme

#: Formats that are a plain cast: the baselines.
PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Round = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class QuantizedModel:
    """The model, what its parts take when stored, and how its linear layers' inputs are rounded (None: not at all)."""

    model: LanguageModel
    linears: Stored
    others: Stored
    round_input: Round | None


def quantized_model(model: LanguageModel, weights: str, activations: str | None) -> QuantizedModel:
    """A copy of the model in a scheme (or a plain format of PLAIN); the original stays as it is."""
    made = copy.deepcopy(model)
    sizes = cast_linears(made, PLAIN[weights]) if weights in PLAIN else quantize_linears(made, weights)
    round_input = None if activations is None else rounding(activations)
    if round_input is not None:
        shared = OncePerInput(round_input)
        for layer in made.linears().values():
            layer.register_forward_pre_hook(shared.hook)
    inside = {id(layer.weight) for layer in made.linears().values()}
    rest = [stored_plain(parameter) for parameter in made.parameters() if id(parameter) not in inside]
    return QuantizedModel(made, sizes, sum(rest, Stored(0)), round_input)


def quantize_linears(model: LanguageModel, scheme: str) -> Stored:
    """`quantize_` of every linear layer, then dense float32 weights again of what was stored; the bytes that are stored.

    ValueError where a scheme's blocks do not divide a layer.
    """
    with told_elsewhere():
        quantize_(model, SchemeConfig(scheme=scheme))
    sizes = Stored(0)
    for name, layer in model.linears().items():
        weight = layer.weight
        if not isinstance(weight, QuantizedTensor):
            raise ValueError(f"{name} of shape {tuple(weight.shape)} cannot be quantized in {scheme}")
        sizes += stored(weight.quantized)
        layer.weight = nn.Parameter(weight.dequantize(), requires_grad=False)
    return sizes


@contextmanager
def decoded_weights(model: nn.Module) -> Iterator[None]:
    """The model with float32 weights in place of quantized ones whose layers take their inputs as they are, then as it was.

    Their products are the same but for the order of float32 sums, without decoding a weight anew in every call. Layers that
    quantize or rotate their inputs stay.
    """
    found = [
        (layer, layer.weight)
        for layer in model.modules()
        if isinstance(layer, nn.Linear)
        and isinstance(layer.weight, QuantizedTensor)
        and layer.weight.recipe.activation is None
        and not layer.weight.recipe.rotation
    ]
    try:
        for layer, weight in found:
            layer.weight = nn.Parameter(weight.dequantize(torch.float32), requires_grad=False)
        yield
    finally:
        for layer, weight in found:
            layer.weight = weight


def cast_linears(model: LanguageModel, dtype: torch.dtype) -> Stored:
    """Every linear layer's weight rounded to a dtype, as float32; the bytes that it takes."""
    sizes = Stored(0)
    for layer in model.linears().values():
        cast = layer.weight.detach().to(dtype)
        layer.weight = nn.Parameter(cast.float(), requires_grad=False)
        sizes += stored_plain(cast)
    return sizes


def rounding(scheme: str) -> Round:
    """The function that takes an input (batch, time, features) through a scheme and back, sequence by sequence."""
    if scheme in PLAIN:
        return lambda x: x.to(PLAIN[scheme]).to(x.dtype)
    record = named(scheme)
    if not spans_rows(record):
        return lambda x: fast.fake_quantize(x, record)
    # A scale over the whole batch would let each sequence see the others.
    return lambda x: torch.stack([fast.fake_quantize(sequence, record) for sequence in x])


def spans_rows(scheme: Scheme) -> bool:
    """Whether some scale of a scheme is over more than one row (token) of its input."""
    block, flat = scheme.scale.block, scheme.scale.flat_size > 0
    return block == "tensor" or flat or isinstance(block, tuple) or scheme.outer is not None


class OncePerInput:
    """Rounds a layer's input; layers that read the same tensor (q, k and v; gate and up) share one rounding."""

    def __init__(self, round_input: Round) -> None:
        self.round_input = round_input
        self._last: tuple[Tensor, Tensor] | None = None

    def hook(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        """A forward pre-hook."""
        (x,) = inputs
        if self._last is None or self._last[0] is not x:
            self._last = (x, self.round_input(x))
        return (self._last[1],)


def layer_inputs(model: LanguageModel, tokens: Tensor) -> dict[str, Tensor]:
    """What every linear layer of the model is given on some text: name to (windows, time, features)."""
    inputs: dict[str, Tensor] = {}
    handles = []
    for name, layer in model.linears().items():

        def keep(layer: nn.Module, given: tuple[Tensor, ...], name: str = name) -> None:
            inputs[name] = given[0].detach()

        handles.append(layer.register_forward_pre_hook(keep))
    with torch.no_grad():
        model(tokens)
    for handle in handles:
        handle.remove()
    return inputs


ACTIVATIONS = {
    **{name: "int8_rowwise" for name in SCHEMES if name.startswith("hqq.")},
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
            "name the scheme of the activations in experiments.models.quantized_model.ACTIVATIONS"
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
