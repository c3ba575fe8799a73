"""`QATConfig`: quantization-aware training for every configuration of `quantize_`, in torchao's two steps.

    quantize_(model, QATConfig(base_config, step="prepare"))
    train(model)
    quantize_(model, QATConfig(base_config, step="convert"))

Between the two the weights are dense parameters and layers compute with what quantization will leave of them
(`ao_lab.qat.layers`). Codes, scales, zero points and dequantized weights after step "convert" are, bit for bit, those of the
last forward on the same weights. Step "convert" without a base_config makes dense layers again, as in torchao.

Static activations take their scale from `act_quant_scale`, or from `forward_loop=` / `observers=` of step "prepare".
`learn_scales=True` makes scales parameters (`qat_scale`, `qat_input_scale`; learned step sizes, arXiv 1902.08153), for schemes
that keep them in float32; zero points that are codes stay as they were found. A scale that training makes zero or negative
counts as the smallest there is, 2**-126, and still gets its gradient, so that it can come back. Scales start where the scheme's
rule puts them or, with `scale_start="error"`, where rounding the weight costs the least squared error, which pays from 3 bits
down; given `calibration=` and `methods=(Clip(),)` in the call of step "prepare", where these put them
(`ao_lab.qat.starts`). With `start_step=n` layers are plain until `advance_qat(model)`, called after each optimizer step, has
been called n times; the count is in the state_dict. With `lora` weights are quantized and frozen, and adapters beside them
train (`ao_lab.qat.lora`).

Published schemes of quantization-aware training, as configurations of whole models.

`llama32_qat` is that of the quantized Llama 3.2 models: in the blocks 4-bit weights in groups of 32 and 8-bit activations per
token, found for each input; in the classifier 8-bit weights per channel and 8-bit activations per token; in the embedding 8
bits per channel. They were trained in two rounds:

    quantize_(model, llama32_qat())                                # QAT of dense weights
    quantize_(model, llama32_qat(step="convert"))                  # the frozen backbone
    quantize_(model, llama32_qat(lora=LoRA(rank=16)))              # adapters in the blocks' linear layers alone
    quantize_(model, llama32_qat(step="convert"))                  # merged, or leave this out and serve the adapters
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, ClassVar, Self

import torch
from torch import nn

from ao_lab.config.base import Config, FqnToConfig, Observer, SchemeConfig
from ao_lab.config.classes import (
    Int8DynamicActivationIntxWeightConfig,
    IntxWeightOnlyConfig,
    float8_scheme,
    integer_bits,
)
from ao_lab.config.granularity import ROWS, PerGroup, PerRow, PerTensor, block_of
from ao_lab.config.recipe import Recipe, integer_scheme
from ao_lab.qat.layers import unsupported_reason
from ao_lab.transforms.layers import ConvertedModule, check_model
from reference import Scales, Scheme
from reference.arrays.namespace import choice

#: Modules by the names that transformers and the authors' own code give them.
BLOCKS = r"re:(?:.*\.)?layers\.\d+\..+"
CLASSIFIER = r"re:(?:.*\.)?(?:lm_head|output)"
EMBEDDING = r"re:(?:.*\.)?(?:embed_tokens|tok_embeddings)"


def llama32_configs(group_size: int = 32) -> dict[str, Config]:
    """The configurations of Llama 3.2, by patterns of names; activations have a zero point per token, weights have none."""
    blocks = Int8DynamicActivationIntxWeightConfig(
        weight_dtype="int4", weight_granularity=PerGroup(group_size)
    )
    classifier = Int8DynamicActivationIntxWeightConfig(weight_dtype="int8", weight_granularity=ROWS)
    embedding = IntxWeightOnlyConfig(weight_dtype="int8", granularity=ROWS)
    return {BLOCKS: blocks, CLASSIFIER: classifier, EMBEDDING: embedding}


def llama32_qat(
    step: str = "prepare", *, lora: LoRA | None = None, group_size: int = 32, learn_scales: bool = False
) -> FqnToConfig:
    """The Llama 3.2 QAT scheme for `quantize_`, in either step; each of its three patterns must match something.

    lora: the second round. Blocks get adapters; classifier and embedding are only quantized and frozen. A classifier that is
    tied to the embedding stays tied in both rounds: one weight, 8 bits with a scale per row of the vocabulary, which both have.
    """

    def of(name: str, config: Config) -> QATConfig:
        adapters = lora if lora is None or name == BLOCKS else LoRA(rank=0, rounds=lora.rounds)
        return QATConfig(config, step=step, lora=adapters, learn_scales=learn_scales)

    return FqnToConfig({name: of(name, config) for name, config in llama32_configs(group_size).items()})


STEPS = ("prepare", "convert")
STARTS = ("rule", "error")


@dataclass(frozen=True)
class LoRA:
    """LoRA adapters: rank, alpha (their output is scaled by alpha / rank; default: 2 * rank), dropout of their input, dtype.

    Rank 0: no adapters; the weight is quantized and frozen. rounds: "base", the weight is quantized at once and adapters stand
    beside it; "sum", it stays dense and frozen, and each forward rounds its sum with the adapters, as the merged layer will be.
    freeze_rest: whether
    step "prepare" freezes all other parameters of the model, so that adapters alone train (as peft does); False leaves those
    that it does not name as they are. Of several configurations in one FqnToConfig each has to say True. dtype: FSDP1 joins
    parameters of one dtype, so that there it has to be that of the model (`fully_shard` takes both).
    """

    rank: int = 16
    alpha: float | None = None
    dropout: float = 0.0
    dtype: torch.dtype = torch.bfloat16
    rounds: str = "base"
    freeze_rest: bool = True

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 0:
            raise ValueError(f"LoRA: rank is an integer, 0 or more, got {self.rank!r}")
        if self.alpha is not None and (not isfinite(self.alpha) or self.alpha <= 0):
            raise ValueError(f"LoRA: alpha is a positive number, got {self.alpha!r}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"LoRA: dropout is a probability below 1, got {self.dropout!r}")
        if self.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"LoRA: adapters are bfloat16, float16 or float32, got {self.dtype}")
        choice(self.rounds, ("base", "sum"), "LoRA: rounds")
        if not isinstance(self.freeze_rest, bool):
            raise TypeError(f"LoRA: freeze_rest is True or False, got {self.freeze_rest!r}")
        if self.rounds == "sum" and self.dropout:
            raise ValueError("LoRA: dropout is of the adapters' own input; under rounds='sum' they have none")

    @property
    def factor(self) -> float:
        """alpha / rank."""
        return 2.0 if self.alpha is None else self.alpha / max(self.rank, 1)

    def __str__(self) -> str:
        more = f", dropout {self.dropout:g}" if self.dropout else ""
        more += ", the sum is rounded" if self.rounds == "sum" else ""
        return f"LoRA: rank {self.rank}, alpha {self.factor * self.rank:g}{more}; frozen; step='convert' merges it"


@dataclass(frozen=True)
class QATConfig(Config, registered=False):
    """Quantization-aware training for a configuration: step "prepare" starts it, step "convert" ends it; see the module text.

    Instead of base_config, step "prepare" takes weight_config and activation_config: schemes, by name or record.
    """

    base_config: Config | None = None
    activation_config: str | Scheme | None = None
    weight_config: str | Scheme | None = None
    step: str = field(default="prepare", kw_only=True)
    learn_scales: bool = field(default=False, kw_only=True)
    #: Of learned scales: "lsq" divides it by sqrt(elements of a block * largest code), of inputs by sqrt(features * largest
    #: code), however many rows there are; "sum" leaves it.
    scale_gradient: str = field(default="lsq", kw_only=True)
    start_step: int = field(default=0, kw_only=True)
    #: Adapters beside frozen, quantized weights.
    lora: LoRA | None = field(default=None, kw_only=True)
    #: Where learned scales start: "rule", at those of the scheme; "error", at those with the least squared error of rounding.
    scale_start: str = field(default="rule", kw_only=True)
    SCHEME_FIELDS: ClassVar[tuple[str, str]] = ("weight_config", "activation_config")

    def __post_init__(self) -> None:
        choice(self.step, STEPS, "QATConfig: step")
        choice(self.scale_gradient, ("lsq", "sum"), "QATConfig: scale_gradient")
        choice(self.scale_start, STARTS, "QATConfig: scale_start")
        if self.scale_start != "rule" and not self.learn_scales:
            raise ValueError(
                "QATConfig: scale_start says where learned scales start; give learn_scales=True as well"
            )
        if type(self.start_step) is not int or self.start_step < 0:
            raise ValueError(f"QATConfig: start_step is a number of steps, got {self.start_step!r}")
        self._check_base()
        object.__setattr__(self, "axis", self._base.axis)
        if self.step == "convert" and (self.learn_scales or self.start_step or self.lora is not None):
            raise ValueError("QATConfig: learn_scales, start_step and lora belong to step='prepare'")
        if self.lora is not None:
            self._check_lora(self.lora)
        if self.step == "prepare":
            self._check_trainable(self.recipe())

    def _check_base(self) -> None:
        """What may stand in for base_config, and where."""
        given = (self.scheme, self.activation_scheme, self.kernel, self.axis)
        if given != (None, None, "auto", None):
            raise ValueError(
                "QATConfig: scheme, activation_scheme, kernel and axis are those of base_config; give them there"
            )
        if self.base_config is not None and (
            not isinstance(self.base_config, Config) or isinstance(self.base_config, QATConfig)
        ):
            raise TypeError(
                f"QATConfig: base_config is a configuration of ao_lab, got {type(self.base_config).__name__}"
            )
        direct = self.weight_config is not None or self.activation_config is not None
        if direct and (self.base_config is not None or self.step == "convert"):
            raise ValueError("QATConfig: weight_config and activation_config are for step='prepare' alone")
        if self.step == "prepare" and self.base_config is None and self.weight_config is None:
            raise ValueError("QATConfig: step='prepare' needs base_config, or weight_config")

    def _check_lora(self, lora: LoRA) -> None:
        """What does not go with a frozen base."""
        if not isinstance(lora, LoRA):
            raise TypeError(f"QATConfig: lora is an ao_lab.LoRA, got {type(lora).__name__}")
        if self.learn_scales or self.start_step or self.base_config is None:
            raise ValueError(
                "QATConfig: lora trains adapters on weights that are frozen and quantized from the start, by base_config; "
                "leave learn_scales, start_step, weight_config and activation_config out"
            )
        if self.axis not in (None, -1):
            raise ValueError(f"QATConfig: lora is for weights (out, in), axis=-1; got axis={self.axis}")

    def _check_trainable(self, recipe: Recipe) -> None:
        """ValueError for a recipe that has no gradient."""
        if recipe.weight.rounding == "stochastic" or (
            recipe.activation is not None and recipe.activation.rounding == "stochastic"
        ):
            raise ValueError(
                f"QATConfig: {recipe} rounds by random words, which layers have none of; use one that rounds to nearest"
            )
        static = self.base_config is not None and hasattr(self.base_config, "given")
        for scheme in (recipe.weight, recipe.activation if static else None) if self.learn_scales else ():
            if scheme is not None and not has_learnable_scales(scheme):
                raise ValueError(
                    f"QATConfig: scales of {scheme.name} are stored in {scheme.scale.storage}"
                    f"{', on two levels' if scheme.outer else ''}: no number that a gradient could move; "
                    f"leave learn_scales out"
                )

    @property
    def _base(self) -> Config:
        """The configuration to train for."""
        if self.base_config is not None or self.weight_config is None:
            return self.base_config or SchemeConfig(scheme="int8_rowwise")
        return SchemeConfig(scheme=self.weight_config, activation_scheme=self.activation_config)

    def recipe(self) -> Recipe:
        """That of the base configuration."""
        return self._base.recipe()

    def input_scales(self) -> Scales | None:
        """Those of the base configuration."""
        return self._base.input_scales()

    def observer(self) -> Observer | None:
        """What finds the static scales of inputs before training."""
        return self._base.observer()

    def unsupported_reason(self, module: nn.Module) -> str | None:
        """Why a module cannot train; None where it can."""
        return unsupported_reason(module)

    def for_layout(self, layout: str) -> Self:
        """See `Config.for_layout`: that of the base configuration."""
        if self.base_config is None:
            return super().for_layout(layout)
        base = self.base_config.for_layout(layout)
        return replace(self, base_config=base)._with_changes(base.changes)


def has_learnable_scales(scheme: Scheme) -> bool:
    """Whether scales are float32 numbers on one level that multiply codes."""
    scale = scheme.scale
    return (scale.storage, scale.stored, scheme.outer) == ("float32", "decode", None)


def IntxFakeQuantizeConfig(
    dtype: Any, granularity: Any = None, *, group_size: int | None = None, is_symmetric: bool = True
) -> Scheme:
    """torchao's description of fake-quantized integers, as the scheme that it names."""
    wanted = PerGroup(group_size) if group_size is not None else granularity
    names = {"per_token": PerRow(), "per_channel": PerRow(), "per_tensor": PerTensor(), None: PerRow()}
    block = block_of(names.get(wanted, wanted) if wanted is None or isinstance(wanted, str) else wanted)
    return integer_scheme(integer_bits(dtype), block, not is_symmetric)


