"""What is compared on a real model: ways from a fine-tuned model, or from the model before it, to a quantized one.

Without further training: rounding (PTQ), of the model before fine-tuning and of the fine-tuned one; searched scales ("clipped",
`Clip()`), and GPTQ or, at 2 and 3 bits, AutoRound over them, with data. Trained on the same sequences as the fine-tuned model:
QAT as `quantize_` prepares it, QAT with learned scales that start where `Clip()` puts them, and torchao's QAT, converted by
torchao.

Scales are learned where a scheme keeps them in float32, so MX and NVFP4 have no such arm; torchao's arm is there for integers.

At 2 and 3 bits of weights alone there is ParetoQ too (Liu et al., arXiv 2502.02631): the levels of `LowBitWeightOnlyConfig`
(stretched at 2 bits, symmetric integers at 3) in the groups of the scheme beside it, learned scales that start at each group's
largest magnitude, and the optimizer of the authors' program (`tuning_of`). The authors have a scale for each row and train
much longer; here it reads what the other arms read, which the page says. `--only stretched2_rowwise` trains for their rows, by
the other arms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ao_lab import (
    GPTQ,
    AutoRound,
    Clip,
    Int8DynamicActivationIntxWeightConfig,
    IntxWeightOnlyConfig,
    LowBitWeightOnlyConfig,
    MXDynamicActivationMXWeightConfig,
    NVFP4DynamicActivationNVFP4WeightConfig,
    PerGroup,
    QATConfig,
    quantize_,
)
from ao_lab.config.base import Config, SchemeConfig
from ao_lab.qat.config import has_learnable_scales
from ao_lab.quantization.groups import told_elsewhere
from experiments.harness import revision
from experiments.harness.revision import TORCHAO
from experiments.models.causal_lm import Undivided, check_whole, linears
from experiments.models.fine_tuning import Tuning
from experiments.models.quantized_model import setting_name

PTQ_BASE, PTQ, CLIPPED, WITH_GPTQ = "PTQ of the base model", "PTQ", "PTQ, clipped", "PTQ, GPTQ"
WITH_AUTOROUND = "PTQ, AutoRound"
QAT, LEARNED, PARETOQ, BY_TORCHAO = "QAT", "QAT, learned scales", "QAT, ParetoQ", "torchao QAT"
#: In the order in which they are measured; after the first a model is fine-tuned for each seed.
ARMS = (PTQ_BASE, PTQ, CLIPPED, WITH_GPTQ, WITH_AUTOROUND, QAT, LEARNED, PARETOQ, BY_TORCHAO)
#: Those that read data.
READING = (CLIPPED, WITH_GPTQ, WITH_AUTOROUND, LEARNED)
#: Bits of the integers for which AutoRound is held against training: where the paper asks it.
LOW_BITS = (2, 3)
TRAINED = (QAT, LEARNED, PARETOQ, BY_TORCHAO)
#: The rate of weights and scales and AdamW's betas in the authors' program of ParetoQ.
PARETOQ_RATE, PARETOQ_BETAS = 2e-5, (0.9, 0.999)


@dataclass(frozen=True)
class Configured:
    """A configuration that is trained for, and where its rows stand."""

    config: Config

    @property
    def name(self) -> str:
        """The scheme of the weights."""
        return self.config.recipe().weight.name

    @property
    def setting(self) -> str:
        """How inputs of layers are quantized."""
        activation = self.config.recipe().activation
        return setting_name(None if activation is None else activation.name)


@dataclass(frozen=True)
class Method(Configured):
    """A configuration; bits: of its integers where torchao trains for it too, 0 elsewhere."""

    bits: int = 0

    @property
    def arms(self) -> tuple[str, ...]:
        """Those that there are for its scheme."""
        left = set() if has_learnable_scales(self.config.recipe().weight) else {LEARNED}
        left |= set() if self.bits else {BY_TORCHAO}
        left |= set() if self.bits in LOW_BITS else {WITH_AUTOROUND}
        alone = self.config.recipe().activation is None
        left |= set() if self.bits in LOW_BITS and alone else {PARETOQ}
        return tuple(arm for arm in ARMS if arm not in left)

    def trained(self, arm: str) -> Config:
        """The configuration that an arm trains for."""
        return LowBitWeightOnlyConfig(self.bits, GROUP) if arm == PARETOQ else self.config

    def torchao(self) -> Any:
        """The same configuration in torchao, which need not be installed."""
        import torchao.quantization as theirs
        from torchao.quantization.granularity import PerGroup as TheirGroup

        dtype, group = getattr(torch, f"int{self.bits}"), TheirGroup(32)
        if self.config.recipe().activation is None:
            return theirs.IntxWeightOnlyConfig(weight_dtype=dtype, granularity=group)
        return theirs.Int8DynamicActivationIntxWeightConfig(weight_dtype=dtype, weight_granularity=group)


GROUP = PerGroup(32)
METHODS = (
    Method(Int8DynamicActivationIntxWeightConfig("int4", GROUP), 4),
    Method(IntxWeightOnlyConfig("int3", GROUP), 3),
    Method(IntxWeightOnlyConfig("int2", GROUP), 2),
    Method(NVFP4DynamicActivationNVFP4WeightConfig()),
    Method(MXDynamicActivationMXWeightConfig(activation_dtype="float4_e2m1fn", weight_dtype="float4_e2m1fn")),
)


def methods_named(names: Sequence[str]) -> tuple[Method, ...]:
    """All methods, or those of these schemes; a scheme that is none of theirs is trained for with weights alone.

    ValueError for a name that is no scheme.
    """
    if not names:
        return METHODS
    found: list[Method] = []
    for name in names:
        mine = [one for one in METHODS if one.name == name]
        found += mine or [Method(SchemeConfig(scheme=name))]
    for one in found:
        one.config.recipe()
    return tuple(dict.fromkeys(found))


def missing(arm: str) -> str | None:
    """Why an arm cannot be measured here; None where it can."""
    return revision.missing(TORCHAO) if arm == BY_TORCHAO else None


def layers_filter(model: nn.Module) -> Callable[[nn.Module, str], bool]:
    """The filter of `quantize_` for the linear layers that are quantized: all but a head that is tied to the embedding."""
    names = set(linears(model))
    return lambda module, name: name in names


def quantized(model: nn.Module, method: Method, arm: str, batches: Sequence[Tensor]) -> nn.Module:
    """The model itself, quantized without training. batches: token ids that methods with data read.

    Undivided where the scheme's blocks do not divide every layer.
    """
    chosen: dict[str, tuple[Any, ...]] = {
        CLIPPED: (Clip(),),
        WITH_GPTQ: (Clip(), GPTQ()),
        WITH_AUTOROUND: (Clip(), AutoRound()),
    }
    layers, more = linears(model), {}
    if arm in chosen:
        more = {"methods": chosen[arm], "calibration": list(batches)}
    with told_elsewhere():  # by check_whole
        quantize_(model, method.config, layers_filter(model), **more)
    check_whole(method.name, layers)
    return model


def prepare(model: nn.Module, method: Method, arm: str, batches: Sequence[Tensor]) -> None:
    """Make a model train for quantization, in place; Undivided where a layer would stay plain."""
    with told_elsewhere():
        _prepare(model, method, arm, batches)
    check_trains(method.name, linears(model))


def _prepare(model: nn.Module, method: Method, arm: str, batches: Sequence[Tensor]) -> None:
    filter_fn = layers_filter(model)
    if arm == BY_TORCHAO:
        from torchao.quantization import quantize_ as theirs
        from torchao.quantization.qat import QATConfig as TheirConfig

        theirs(model, TheirConfig(method.torchao(), step="prepare"), filter_fn)
    elif arm == LEARNED:
        config = QATConfig(method.config, step="prepare", learn_scales=True)
        quantize_(model, config, filter_fn, calibration=list(batches), methods=(Clip(),), progress=False)
    elif arm == PARETOQ:
        quantize_(model, QATConfig(method.trained(arm), step="prepare", learn_scales=True), filter_fn)
    else:
        quantize_(model, QATConfig(method.config, step="prepare"), filter_fn)


def check_trains(scheme: str, layers: dict[str, nn.Linear]) -> None:
    """Undivided where a layer is not prepared: it would stay dense."""
    dense = [name for name, layer in layers.items() if type(layer) is nn.Linear]
    if dense:
        raise Undivided(f"{scheme} leaves {len(dense)} of {len(layers)} layers dense, {dense[0]} first")


def convert(model: nn.Module, method: Method, arm: str) -> nn.Module:
    """The model itself after training, quantized; training is over."""
    model.eval().requires_grad_(False)
    filter_fn = layers_filter(model)
    if arm == BY_TORCHAO:
        from torchao.quantization import quantize_ as theirs
        from torchao.quantization.qat import QATConfig as TheirConfig

        theirs(model, TheirConfig(method.torchao(), step="convert"), filter_fn)
    else:
        quantize_(model, QATConfig(method.trained(arm), step="convert"), filter_fn)
    return model


def tuning_of(arm: str, tuning: Tuning) -> Tuning:
    """How an arm trains: ParetoQ by its authors' optimizer, from its full rate down a cosine, scales at the rate of weights."""
    if arm != PARETOQ:
        return tuning
    return replace(tuning, rate=PARETOQ_RATE, betas=PARETOQ_BETAS, warmup=0.0, scale_rate=None)
