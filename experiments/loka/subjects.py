"""What the parts of `loka` measure on: recommendation models of `experiments.models`, trained on impressions.

By default impressions are drawn by the documented generator (`experiments.data.drawn_ratings`), so that a run needs no package;
`full` trains longer on more of them. Models are trained once a run and shared by the parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from experiments.data import drawn_ratings
from experiments.data.impressions import Impressions
from experiments.models import click_training, dlrm, wukong
from experiments.models.click_training import ClickTraining

#: What is probed: recipes of training, weights and inputs in 8 and 4 bits, weights alone.
CANDIDATES = ("rowwise", "tensorwise", "mxfp8", "int8_rowwise x int8_rowwise", "nvfp4 x nvfp4", "nf4")


@dataclass(frozen=True)
class Size:
    """users, length, items: of the generator; plan: of training; batches of `batch` impressions to probe and to test on."""

    users: int
    length: int
    items: int
    width: int
    plan: ClickTraining
    batch: int = 1024
    probed: int = 2
    tested: int = 2


SIZES = {
    "quick": Size(800, 60, 1280, 16, ClickTraining(steps=60, batch=512, evaluated=2048)),
    "full": Size(
        20_000, 60, 128_000, 32, ClickTraining(steps=1500, batch=1024, evaluated=50_000), probed=16, tested=16
    ),
}
#: What faulty kernels are tried on: as quick, with inputs of five blocks of 128 channels, which no fours of blocks fill.
SIZES["wide"] = replace(SIZES["quick"], width=128)
MODELS: dict[str, Callable[[Impressions, int], nn.Module]] = {
    "DCN": lambda data, width: dlrm.DLRM(dlrm.small(data, width)),
    "Wukong": lambda data, width: wukong.Wukong(wukong.small(data, width)),
}


@dataclass(frozen=True)
class Subject:
    """A trained model, batches (dense, ids) that are probed, later ones that are tested on, and their labels."""

    model: nn.Module
    probed: list[Any]
    tested: list[Any]
    labels: torch.Tensor


@lru_cache(maxsize=4)
def subject(name: str, scale: str, seed: int, device: str) -> Subject:
    """A model by its name."""
    size = SIZES[scale]
    data = impressions(scale, seed)
    torch.manual_seed(seed)
    model = MODELS[name](data, size.width).to(device)
    click_training.train(model, data, size.plan, seed, device)
    found = [
        (one.dense, one.ids, one.labels)
        for one in data.held_out(size.batch, size.batch * (size.probed + size.tested), device)
        if len(one.labels) == size.batch
    ]
    first = len(found) * size.probed // (size.probed + size.tested)
    return Subject(
        model.eval(),
        [one[:2] for one in found[:first]],
        [one[:2] for one in found[first:]],
        torch.cat([one[2] for one in found[first:]]),
    )


@lru_cache(maxsize=2)
def impressions(scale: str, seed: int) -> Impressions:
    """Of the generator."""
    size = SIZES[scale]
    return drawn_ratings.impressions(users=size.users, length=size.length, items=size.items, seed=seed)


__all__ = ["CANDIDATES", "MODELS", "SIZES", "Subject", "impressions", "subject"]
