"""The automatic choice of a scheme for each layer, under budgets of stored bits, as cases of experiment `calibration`.

All budgets are one call of `choose_`: they share scores, the quantized weights and what is measured. Measured beside the
choices are one scheme for all layers, a rule that people write by hand ("first and last layers in 8 bits"), and single layers
alone, which say how well scores rank them. What a choice is held against at its size lies between two uniform schemes (or two
such rules): their KL divergence interpolated geometrically over stored bits, harder than the best scheme within the budget.

Rules are measured on the evaluation texts too (`RULES`), in the form that fits: of one scheme for all layers, and of the rule
by hand, whichever within the budget had the least KL when it was chosen; the smallest, which is larger than the choice, where
none is within it. There the KL of the choice is divided by theirs, paired by window, of the same methods on the same sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import torch
from torch import nn

import ao_lab
from ao_lab.calibration.methods import Clip
from ao_lab.choose.result import Choice, Trial
from ao_lab.config.base import FqnToConfig, SchemeConfig
from ao_lab.transforms.plan import Progress
from experiments.harness.measuring import Values
from experiments.models.causal_lm import linears

#: How the setting of a case begins.
NAME = "choice"
#: Stored bits a weight, scales and all.
BUDGETS = (3.0, 2.5, 4.25)
#: The schemes that are chosen among: integers of groups of 64 with bfloat16 scales, so that sizes differ by elements alone.
OPTIONS = (*(f"int{bits}_g64_asymmetric_bf16" for bits in (2, 3, 4, 5)), "int8_rowwise")
#: How weights of options are made: codes rounded to nearest over searched scales, without which 2 bits destroy any model.
METHODS = (Clip(),)
#: Methods that are measured on a choice.
ARMS = ("rounding", "search by inputs", "gptq", "awq + gptq")
#: Sequences that scores and measurements are of, tokens of each, and sequences of a batch, by scale.
SEQUENCES = {"quick": 12, "full": 128}
TOKENS = {"quick": 256, "full": 1024}
BATCH = 4
#: Layers that are measured alone, by scale, and in which scheme.
ALONE = {"quick": 12, "full": 64}
LOWEST, HIGHEST = OPTIONS[0], OPTIONS[-1]
BY_HAND, SINGLE = "first and last layers in 8 bits", "alone"
#: What a choice is held against on the evaluation texts, and the methods that both are quantized by.
RULES = ("one scheme for all layers", BY_HAND)
RULE_ARMS = ("rounding", "search by inputs", "gptq")
#: The method over which schemes are chosen, METHODS by its name in rows.
CHOSEN_BY = "search by inputs"
OVER, OVER_ERROR = "KL of the choice over this", "standard error of the KL of the choice over this"


def setting(bits: float, rule: str = NAME) -> str:
    """The setting of a budget, of the choice or of a rule."""
    return f"{rule}, {bits:g} bits"


def rule_plan(choice: Choice, rule: str) -> tuple[FqnToConfig, str]:
    """The configuration of each layer by a rule of RULES under a choice's budget, and the name of its trial."""
    names = OPTIONS if rule == RULES[0] else tuple(f"{BY_HAND}, {low}" for low in OPTIONS[:-1])
    trials = [one for one in choice.trials if one.name in names]
    fitting = [one for one in trials if one.fits]
    taken = min(fitting, key=lambda one: one.measured) if fitting else min(trials, key=lambda one: one.cost)
    layers = [name for layer in choice.layers for name in layer.names]
    by_hand = candidates(layers, 0).get(taken.name, lambda name: taken.name)
    return FqnToConfig({name: choice.options[by_hand(name) or LOWEST] for name in layers}), taken.name


def chosen(
    model: nn.Module, batches: Sequence[torch.Tensor], alone: int, progress: Progress | None = None
) -> dict[float, Choice]:
    """The choice under each budget. alone: how many layers are measured by themselves. progress: as of `ao_lab.choose_`."""
    layers = linears(model)
    ours = {id(layer) for layer in layers.values()}
    options = {name: (SchemeConfig(scheme=name), METHODS) for name in OPTIONS}
    choices = ao_lab.choose_(
        model,
        batches,
        options,
        [ao_lab.Bits(bits) for bits in BUDGETS],
        filter_fn=lambda module, name: id(module) in ours,
        candidates=candidates([f"{name}.weight" for name in layers], alone),
        progress=progress,
    )
    return dict(zip(BUDGETS, choices, strict=True))


def candidates(names: Sequence[str], alone: int) -> dict[str, Callable[[str], str | None]]:
    """Rules by hand, one for each low scheme, and layers alone, evenly over the model."""
    blocks = list(dict.fromkeys(block_of(name) for name in names))
    ends = {blocks[0], blocks[-1]}
    found: dict[str, Callable[[str], str | None]] = {}
    for low in OPTIONS[:-1]:
        found[f"{BY_HAND}, {low}"] = lambda name, low=low: HIGHEST if block_of(name) in ends else low
    count = min(alone, len(names))
    for one in (names[i * len(names) // count] for i in range(count)):
        found[f"{SINGLE}, {one}"] = lambda name, one=one: LOWEST if name == one else None
    return found


def block_of(name: str) -> str:
    """What a layer's block is called: its name up to the first number."""
    parts = name.split(".")
    place = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 2)
    return ".".join(parts[: place + 1])


def interpolated(trials: Iterable[Trial], cost: float) -> float:
    """The KL divergence at a size, geometrically between the trials around it; NaN outside of them."""
    points = sorted((one.cost, one.measured) for one in trials if one.measured > 0)
    for (a, low), (b, high) in pairwise(points):
        if a <= cost <= b:
            share = (cost - a) / (b - a) if b > a else 0.0
            return math.exp((1 - share) * math.log(low) + share * math.log(high))
    return math.nan


def rank_correlation(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Spearman's: the correlation of ranks; NaN for fewer than three."""
    if len(ours) < 3:
        return math.nan
    ranks = torch.stack(
        [torch.tensor(one, dtype=torch.float64).argsort().argsort() for one in (ours, theirs)]
    )
    return float(torch.corrcoef(ranks.double())[0, 1])


def values(choice: Choice) -> Values:
    """What was predicted and measured of a choice, of the options for all layers, of rules by hand and of layers alone, on
    sequences that gave no score."""
    uniform = [one for one in choice.trials if one.name in OPTIONS]
    by_hand = [one for one in choice.trials if one.name.startswith(BY_HAND)]
    alone = [one for one in choice.trials if one.name.startswith(SINGLE)]
    cost = choice.trial.cost
    found: Values = {
        "choice: KL predicted": (choice.predicted, "nat"),
        "choice: KL measured": (choice.measured, "nat"),
        "choice: least sum of scores": (choice.bound, "nat"),
        "choice: KL of one scheme at this size": (interpolated(uniform, cost), "nat"),
        f"choice: KL of {BY_HAND} at this size": (interpolated(by_hand, cost), "nat"),
        "choice: layers measured alone": (len(alone), ""),
        "choice: rank correlation of layers alone": (
            rank_correlation([one.predicted for one in alone], [one.measured for one in alone]),
            "",
        ),
        f"choice: {choice.source}": (1.0, ""),
    }
    for trial in (*uniform, *by_hand):
        kind = "uniform " if trial in uniform else ""
        found[f"{kind}{trial.name}: KL measured"] = (trial.measured, "nat")
    return {name: value for name, value in found.items() if value[0] == value[0]}
