"""The automatic choice of a scheme for each layer, under budgets of stored bits, as cases of experiment `calibration`."""

from __future__ import annotations

import torch
from torch import nn

import ao_lab
from ao_lab.choose.result import Choice
from ao_lab.config.base import SchemeConfig
from experiments.harness.measuring import Values
from experiments.models.causal_lm import linears

#: How the setting of a case begins.
NAME = "choice"
#: Stored bits a weight, scales and all.
BUDGETS = (3.0, 2.5, 4.25)
#: The schemes that are chosen among: integers of groups of 64 with bfloat16 scales, so that sizes differ by elements alone.
OPTIONS = (*(f"int{bits}_g64_asymmetric_bf16" for bits in (2, 3, 4, 5, 6)), "int8_rowwise")
#: Methods that are measured on a choice.
ARMS = ("rounding", "gptq", "awq + gptq")


def setting(bits: float) -> str:
    """The setting of a budget."""
    return f"{NAME}, {bits:g} bits"


def chosen(model: nn.Module, batches: list[torch.Tensor], bits: float, earlier: Choice | None) -> Choice:
    """The choice under a budget; scores are those of an earlier choice where there is one."""
    ours = {id(layer) for layer in linears(model).values()}
    options = {name: SchemeConfig(scheme=name) for name in OPTIONS}
    return ao_lab.choose_(
        model,
        batches,
        options,
        ao_lab.Bits(bits),
        filter_fn=lambda module, name: id(module) in ours,
        score="fisher" if earlier is None else earlier,
    )


def values(choice: Choice) -> Values:
    """What was predicted and measured of a choice and of the options for all layers, on sequences that methods see."""
    found: Values = {
        "choice: KL predicted": (choice.predicted, "nat"),
        "choice: KL measured": (choice.measured, "nat"),
        "choice: least sum of scores": (choice.bound, "nat"),
        f"choice: {choice.source}": (1.0, ""),
    }
    for trial in choice.trials:
        if trial.name in OPTIONS:
            found[f"uniform {trial.name}: KL measured"] = (trial.measured, "nat")
    return found
