"""`probe_`: what low precision costs each layer of a model on batches, measured once; the model stays as it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from operator import index
from typing import Any

import torch
from torch import nn

from ao_lab.choose.api import frozen, split
from ao_lab.probe.attribution import Attribution, Outputs, measured_change, outputs_of
from ao_lab.probe.candidates import candidates_of
from ao_lab.probe.measure import measured_site
from ao_lab.probe.report import BUDGET, ModelErrors, ProbeReport, SiteLine, judged
from ao_lab.probe.reservoir import Reservoir
from ao_lab.probe.sites import Site, refuse_unseen, sites_of
from ao_lab.transforms.data import Call, calibrating, calls_of
from ao_lab.transforms.layers import shorten
from ao_lab.transforms.plan import Filter, Progress

#: Tokens that are sampled of each site.
TOKENS = 1024


@torch.inference_mode(False)
def probe_(
    model: nn.Module,
    batches: Iterable[Any],
    candidates: Any,
    *,
    filter_fn: Filter | None = None,
    tokens: int = TOKENS,
    budget: float = BUDGET,
    directions: int = 1,
    measure: bool = True,
    outputs: Outputs = outputs_of,
    seed: int = 0,
    progress: Progress | None = None,
) -> ProbeReport:
    """The error of each linear layer in each candidate, its effect on the model's outputs, and which layers are safe.

    batches: as calibration data for `quantize_`. candidates: names of training recipes ("rowwise"), weight schemes ("nf4"),
    weight and activation schemes ("int8_rowwise x int8_rowwise"), or configurations; one, a list, or a mapping of names.
    filter_fn: selects linear layers. tokens: number sampled from each layer's inputs, at random over all batches. budget:
    largest acceptable change of the outputs, in their standard deviations. directions: backward passes per batch; more give a
    better prediction from few examples. measure: also run the model in each candidate, on every fourth batch, which is then not
    used for predictions. outputs: a function that finds the relevant floats (examples, ...) in what the model returns. Default:
    its logits. progress(what, done, total) is called after each batch.

    Raises ValueError without batches or layers, for layers that data do not reach, and for NaN or infinity in inputs, outputs
    or gradients; TypeError for other kinds of arguments. The model is unchanged, bit for bit, after an error too.
    """
    tokens, directions = index(tokens), index(directions)
    if tokens < 2 or directions < 1 or not budget > 0:
        raise ValueError(
            f"tokens is at least 2, directions at least 1 and budget positive, got {tokens}, {directions}, {budget}"
        )
    recipes, sites = candidates_of(candidates), sites_of(model, filter_fn)
    calls = list(calls_of(batches))
    if not calls:
        raise ValueError("batches has no batch; a generator that has run before is empty, give a list")
    calls, held, note = _split(calls) if measure else (calls, [], "")
    attribution = Attribution(sites, recipes, outputs, torch.Generator().manual_seed(seed), seed)
    samples = {site.name: Reservoir(tokens, seed=seed, stream=i) for i, site in enumerate(sites)}
    most: dict[str, int] = {}
    total = len(calls) + len(held) * len(recipes)

    def see(site: Site, x: torch.Tensor) -> None:
        sample = samples[site.name]
        chosen = sample.choose(x)
        chosen.check(site.name)
        sample.add(chosen)
        most[site.name] = max(most.get(site.name, 0), x.numel() // x.shape[-1])

    # Eagerly: a compiled program would go on without hooks, or with those of this probe.
    eagerly = torch.compiler.set_stance("force_eager")
    with calibrating(model), frozen(model), eagerly:
        for done, call in enumerate(calls, 1):
            attribution.run(model, call, see, directions)
            if progress is not None:
                progress("errors", done, total)
        refuse_unseen([site.name for site in sites if not samples[site.name].count])
        lines = [
            _line(site, samples[site.name], recipes, attribution, most[site.name], seed) for site in sites
        ]
        models = {}
        for i, (name, recipe) in enumerate(recipes.items()):
            found = (
                measured_change(model, held, sites, recipe, outputs, seed, partial(attribution.weight, name))
                if held
                else None
            )
            models[name] = ModelErrors(
                *attribution.predicted(name), attribution.spread, found, attribution.error(name)
            )
            if progress is not None and held:
                progress("measured", len(calls) + (i + 1) * len(held), total)
    unreached = [
        line.name
        for line in lines
        if any(e.variance is None and not e.reason for e in line.candidates.values())
    ]
    notes = _notes(note, attribution.unmatched, unreached)
    return ProbeReport(judged(lines, models, budget), models, len(calls), notes)


def _split(calls: list[Call]) -> tuple[list[Call], list[Call], str]:
    """Batches to predict from and batches to measure on, and what is to be said of them."""
    whole = len(calls)
    calls, held, _ = split(calls)
    if calls is held:
        return (
            calls,
            held,
            '"measured" is of the batch that "predicted" is from: it has a single example, give more',
        )
    of = f"{len(held)} of {whole} batches" if whole > 1 else "the last examples of the batch"
    return (
        calls,
        held,
        f'"measured": the model ran in the candidate on {of}, which "predicted" and the table do not use',
    )


def _line(
    site: Site, sample: Reservoir, recipes: Any, attribution: Attribution, tokens: int, seed: int
) -> SiteLine:
    more = {
        name: {"variance": found}
        for name in recipes
        if (found := attribution.variance(name, site.name)) is not None
    }
    return measured_site(site, recipes, sample.x, None, tokens=tokens, more=more, seed=seed)


def _notes(note: str, unmatched: Iterable[str], unreached: Sequence[str]) -> tuple[str, ...]:
    names: Sequence[str] = sorted(unmatched)
    odd = (
        f"which example a token of {shorten(names)} belongs to is not known: errors of tokens count as independent there"
        if names
        else ""
    )
    left = (
        f"no gradient of the outputs reaches {shorten(unreached)} (torch.no_grad?): the predicted change of outputs "
        f"leaves them out, and they are not reported as safe"
        if unreached
        else ""
    )
    return tuple(one for one in (note, odd, left) if one)


__all__ = ["probe_"]
