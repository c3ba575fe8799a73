"""A training step: forward and backward of one Llama on one batch, its memory, and what it is trained with.

The modules are those of `experiments.models.llama`: attention over the whole text, no cache, no dropout, no checkpointing.
Time and memory do not depend on the values of weights, which are random.

Variants are bfloat16, our QAT and torchao's for two recipes, and LoRA over frozen quantized weights. The least number of bytes
that each must move assumes recomputation: nothing is saved for backward that bfloat16 training does not save, so both operands
of every layer are rounded once in forward and once in backward. A pass reads and writes each element, 4 bytes of bfloat16.
Masking the gradients of saturated elements, which are rare, takes no pass.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.harness import revision
from experiments.harness.measuring import Values, Wrong
from experiments.harness.revision import TORCHAO
from experiments.models.llama import (
    DecoderLayer,
    LlamaConfig,
    random_weights,
    rotary_tables,
    scaled_frequencies,
)
from fast.cost import Coefficients

GB, MB = 1e9, 1e6


@dataclass
class Trainer:
    """A model with its batch. Decoder layers take the residual stream and the gradient of their output, a whole model tokens.

    result: the output before anything was timed, float32.
    """

    model: DecoderLayers | ModelWithLoss
    inputs: Tensor
    gradient: Tensor | None
    result: Tensor = field(default_factory=lambda: torch.empty(0))

    @classmethod
    def of(
        cls, config: LlamaConfig, batch: int, length: int, device: str, seed: int, *, whole: bool
    ) -> Trainer:
        """A random model and a random batch, the same for the same seed."""
        model = random_model(config, length, device, seed, whole=whole)
        generator = torch.Generator(device).manual_seed(seed + 1)
        options: dict[str, Any] = {"generator": generator, "device": device}
        if whole:
            return cls(model, torch.randint(0, config.vocabulary, (batch, length), **options), None)
        size = (batch, length, config.width)
        x, g = (torch.randn(size, dtype=torch.bfloat16, **options) for _ in range(2))
        return cls(model, x.requires_grad_(), g)

    def compile(self, backend: str) -> None:
        """Compile each decoder layer; they are alike, so one program serves them all."""
        for layer in layers_of(self.model).layers:
            layer.compile(backend=backend)

    def output(self) -> Tensor:
        """The model's output, float32, without gradients; called before it is compiled."""
        with torch.no_grad():
            return self.model(self.inputs).float()

    def step(self) -> None:
        """Forward and backward; gradients are freed, as the next step's are new."""
        self.backward(self.model(self.inputs))
        self.clear()

    def backward(self, y: Tensor) -> None:
        """Backward from the output of forward."""
        torch.autograd.backward([y], None if self.gradient is None else [self.gradient])

    def clear(self) -> None:
        """Free all gradients."""
        self.model.zero_grad(set_to_none=True)
        self.inputs.grad = None

    def first_step(self) -> Tensor:
        """The output of a step, float32; `Wrong` where a gradient is missing or not finite.

        A compiled model is compiled here, once: without gradients it would be another program.
        """
        y = self.model(self.inputs)
        self.backward(y)
        bad = [
            name
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
            and (parameter.grad is None or not torch.isfinite(parameter.grad).all())
        ]
        self.clear()
        if bad:
            raise Wrong(f"{len(bad)} parameters have no finite gradient: {', '.join(bad[:3])}")
        return y.detach().float()

    def memory(self) -> Values:
        """Bytes saved for backward, and on a GPU the peak of a step, this model's own tensors included."""
        values: Values = {"kept for backward": (self.saved_bytes() / MB, "MB")}
        if self.inputs.is_cuda:
            gc.collect()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.step()
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before + self.own_bytes()
            values["peak memory"] = (peak / GB, "GB")
        return values

    def own_bytes(self) -> int:
        """Bytes of the model's weights and of its batch."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Weights, buffers and batch; of a quantized weight its parts."""
        return [
            part
            for tensor in (*self.model.parameters(), *self.model.buffers(), self.inputs)
            for part in parts_of(tensor)
        ]

    def saved_bytes(self) -> int:
        """Bytes that autograd saves between forward and backward, without those of `own_bytes`; each tensor once."""
        own = {id_of(tensor) for tensor in self.tensors()}
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            if id_of(tensor) not in own:
                saved[id_of(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        # Saved tensors stay alive until all are counted, so that no two have the same address.
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = self.model(self.inputs)
        total = sum(saved.values())
        self.backward(y)
        self.clear()
        return total


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The plain tensors in a tensor subclass; a plain tensor itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [part for name in tensor.__tensor_flatten__()[0] for part in parts_of(getattr(tensor, name))]


def id_of(tensor: Tensor) -> int:
    """The address that identifies a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


class DecoderLayers(nn.Module):
    """Decoder layers one after the other, over texts of one length."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, config: LlamaConfig, length: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        for name in ("cosine", "sine"):
            self.register_buffer(name, torch.empty(length, config.head_dim), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream (batch, length, width) after all layers."""
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine)
        return x

    def fill_tables(self, config: LlamaConfig) -> None:
        """Write the rotary tables into their buffers."""
        positions = torch.arange(len(self.cosine), dtype=torch.float32, device=self.cosine.device)
        cosine, sine = rotary_tables(positions, scaled_frequencies(config).to(positions.device))
        self.cosine.copy_(cosine)
        self.sine.copy_(sine)


class ModelWithLoss(nn.Module):
    """Embedding, decoder layers, norm and an output layer tied to the embedding; returns the loss of the next token."""

    def __init__(self, config: LlamaConfig, length: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
        self.blocks = DecoderLayers(config, length)
        self.norm = nn.RMSNorm(config.width, eps=config.epsilon)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, length) to the mean loss, float32."""
        x = self.norm(self.blocks(self.embed_tokens(tokens)))
        logits = functional.linear(x[:, :-1], self.embed_tokens.weight).flatten(0, 1)
        return functional.cross_entropy(logits.float(), tokens[:, 1:].flatten())


def layers_of(model: DecoderLayers | ModelWithLoss) -> DecoderLayers:
    """The decoder layers of either."""
    return model.blocks if isinstance(model, ModelWithLoss) else model


OURS, BASELINE = "ours", "bfloat16"
LORA = "LoRA"
INT8_INT4, INT4 = "int8 dynamic, int4 g32", "int4 weight-only g128"
INT8, FLOAT8 = "int8 dynamic, int8 rows", "float8 dynamic, float8 rows"
#: How operands are multiplied where not by torch in bfloat16: as codes in forward, or by a recipe of training in all three.
CODES, BY_ROWWISE = "products of codes", "products by rowwise"
#: Bytes moved to round one element from bfloat16 to bfloat16, and how often a step does that.
BYTES_PER_ELEMENT, PASSES = 4, 2
#: Copy rate of an H200 that bounds are computed with, bytes a second: rows say that it is assumed.
COPY_RATE: float = Coefficients("h200").copy


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe as a configuration of both libraries, and whether it rounds inputs too. torchao: None where only ours is
    measured."""

    ours: Callable[[], Any]
    torchao: Callable[[], Any] | None
    inputs: bool


def int8_int4() -> Any:
    """Ours: 8-bit integers with zero points per token, 4-bit integers in groups of 32."""
    from ao_lab import Int8DynamicActivationIntxWeightConfig, PerGroup

    return Int8DynamicActivationIntxWeightConfig(weight_dtype="int4", weight_granularity=PerGroup(32))


def torchao_int8_int4() -> Any:
    """The same in torchao."""
    import torch
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig
    from torchao.quantization.granularity import PerGroup

    return Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))


def int4() -> Any:
    """Ours: 4-bit integers with zero points in groups of 128."""
    from ao_lab import Int4WeightOnlyConfig

    return Int4WeightOnlyConfig(group_size=128)


def torchao_int4() -> Any:
    """The same in torchao."""
    from torchao.quantization import Int4WeightOnlyConfig

    return Int4WeightOnlyConfig(group_size=128)


def int8(kernel: str = "auto") -> Any:
    """8-bit integers, inputs with a scale for each token, weights with one for each row."""
    from ao_lab import Int8DynamicActivationInt8WeightConfig

    return Int8DynamicActivationInt8WeightConfig(kernel=kernel)


def float8(kernel: str = "auto") -> Any:
    """8-bit floats (E4M3), with such scales."""
    from ao_lab import Float8DynamicActivationFloat8WeightConfig, PerRow

    return Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), kernel=kernel)


RECIPES = {
    INT8_INT4: Recipe(ours=int8_int4, torchao=torchao_int8_int4, inputs=True),
    INT4: Recipe(ours=int4, torchao=torchao_int4, inputs=False),
    INT8: Recipe(ours=int8, torchao=None, inputs=True),
    FLOAT8: Recipe(ours=float8, torchao=None, inputs=True),
}
#: Recipes that are compared with torchao's.
COMPARED = (INT8_INT4, INT4)
#: Kernels that multiply codes in forward, of the recipes that have one: that of the converted layer, with its bits.
KERNELS = {INT8: "int8", FLOAT8: "scaled_mm"}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to train.

    library, recipe: whose QAT, for which recipe; together they name a method. lora: whether only LoRA adapters are trained,
    over weights that are quantized and frozen. products: "", CODES or BY_ROWWISE.
    """

    library: str = BASELINE
    recipe: str = ""
    lora: bool = False
    products: str = ""

    @property
    def method(self) -> str:
        """The name of its rows."""
        name = f"{self.library}, {self.recipe}" if self.recipe else self.library
        name = f"{name}, {self.products}" if self.products else name
        return f"{name}, {LORA}" if self.lora else name

    @property
    def rounds(self) -> bool:
        """Whether it rounds the operands of the layers it trains."""
        return bool(self.recipe) and not self.lora

    def prepare(self, model: DecoderLayers | ModelWithLoss) -> None:
        """Prepare the linear layers of the decoder layers for QAT with the recipe."""
        if self.library == OURS:
            from ao_lab import LoRA, QATConfig, convert_for_training_, quantize_

            if self.lora:
                model.requires_grad_(False)
            ours = RECIPES[self.recipe].ours
            base = ours(KERNELS[self.recipe]) if self.products == CODES else ours()
            quantize_(
                layers_of(model),
                QATConfig(base, step="prepare", lora=LoRA() if self.lora else None),
                is_linear,
            )
            if self.products == BY_ROWWISE:
                convert_for_training_(layers_of(model), "rowwise")
        elif self.library == TORCHAO:
            from torchao.quantization import quantize_
            from torchao.quantization.qat import QATConfig

            theirs = RECIPES[self.recipe].torchao
            if theirs is None:
                raise ValueError(f"{self.recipe} is not compared with torchao's")
            quantize_(layers_of(model), QATConfig(theirs(), step="prepare"), is_linear)

    def missing(self) -> str | None:
        """Why it cannot be trained here; None where it can."""
        return revision.missing(TORCHAO) if self.library == TORCHAO else None


def is_linear(module: nn.Module, name: str) -> bool:
    """The filter of `quantize_`: every nn.Linear, subclasses excluded."""
    return type(module) is nn.Linear


PLAIN = Variant()
VARIANTS = (
    PLAIN,
    *(Variant(library=library, recipe=recipe) for recipe in COMPARED for library in (OURS, TORCHAO)),
    Variant(library=OURS, recipe=INT8_INT4, lora=True),
)
#: QAT whose products are faster than those of bfloat16, each beside the same with torch's.
FASTER = (
    PLAIN,
    *(Variant(library=OURS, recipe=one, products=how) for one in KERNELS for how in ("", CODES)),
    *(Variant(library=OURS, recipe=one, products=how) for one in COMPARED for how in ("", BY_ROWWISE)),
)


def rounding_bytes(recipe: Recipe, layers: list[tuple[int, int]], tokens: int) -> int:
    """Bytes that one step must move to round the operands of linear layers, given as (outputs, inputs)."""
    elements = sum(outputs * inputs + recipe.inputs * tokens * inputs for outputs, inputs in layers)
    return elements * BYTES_PER_ELEMENT * PASSES


def linear_shapes(model: nn.Module) -> list[tuple[int, int]]:
    """(outputs, inputs) of every linear layer."""
    return [
        (layer.out_features, layer.in_features) for layer in model.modules() if isinstance(layer, nn.Linear)
    ]


def random_model(
    config: LlamaConfig,
    length: int,
    device: str,
    seed: int,
    *,
    whole: bool,
    dtype: torch.dtype = torch.bfloat16,
) -> DecoderLayers | ModelWithLoss:
    """Decoder layers, or a whole model, with random normal weights, allocated where they stay."""
    build = ModelWithLoss if whole else DecoderLayers
    model: DecoderLayers | ModelWithLoss = random_weights(lambda: build(config, length), device, seed, dtype)
    layers_of(model).fill_tables(config)
    return model
