"""The automatic choice of a scheme for each layer, under budgets of stored bits, as cases of experiment `calibration`.

All budgets are one call of `choose_`: they share scores, the quantized weights and what is measured. Measured beside the
choices are one scheme for all layers, a rule that people write by hand ("first and last layers in 8 bits"), and single layers
alone, which say how well scores rank them. What a choice is held against at its size lies between two uniform schemes (or two
such rules): their KL divergence interpolated geometrically over stored bits, of all pairs the least, harder than the best
scheme within the budget.

Layers in 8 bits have to be paid for: in SmolLM2 the first and the last of 30 blocks leave 3.98 of 4.25 bits to the others,
which no 4 bits are within. So rules fill each budget too (`filled`): the best scheme that fits everywhere is in as few blocks
as it takes, in the middle of the model, which people hold to matter least, and a better one in the rest.

Rules are measured on the evaluation texts too (`RULES`), in the form that fits: of one scheme for all layers, and of the rule
by hand, whichever within the budget had the least KL when it was chosen; the smallest, which is larger than the choice, where
none is within it. There the KL of the choice is divided by theirs, paired by window, of the same methods on the same sequences.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

import torch
from torch import nn

import ao_lab
from ao_lab.calibration.methods import Clip
from ao_lab.checkpoint.size import weight_size
from ao_lab.choose.result import Choice, Trial
from ao_lab.config.base import FqnToConfig, SchemeConfig
from ao_lab.transforms.plan import Progress
from experiments.harness.measuring import Values
from experiments.models.causal_lm import linears

#: How the setting of a case begins.
NAME = "choice"
#: Stored bits a weight, scales and all.
BUDGETS = (3.0, 2.5, 4.25)
#: The schemes that are chosen among, by size: integers of groups of 64 with bfloat16 scales. Without zero points int4 has 4.25
#: bits, and for all layers is what a choice of that size has to beat.
OPTIONS = (
    "int2_g64_asymmetric_bf16",
    "int3_g64_asymmetric_bf16",
    "int4_g64_bf16",
    "int4_g64_asymmetric_bf16",
    "int5_g64_asymmetric_bf16",
    "int8_rowwise",
)
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


def rule_plan(choice: Choice, rule: str, layers: Mapping[str, nn.Linear]) -> tuple[FqnToConfig, str]:
    """The configuration of each layer by a rule of RULES under a choice's budget, and the name of its trial. layers: dense."""
    rules = by_hand(layers) if rule == BY_HAND else {one: dict.fromkeys(layers, one) for one in OPTIONS}
    trials = [one for one in choice.trials if one.name in rules]
    fitting = [one for one in trials if one.fits]
    taken = min(fitting, key=lambda one: one.measured) if fitting else min(trials, key=lambda one: one.cost)
    schemes = rules[taken.name]
    return FqnToConfig({weight_of(name): choice.options[schemes[name]] for name in layers}), taken.name


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
        candidates=candidates(layers, alone),
        progress=progress,
    )
    return dict(zip(BUDGETS, choices, strict=True))


