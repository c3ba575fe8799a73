"""Part "trajectory" of `loka`: what low precision and mods cost in quality, over paired seeds; a row's seed is a training's.

Runs of one seed begin alike and see the same examples in the same order. On a CPU recipes are emulated in float32, and the
base is float32; on a GPU the base is bfloat16 by autocast. DCN and Wukong read impressions, HSTU reads histories. At scale
full a training is one epoch: production models see an impression once, and of small data a second epoch makes log loss worse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from torch import nn

import ao_lab
from experiments.data import complete_journey, drawn_ratings, item_sequences, movielens
from experiments.data.impressions import Impressions
from experiments.harness.measuring import Values
from experiments.loka.subjects import MODELS
from experiments.models import click_training, sequence_training
from experiments.models.click_training import Change, ClickTraining, Quality
from experiments.models.hstu import HSTU
from experiments.models.sequence_training import NEXT, RATED, Examples

TRAJECTORY = "trajectory"
LOG_LOSS, ENTROPY, AUC, CALIBRATION = "log loss", "normalised entropy", "AUC", "calibration"
BASE = "base"
THREE = ("no_bias", "block_norm", "hard_swish")
JOURNEY, MOVIES, DRAWN = "Complete Journey", "MovieLens 100k", "drawn ratings"
HISTORIES, BOOKS = "MovieLens 100k, histories", "books, histories of words"


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
RECIPES = tuple(name for name in CHANGES if "mods" not in name)


@dataclass(frozen=True)
class Plan:
    """data: names of data of impressions and of histories, and steps of a training on each (None: one epoch); models of
    impressions (`MODELS`) at a width; what is compared, over so many seeds."""

    data: Mapping[str, int | None]
    models: tuple[str, ...]
    width: int
    changes: tuple[str, ...]
    seeds: int
    training: ClickTraining


PLANS = {
    "quick": Plan(
        {DRAWN: 40}, ("DCN",), 8, (BASE, "rowwise", "mods"), 2, ClickTraining(steps=40, batch=256, evaluated=2000)
    ),
    "full": Plan(
        {JOURNEY: None, MOVIES: None, HISTORIES: 500, DRAWN: None, BOOKS: 1500},
        ("DCN", "Wukong"), 32, tuple(CHANGES), 8, ClickTraining(steps=1, batch=1024),
    ),
}  # fmt: skip


def pairs(scale: str) -> list[tuple[str, str, str, int]]:
    """Data, model, change and the place of a seed, in the order of trainings: the base and one recipe first, and all seeds of a
    model on some data before the next, so that a run that ends early has whole intervals."""
    plan, first = PLANS[scale], (BASE, "rowwise")
    others = tuple(one for one in plan.changes if one not in first)
    return [
        (data, model, change, at)
        for changes in (first, others)
        for data in plan.data
        # The gates of HSTU are no modules that mods replace.
        for model, some in (
            [("HSTU", RECIPES)] if data in SEQUENCES else [(one, plan.changes) for one in plan.models]
        )
        for at in range(plan.seeds)
        for change in changes
        if change in some
    ]


@lru_cache(maxsize=3)
def impressions(name: str, scale: str, cache: Path) -> Impressions:
    """Data of a name; ValueError where a package cannot be had."""
    if name == JOURNEY:
        return complete_journey.load(cache)
    if name == MOVIES:
        return movielens.load(cache)
    users, length, items = (400, 40, 1280) if scale == "quick" else (20_000, 60, 128_000)
    return drawn_ratings.impressions(users, length, items, seed=0)


SEQUENCES: dict[str, Callable[[Path], Examples]] = {
    HISTORIES: lambda cache: Examples(movielens.sequences(cache), RATED),
    BOOKS: lambda cache: Examples(item_sequences.books(cache), NEXT),
}
#: Histories of a batch of HSTU, each with its candidates.
USERS = 256
examples = lru_cache(maxsize=2)(lambda name, cache: SEQUENCES[name](cache))


def trained(data: str, model: str, change: str, scale: str, seed: int, device: str, cache: Path) -> Quality:
    """The quality of one training."""
    plan = PLANS[scale]
    training, steps = replace(plan.training, autocast=device == "cuda"), plan.data[data]
    if data in SEQUENCES:
        histories, training = examples(data, cache), replace(training, steps=steps or 1, batch=USERS)
        config = sequence_training.small(histories)
        return sequence_training.trained_quality(
            lambda: HSTU(config), CHANGES[change], histories, training, seed, device
        )
    found = impressions(data, scale, cache)
    training = replace(training, steps=steps or found.first_held_out // training.batch)
    return click_training.trained_quality(
        lambda: MODELS[model](found, plan.width), CHANGES[change], found, training, seed, device
    )


def trajectory_values(
    data: str, model: str, change: str, scale: str, seed: int, device: str, cache: Path
) -> Values:
    """Of one training: what its held-out examples say."""
    one = trained(data, model, change, scale, seed, device, cache)
    return {
        LOG_LOSS: (one.log_loss, "nat"),
        ENTROPY: (one.entropy, ""),
        AUC: (one.auc, ""),
        CALIBRATION: (one.calibration, ""),
    }


__all__ = ["BASE", "CHANGES", "PLANS", "TRAJECTORY", "pairs", "trajectory_values"]