def Float8FakeQuantizeConfig(dtype: Any = "float8_e4m3fn", granularity: Any = None) -> Scheme:
    """torchao's description of fake-quantized float8, as the scheme that it names."""
    return float8_scheme(dtype, granularity or PerRow())


def IntXQuantizationAwareTrainingConfig(
    activation_config: Any = None, weight_config: Any = None
) -> QATConfig:
    """torchao's earlier name of step "prepare"."""
    return QATConfig(activation_config=activation_config, weight_config=weight_config, step="prepare")


def FromIntXQuantizationAwareTrainingConfig() -> QATConfig:
    """torchao's earlier name of step "convert" to dense layers."""
    return QATConfig(step="convert")


FakeQuantizeConfig = IntxFakeQuantizeConfig


def advance_qat(model: nn.Module) -> None:
    """Count one step for layers with a delayed start: call it after optimizer.step().

    Layers that share a weight share its count, which goes up by one all the same; also where each has it as a tensor of its own
    over the same memory, as after `load_state_dict(assign=True)`. A UserWarning where no layer is prepared.
    """
    check_model(model)
    if not any(isinstance(module, ConvertedModule) and module.preparation for module in model.modules()):
        warnings.warn(
            "advance_qat: no layer of the model is prepared for QAT, so that nothing is counted; call quantize_ with "
            "QATConfig(..., step='prepare') first",
            UserWarning,
            stacklevel=2,
        )
    steps = [step for module in model.modules() if (step := module._buffers.get("qat_step")) is not None]
    # Tensors without memory (meta, fake ones, DTensors) are the same only as objects.
    counts = {(step.device, step.data_ptr() or id(step)): step for step in steps}
    for step in counts.values():
        step.add_(1)


__all__ = [
    "FakeQuantizeConfig",
    "Float8FakeQuantizeConfig",
    "FromIntXQuantizationAwareTrainingConfig",
    "IntXQuantizationAwareTrainingConfig",
    "IntxFakeQuantizeConfig",
    "LoRA",
    "QATConfig",
    "advance_qat",
    "llama32_configs",
    "llama32_qat",
]