def candidates(layers: Mapping[str, nn.Linear], alone: int) -> dict[str, dict[str, str | None]]:
    """The option of each weight, None to leave it dense: rules by hand, and layers alone, evenly over the model."""
    found: dict[str, dict[str, str | None]] = {}
    for rule, schemes in by_hand(layers).items():
        found[rule] = {weight_of(name): scheme for name, scheme in schemes.items()}
    names = [weight_of(name) for name in layers]
    count = min(alone, len(names))
    for one in (names[i * len(names) // count] for i in range(count)):
        found[f"{SINGLE}, {one}"] = {one: LOWEST}
    return found


def by_hand(layers: Mapping[str, nn.Linear]) -> dict[str, dict[str, str]]:
    """The scheme of each layer by rules of the first and last blocks in 8 bits: the others in one scheme; those of `filled`."""
    blocks = list(dict.fromkeys(map(block_of, layers)))
    inner = {f"{BY_HAND}, {low}": dict.fromkeys(blocks[1:-1], low) for low in OPTIONS[:-1]}
    for bits in BUDGETS:
        inner |= filled(layers, bits)
    return {
        rule: {name: schemes.get(block_of(name), HIGHEST) for name in layers}
        for rule, schemes in inner.items()
    }


def filled(layers: Mapping[str, nn.Linear], bits: float) -> dict[str, dict[str, str]]:
    """The scheme of each block but the first and the last, by rules that are just within a budget; none where none is."""
    blocks = list(dict.fromkeys(map(block_of, layers)))
    inner, ends = blocks[1:-1], dict.fromkeys((blocks[0], blocks[-1]), HIGHEST)
    limit, sizes = bits * sum(layer.weight.numel() for layer in layers.values()) / 8, sizes_of(layers)

    def fits(schemes: Mapping[str, str]) -> bool:
        return sum(sizes[block, scheme] for block, scheme in {**schemes, **ends}.items()) <= limit

    lower = [one for one in OPTIONS[:-1] if fits(dict.fromkeys(inner, one))][-1:]
    found = {}
    for better in OPTIONS[OPTIONS.index(lower[0]) + 1 : -1] if lower else ():
        count = 1
        while not fits(schemes := with_middle(inner, better, lower[0], count)):
            count += 1
        found[f"{BY_HAND}, {better}, {lower[0]} in the middle {count} blocks"] = schemes
    return found


def with_middle(blocks: Sequence[str], scheme: str, lower: str, count: int) -> dict[str, str]:
    """A scheme of each block: another one in so many in the middle."""
    start = (len(blocks) - count) // 2
    return {block: lower if start <= place < start + count else scheme for place, block in enumerate(blocks)}


def sizes_of(layers: Mapping[str, nn.Linear]) -> Counter[tuple[str, str]]:
    """Stored bytes of each block in each option."""
    sizes: Counter[tuple[str, str]] = Counter()
    for name, layer in layers.items():
        for option in OPTIONS:
            sizes[block_of(name), option] += weight_size(tuple(layer.weight.shape), option).bytes
    return sizes


def weight_of(name: str) -> str:
    """The full name of a layer's weight."""
    return f"{name}.weight"


def block_of(name: str) -> str:
    """What a layer's block is called: its name up to the first number."""
    parts = name.split(".")
    place = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 2)
    return ".".join(parts[: place + 1])


def interpolated(trials: Iterable[Trial], cost: float) -> float:
    """The KL divergence at a size, geometrically between two trials around it, of all pairs the least; NaN outside of them."""
    points = [(one.cost, math.log(one.measured)) for one in trials if one.measured > 0]
    smaller, larger = ([p for p in points if p[0] <= cost], [p for p in points if p[0] >= cost])
    found = []
    for (a, low), (b, high) in product(smaller, larger):
        share = (cost - a) / (b - a) if b > a else 0.0
        found.append(math.exp((1 - share) * low + share * high))
    return min(found, default=math.nan)


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
    hand = [one for one in choice.trials if one.name.startswith(BY_HAND)]
    alone = [one for one in choice.trials if one.name.startswith(SINGLE)]
    cost = choice.trial.cost
    found: Values = {
        "choice: KL predicted": (choice.predicted, "nat"),
        "choice: KL measured": (choice.measured, "nat"),
        "choice: least sum of scores": (choice.bound, "nat"),
        "choice: KL of one scheme at this size": (interpolated(uniform, cost), "nat"),
        f"choice: KL of {BY_HAND} at this size": (interpolated(hand, cost), "nat"),
        "choice: layers measured alone": (len(alone), ""),
        "choice: rank correlation of layers alone": (
            rank_correlation([one.predicted for one in alone], [one.measured for one in alone]),
            "",
        ),
        f"choice: {choice.source}": (1.0, ""),
    }
    for trial in (*uniform, *hand):
        kind = "uniform " if trial in uniform else ""
        found[f"{kind}{trial.name}: KL measured"] = (trial.measured, "nat")
    return {name: value for name, value in found.items() if value[0] == value[0]}
