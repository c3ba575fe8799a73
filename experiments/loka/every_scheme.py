"""Part "schemes" of `loka`: predictions for a Llama and a vision transformer, in every scheme and recipe of this project.

No recommendation models: what a probe says has to hold for any model. The Llama reads bytes of source code, the vision
transformer collages of digits; both are those of `sparsity` at scale quick, trained here, small stand-ins. One pass over some
examples predicts of each candidate the error of each layer, from 1024 tokens, and the change of a logit; later examples show
both. Candidates are schemes of weights, and recipes of training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch
from torch import nn

import ao_lab
from ao_lab.probe.attribution import Attribution, measured_change, outputs_of
from ao_lab.probe.candidates import candidates_of
from ao_lab.probe.report import ProbeReport
from ao_lab.probe.sites import sites_of
from ao_lab.transforms.data import calibrating
from experiments.data import corpus
from experiments.harness.measuring import Values
from experiments.loka.prediction import (
    LAYERS,
    MEASURED,
    PREDICTED,
    RATIO,
    SOURCES,
    TOKENS,
    WITHIN,
    WORST,
    ratio,
    seen_by,
)
from experiments.loka.subjects import Subject
from experiments.models.train import text_of
from experiments.sparsity.subjects import LANGUAGE_PLANS, PLANS, Text, language_start, load, start
from reference import SCHEMES
from reference.training.recipe import RECIPES, Recipe

EVERY = "schemes"
DATA = "trained-here"
BITS, OUTPUTS, ERROR = "bits of an element", "logit's deviation", "error, median of layers"
#: Backward passes of a batch, and examples that are probed, in batches; as many later ones show what is predicted.
DIRECTIONS, BATCH, BATCHES = 4, 128, 2
#: Bytes of a window of text: many short ones, since each gives one draw of a logit's change.
WINDOW = 32


def candidates() -> tuple[str, ...]:
    """Recipes of training that quantize, and schemes of weights."""
    return (*(name for name in RECIPES if name != "bf16"), *SCHEMES)


def bits_of(recipe: Recipe) -> float:
    """Bits of an element of the output's narrower operand."""
    return min(
        float(one.format.bits) for one in (recipe.output.a.scheme, recipe.output.b.scheme) if one is not None
    )


def llama(device: str, seed: int) -> tuple[nn.Module, list[tuple[torch.Tensor, ...]]]:
    """The byte-level language model and windows of text that it was not trained on."""
    text, plan = corpus.load(), LANGUAGE_PLANS["quick"]
    model = language_start(plan, Text(text_of(text), device, plan.model.context + 1), seed)
    (data,) = corpus.evaluation_texts(text).values()
    characters = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    starts = np.random.default_rng(seed).choice(len(data) - WINDOW, 2 * BATCHES * BATCH, replace=False)
    windows = characters[torch.from_numpy(starts)[:, None] + torch.arange(WINDOW)]
    return model, [(one.to(device),) for one in windows.split(BATCH)]


def vision(device: str, seed: int) -> tuple[nn.Module, list[tuple[torch.Tensor, ...]]]:
    """The vision transformer and collages of digits that it was not trained on."""
    plan = PLANS["quick"]
    model, generator = start(plan, device, seed), torch.Generator().manual_seed(seed)
    images = plan.collages.draw(load()[1], 2 * BATCHES * BATCH, generator)[0]
    return model, [(one.to(device),) for one in images.split(BATCH)]


MODELS: dict[str, Callable[[str, int], tuple[nn.Module, list[tuple[torch.Tensor, ...]]]]] = {
    "ViT": vision,
    "Llama": llama,
}


@dataclass(frozen=True)
class Probed:
    """A model, what a probe predicts, later examples, and what layers read then."""

    subject: Subject
    report: ProbeReport
    later: dict[str, torch.Tensor]


@lru_cache(maxsize=1)
def probed(name: str, seed: int, device: str) -> Probed:
    """Of a model by its name, with all candidates at once."""
    model, batches = MODELS[name](device, seed)
    half = len(batches) // 2
    one = Subject(model.eval().requires_grad_(False), batches[:half], batches[half:], torch.empty(0))
    report = ao_lab.probe_(
        model, one.probed, candidates(), tokens=TOKENS, directions=DIRECTIONS, measure=False, seed=seed
    )
    return Probed(one, report, seen_by(one, one.tested, 2 * TOKENS, seed))


def scheme_values(name: str, candidate: str, seed: int, device: str) -> Values:
    """Of one candidate: layers that can, how far predictions of their errors are off, the logit's change twice."""
    found, (recipe,) = probed(name, seed, device), candidates_of(candidate).values()
    values: Values = {BITS: (bits_of(recipe), "bit")}
    errors, off = [], []
    for site in sites_of(found.subject.model):
        told = found.report.site(site.name).candidates[candidate].norm_ratio
        if told is not None:
            errors.append(ratio(recipe, found.later[site.name], site.weight()))
            off.append(float(np.exp(abs(np.log(told.value / errors[-1])))))
    values[LAYERS] = float(len(errors)), ""
    if not errors:
        return values
    values |= {
        ERROR: (float(np.median(errors)), ""),
        f"{WITHIN}, {SOURCES[0]}": (100 * float(np.mean(np.array(off) < 1.05)), "%"),
        f"{WORST}, {SOURCES[0]}": (max(off), "x"),
    }
    return values | dict(_logits(found, candidate, recipe, seed))


def _logits(
    found: Probed, candidate: str, recipe: Recipe, seed: int
) -> Iterator[tuple[str, tuple[float, str]]]:
    one, told = found.subject, found.report.models[candidate]
    sites, calls = sites_of(one.model), [(args, {}) for args in one.tested]
    # Weights are quantized once.
    weight = Attribution(sites, {candidate: recipe}, outputs_of, torch.Generator(), seed).weight
    with calibrating(one.model), torch.no_grad():
        measured = measured_change(
            one.model, calls, sites, recipe, outputs_of, seed, partial(weight, candidate)
        )
    yield OUTPUTS, (told.outputs, "")
    yield PREDICTED, (told.predicted, "")
    yield MEASURED, (measured, "")
    yield RATIO, (told.predicted / measured, "x")


__all__ = ["DATA", "EVERY", "MODELS", "candidates", "scheme_values"]
