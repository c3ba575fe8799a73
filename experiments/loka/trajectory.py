"""Part "trajectory" of `loka`: what low precision and mods cost in quality, over paired seeds.

Runs of one seed begin alike and see the same impressions in the same order. On a CPU recipes are emulated in float32, and the
base is float32; on a GPU the base is bfloat16 by autocast.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from torch import nn

import ao_lab
from experiments.data import complete_journey, drawn_ratings, movielens
from experiments.data.impressions import Impressions
from experiments.harness.measuring import Values
from experiments.loka.subjects import MODELS
from experiments.models.click_training import Change, ClickTraining, Quality, paired, relative

TRAJECTORY = "trajectory"
LOSS, INTERVAL = "relative log loss", "relative log loss, 95% interval"
ENTROPY, AUC, SEEDS = "normalised entropy", "AUC", "pairs"
BASE = "base"
THREE = ("no_bias", "block_norm", "hard_swish")


def by_recipe(name: str) -> Change:
    """All linear layers train by a recipe."""
    return lambda model: ao_lab.convert_for_training_(model, name, pad=True)


def by_mods(*names: str) -> Change:
    """Mods that change the function."""
    return lambda model: ao_lab.apply_mods_(model, names)


def mods_and_rowwise(model: nn.Module) -> object:
    """The three mods, and recipe rowwise."""
    ao_lab.apply_mods_(model, THREE)
    return ao_lab.convert_for_training_(model, "rowwise", pad=True)


#: What is done to a model before it trains.
CHANGES: dict[str, Change | None] = {
    BASE: None,
    "rowwise": by_recipe("rowwise"),
    "tensorwise": by_recipe("tensorwise"),
    "mxfp8": by_recipe("mxfp8"),
    "mods": by_mods(*THREE),
    "mods, rowwise": mods_and_rowwise,
}


@dataclass(frozen=True)
class Plan:
    """data: names of `SOURCES`; models of `MODELS` at a width; what is compared, over so many seeds."""

    data: tuple[str, ...]
    models: tuple[str, ...]
    width: int
    changes: tuple[str, ...]
    seeds: int
    training: ClickTraining


PLANS = {
    "quick": Plan(
        ("drawn ratings",), ("DCN",), 8, (BASE, "rowwise", "mods"), 2, ClickTraining(steps=40, batch=256, evaluated=2000)
    ),
    "full": Plan(
        ("Complete Journey", "MovieLens 100k", "drawn ratings"), ("DCN", "Wukong"), 32, tuple(CHANGES), 10,
        ClickTraining(steps=1500, batch=1024, compiled=True),
    ),
}  # fmt: skip


@lru_cache(maxsize=3)
def impressions(name: str, scale: str, cache: Path) -> Impressions:
    """Data of a name; ValueError where a package cannot be had."""
    if name == "Complete Journey":
        return complete_journey.load(cache)
    if name == "MovieLens 100k":
        return movielens.load(cache)
    users, length, items = (400, 40, 1280) if scale == "quick" else (20_000, 60, 128_000)
    return drawn_ratings.impressions(users, length, items, seed=0)


@lru_cache(maxsize=32)
def qualities(
    data: str, model: str, change: str, scale: str, seed: int, device: str, cache: Path
) -> tuple[Quality, ...]:
    """Of trainings over the plan's seeds, from `seed` on."""
    plan, found = PLANS[scale], impressions(data, scale, cache)
    training = replace(plan.training, autocast=device == "cuda")
    seeds = range(seed, seed + plan.seeds)
    result = paired(
        lambda: MODELS[model](found, plan.width), {change: CHANGES[change]}, found, training, seeds, device
    )
    return tuple(result[change])


def trajectory_values(
    data: str, model: str, change: str, scale: str, seed: int, device: str, cache: Path
) -> Values:
    """Means over seeds, and of a change its relative log loss with Student's interval of 95 %."""
    mine = qualities(data, model, change, scale, seed, device, cache)
    count = len(mine)
    values: Values = {
        ENTROPY: (sum(one.entropy for one in mine) / count, ""),
        AUC: (sum(one.auc for one in mine) / count, ""),
        SEEDS: (float(count), ""),
    }
    if change != BASE:
        gap = relative(qualities(data, model, BASE, scale, seed, device, cache), mine)
        values |= {LOSS: (gap.mean, "%"), INTERVAL: (gap.half, "%")}
    return values


__all__ = ["BASE", "CHANGES", "PLANS", "TRAJECTORY", "trajectory_values"]
