"""Trainings by optimizer over paired seeds, and their gaps to torch's AdamW with float32 states.

Runs of one seed have the same initial weights and the same text in the same order, whatever their optimizer. The gap of a seed
is 100 (loss / loss with float32 states - 1) percent of the loss on held-out text; over seeds it has Student's interval of 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ao_lab import optim
from experiments.data.corpus import evaluation_texts
from experiments.fp8_training.convergence import gap
from experiments.harness.measuring import Values
from experiments.harness.rows import Row
from experiments.models.pretraining import (
    SMALL,
    TINY,
    Budget,
    ByteLevelModel,
    Clock,
    PretrainSettings,
    TimedRun,
    adamw,
    bits_per_byte,
    take_steps,
)
from experiments.models.train import Checkpoint, text_of
from experiments.runs.settings import Settings

PAIRED, GAPS = "paired", "gaps"
HELD_OUT, GAP, INTERVAL = "bits per byte, held out", "gap", "gap, 95% interval"
BASE = "float32 states (torch)"
Make = Callable[[list[dict[str, Any]], float], torch.optim.Optimizer]


@dataclass(frozen=True)
class Method:
    """An optimizer. half: parameters are bfloat16, which takes a GPU's autocast."""

    name: str
    make: Make
    half: bool = False


def ours(kind: Any, **options: Any) -> Make:
    """A class of ours with options."""
    return lambda groups, rate: kind(groups, lr=rate, betas=(0.9, 0.95), **options)


METHODS = (
    Method("8-bit states", ours(optim.AdamW8bit)),
    Method("4-bit states", ours(optim.AdamW4bit)),
    Method("8-bit states, 24-bit master", ours(optim.AdamW8bit, master="24bit"), half=True),
    Method(
        "float32 states, 24-bit master", ours(optim.AdamW8bit, states="float32", master="24bit"), half=True
    ),
    Method(
        "8-bit states, bfloat16 rounded stochastically",
        ours(optim.AdamW8bit, bf16_stochastic_round=True),
        half=True,
    ),
    # Last: their trainings take five times as long.
    Method("torchao's 8-bit states", ours(optim.AdamW8bit, states="torchao.8bit")),
    Method("torchao's FP8 states", ours(optim.AdamWFp8, states="torchao.fp8")),
)


@dataclass(frozen=True)
class Plan:
    """Trainings of a scale. name: the setting of their rows."""

    name: str
    training: PretrainSettings
    seeds: int
    evaluated: int
    methods: tuple[str, ...]


#: On two cores a model of few steps: whether it trains at all, not how well.
QUICK = Plan(
    TINY.name,
    PretrainSettings(model=TINY, budget=Budget(bytes=16 * 8 * 128), batch=8, rate=4e-3, compiled=False),
    seeds=2,
    evaluated=1_000,
    methods=("8-bit states",),
)
#: With eight sequences a step and 6 MB in all, trainings of a seed whose optimizers differ by rounding alone end up to 3 %
#: apart: steps so small and few do not resolve what is asked of them.
FULL = Plan(
    f"{SMALL.name}, 32 sequences a step",
    PretrainSettings(model=SMALL, budget=Budget(bytes=32_000_000), batch=32, rate=5e-4),
    seeds=5,
    evaluated=200_000,
    methods=tuple(method.name for method in METHODS),
)
PLANS = {"quick": QUICK, "full": FULL}


def names_of(plan: Plan, device: str) -> list[str]:
    """The base, then the methods of the plan that can train on the device."""
    return [
        BASE, *(one.name for one in METHODS if one.name in plan.methods and (device == "cuda" or not one.half))
    ]  # fmt: skip


def named(name: str) -> Method | None:
    """A method by name, which another process can be given; None: the base."""
    return next((one for one in METHODS if one.name == name), None)


def train(settings: Settings, plan: Plan, method: Method | None, seed: int) -> Values:
    """Train from random weights; bits per byte of held-out text."""
    name = BASE if method is None else method.name
    training = replace(
        plan.training, seed=seed, method="bfloat16 parameters" if method and method.half else "float32"
    )
    torch.manual_seed(seed)
    model = ByteLevelModel(training.model).to(settings.device).train()
    if method is not None and method.half:
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                module.to(torch.bfloat16)
    base = adamw(model, training)
    optimizer = base if method is None else method.make(groups_of(base), training.rate)
    run = TimedRun(model, [optimizer], torch.Generator().manual_seed(seed), [], Clock(settings.device))
    take_steps(
        run, training, text_of(settings.corpus).to(settings.device), Checkpoint(), lambda done, text: None
    )
    texts = {split: text[: plan.evaluated] for split, text in evaluation_texts(settings.corpus).items()}
    losses = bits_per_byte(model.eval(), texts, training.model.context)
    total = sum(len(text) for text in texts.values())
    mean = sum(losses[split] * len(text) for split, text in texts.items()) / total
    if math.isnan(mean):
        return {f"status: {name} ended in NaN": (1.0, "")}
    return {HELD_OUT: (mean, "bits"), "steps": (float(len(run.losses)), "")}


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Parameters and weight decay of each group."""
    return [
        {"params": group["params"], "weight_decay": group["weight_decay"]} for group in optimizer.param_groups
    ]


def gaps(rows: list[Row]) -> dict[str, Values]:
    """Gap and interval of each method that has the base's seeds, by name."""
    losses: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.metric == HELD_OUT:
            losses.setdefault(row.method, {})[row.seed] = row.value
    base = losses.get(BASE, {})
    result: dict[str, Values] = {}
    for method, mine in losses.items():
        shared = sorted(base.keys() & mine.keys())
        if method != BASE and len(shared) > 1:
            one = gap([base[seed] for seed in shared], [mine[seed] for seed in shared])
            result[method] = {GAP: (one.mean, "%"), INTERVAL: (one.half, "%")}
    return result
