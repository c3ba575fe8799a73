"""Parts "sites" and "outputs" of `loka`: what a probe predicts of layers and of logits, beside what later impressions show.

**sites**: the norm ratio of each layer's error, from a reservoir of tokens and from models of inputs, over that on later
impressions; N(0, 1) by random weights beside it, as benchmarks of kernels have it, and the spread of MERE over eight samples.
**outputs**: the logit's root mean square change with all layers in a candidate, predicted by one backward pass and measured on
later impressions; what it adds to the log loss, by the formula of `reference.probe.errors.loss_change` and measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch

import ao_lab
from ao_lab.probe.attribution import emulated, measured_change, outputs_of
from ao_lab.probe.candidates import candidates_of, output_error, reason_against
from ao_lab.probe.files import fitted
from ao_lab.probe.measure import host
from ao_lab.probe.reservoir import Reservoir
from ao_lab.probe.sites import Site, matrix, sites_of, watching
from ao_lab.transforms.data import calibrating
from experiments.harness.measuring import Values
from experiments.loka.subjects import CANDIDATES, Subject, subject
from reference.probe import errors
from reference.training.recipe import Recipe

SITES, OUTPUTS = "sites", "outputs"
#: Where inputs come from, by the name of a row's metric.
SOURCES = ("reservoir", "gaussian", "elliptical", "copula", "low_rank", "N(0, 1)")
LAYERS = "layers"
WITHIN = "share of layers within 5%"
WORST = "worst ratio of errors"
SPREAD = "MERE, largest over smallest of 8 samples"
PREDICTED, MEASURED, RATIO = (
    "logit's change, predicted",
    "logit's change, measured",
    "predicted over measured",
)
INDEPENDENT = "logit's change, layers independent"
ADDED, FORMULA, SHIFT = "log loss added", "log loss added, formula", "log loss added, its first-order part"
TOKENS = 1024


def seen_by(one: Subject, batches: list[object], tokens: int, seed: int) -> dict[str, torch.Tensor]:
    """Some tokens of each layer's inputs."""
    sites = sites_of(one.model)
    samples = {site.name: Reservoir(tokens, seed=seed, stream=i) for i, site in enumerate(sites)}

    def see(site: Site, x: torch.Tensor, g: torch.Tensor | None) -> None:
        samples[site.name].add(samples[site.name].choose(matrix(x)))

    with calibrating(one.model), watching(sites, see):
        for args in batches:
            one.model(*args)  # type: ignore[misc]
    return {name: sample.x for name, sample in samples.items()}


def ratio(recipe: Recipe, x: torch.Tensor, w: torch.Tensor) -> float:
    """The norm ratio of one layer's error."""
    return errors.norm_ratio(host(output_error(recipe, x, w)), host(x.double() @ w.double().T)).value


@lru_cache(maxsize=2)
def drawn(
    name: str, scale: str, seed: int, device: str
) -> dict[str, list[tuple[str, torch.Tensor, torch.Tensor]]]:
    """Of each layer: a source's name, its inputs, and the weight they meet."""
    one = subject(name, scale, seed, device)
    known = seen_by(one, one.probed, TOKENS, seed)
    return {
        site.name: list(_sources(known[site.name], site.weight(), scale, seed))
        for site in sites_of(one.model)
    }


def site_values(name: str, candidate: str, scale: str, seed: int, device: str) -> Values:
    """Over all layers of a model: how far predictions are off."""
    one, recipe = subject(name, scale, seed, device), next(iter(candidates_of(candidate).values()))
    later, sources = seen_by(one, one.tested, 4 * TOKENS, seed), drawn(name, scale, seed, device)
    found: dict[str, list[float]] = {}
    spreads, levels = [], []
    for site in sites_of(one.model):
        if reason_against(recipe, site.shape) is None:
            levels.append(ratio(recipe, later[site.name], site.weight()))
            spreads.append(_spread(recipe, later[site.name], site.weight()))
            for source, x, w in sources[site.name]:
                found.setdefault(source, []).append(ratio(recipe, x, w) / levels[-1])
    values: Values = {
        LAYERS: (float(len(levels)), ""),
        "error, median of layers": (float(np.median(levels)), ""),
    }
    for source, ratios in found.items():
        off = np.exp(np.abs(np.log(ratios)))
        values[f"{WITHIN}, {source}"] = float(100 * np.mean(off < 1.05)), "%"
        values[f"{WORST}, {source}"] = float(off.max()), "x"
    values[SPREAD] = float(np.median(spreads)), "x"
    return values


def _sources(
    x: torch.Tensor, w: torch.Tensor, scale: str, seed: int
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    yield SOURCES[0], x, w
    for name in SOURCES[1:2] if scale == "quick" else SOURCES[1:-1]:
        yield name, torch.from_numpy(fitted(host(x), name).sample(TOKENS, seed)).to(x.device, x.dtype), w
    generator = torch.Generator().manual_seed(seed)
    normal = [torch.randn(shape, generator=generator).to(x.device, x.dtype) for shape in (x.shape, w.shape)]
    yield SOURCES[-1], normal[0], normal[1]


def _spread(recipe: Recipe, x: torch.Tensor, w: torch.Tensor) -> float:
    """MERE of eight samples of one distribution, the largest over the smallest."""
    e, y = host(output_error(recipe, x, w)), host(x.double() @ w.double().T)
    found = [
        errors.mere(*part).value for part in zip(np.array_split(e, 8), np.array_split(y, 8), strict=True)
    ]
    return max(found) / max(min(found), 1e-300)


def output_values(name: str, candidate: str, scale: str, seed: int, device: str) -> Values:
    """Predicted on some impressions, measured on later ones."""
    one = subject(name, scale, seed, device)
    report = ao_lab.probe_(one.model, one.probed, candidate, measure=False, directions=4, seed=seed)
    (model,) = report.models.values()
    recipe = next(iter(candidates_of(candidate).values()))
    sites = sites_of(one.model)
    with calibrating(one.model):
        calls = [(args, {}) for args in one.tested]
        measured = measured_change(one.model, calls, sites, recipe, outputs_of)
        before = torch.cat([one.model(*args) for args in one.tested])
        with emulated(sites, recipe):
            after = torch.cat([one.model(*args) for args in one.tested])
    z, changed, labels = (host(x.reshape(-1)) for x in (before, after, one.labels))
    told = errors.loss_change(z, labels, changed - z)
    return {
        PREDICTED: (model.predicted, ""),
        INDEPENDENT: (model.independent, ""),
        MEASURED: (measured, ""),
        RATIO: (model.predicted / measured, "x"),
        ADDED: (_loss(changed, labels) - _loss(z, labels), "nat"),
        FORMULA: (told.shift + told.spread, "nat"),
        SHIFT: (told.shift, "nat"),
    }


def _loss(z: np.ndarray, labels: np.ndarray) -> float:
    return float(np.mean(np.logaddexp(0, z) - labels * z))


__all__ = ["CANDIDATES", "OUTPUTS", "SITES", "output_values", "site_values"]
