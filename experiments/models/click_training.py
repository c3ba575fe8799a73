"""Training a recommendation model on impressions, and what it is worth: log loss, normalised entropy, AUC, calibration.

Paired seeds: runs of one seed begin with the same weights and see the same impressions in the same order, whatever is changed
in the model (`Change`); the relative log loss of a pair is 100 (log loss / log loss of the base - 1) percent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.data.impressions import Array, Impressions
from experiments.harness.rows import Interval, interval

#: What is done to a model before it trains: a recipe, mods; None for nothing.
Change = Callable[[nn.Module], object]


@dataclass(frozen=True, kw_only=True)
class ClickTraining:
    """steps of `batch` impressions. rate: of AdamW for all but tables; table_rate: of Adagrad for these, as MLPerf has it.
    evaluated: held-out impressions (None: all). compiled: whether forward and backward are. autocast: whether both run under
    autocast to bfloat16."""

    steps: int
    batch: int = 1024
    rate: float = 1e-3
    table_rate: float = 0.02
    evaluated: int | None = None
    compiled: bool = False
    autocast: bool = False


QUICK = ClickTraining(steps=60, batch=512, evaluated=20_000)
FULL = ClickTraining(steps=4000, batch=1024, compiled=True)


@dataclass(frozen=True)
class Quality:
    """Of held-out impressions. log_loss: nats. entropy: normalised, log loss over that of always saying the held-out share of
    ones. calibration: mean prediction over the share of ones."""

    log_loss: float
    entropy: float
    auc: float
    calibration: float


def optimizers(model: nn.Module, plan: ClickTraining) -> list[torch.optim.Optimizer]:
    """Adagrad for the tables, whose gradients are of few rows, AdamW for the rest."""
    tables = [m.weight for m in model.modules() if isinstance(m, nn.EmbeddingBag | nn.Embedding)]
    known = {id(weight) for weight in tables}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in known]
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, lr=plan.rate, weight_decay=0.0)]
    return found + ([torch.optim.Adagrad(tables, lr=plan.table_rate)] if tables else [])


def train(
    model: nn.Module, data: Impressions, plan: ClickTraining, seed: int, device: str = "cpu"
) -> list[float]:
    """Train in place; the log loss of each step. ValueError where it stops being finite."""
    step, losses = optimizers(model, plan), []
    forward = torch.compile(model) if plan.compiled else model
    model.train()
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        for batch in data.batches(plan.batch, seed, plan.steps, device):
            with torch.autocast(batch.dense.device.type, torch.bfloat16, enabled=plan.autocast):
                logits = forward(batch.dense, batch.ids).float()
            loss = functional.binary_cross_entropy_with_logits(logits, batch.labels)
            losses.append(stepped(loss, step))
    return finite(losses)


def stepped(loss: Tensor, optimizers: Sequence[torch.optim.Optimizer]) -> Tensor:
    """The loss of a step, after its gradients have moved the parameters; nothing waits for its value."""
    loss.backward()  # type: ignore[no-untyped-call]
    for one in optimizers:
        one.step()
        one.zero_grad()
    return loss.detach()


def finite(losses: Sequence[Tensor]) -> list[float]:
    """Log losses of all steps; ValueError for the first that is not finite."""
    values: list[float] = torch.stack(list(losses)).tolist()
    first = next((at for at, value in enumerate(values) if not math.isfinite(value)), None)
    if first is not None:
        raise ValueError(f"the log loss is {values[first]} in step {first}; a lower rate may help")
    return values


@torch.no_grad()
def predictions(
    model: nn.Module, data: Impressions, plan: ClickTraining, device: str = "cpu"
) -> tuple[Array, Array]:
    """Logits and labels of held-out impressions, float64."""
    model.eval()
    pairs = []
    for batch in data.held_out(8192, plan.evaluated, device):
        with torch.autocast(batch.dense.device.type, torch.bfloat16, enabled=plan.autocast):
            logits = model(batch.dense, batch.ids)
        pairs.append((logits, batch.labels))
    return joined(pairs)


def joined(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Array, Array]:
    """Logits and labels of batches behind each other, float64."""
    found, labels = (
        np.concatenate([one.double().cpu().numpy().reshape(-1) for one in parts])
        for parts in zip(*pairs, strict=True)
    )
    return found, labels


def quality(logits: Array, labels: Array) -> Quality:
    """Of logits and labels (0 or 1); ValueError where all labels are the same."""
    share = float(labels.mean())
    if not 0 < share < 1:
        raise ValueError(f"all {len(labels)} labels are {share:g}; entropy and AUC take both")
    # log(1 + exp(z)) - y z, without overflow.
    loss = float(np.mean(np.logaddexp(0, logits) - labels * logits))
    entropy = -share * math.log(share) - (1 - share) * math.log1p(-share)
    mean = float(np.mean(np.exp(-np.logaddexp(0, -logits))))
    return Quality(loss, loss / entropy, auc(logits, labels), mean / share)


def auc(logits: Array, labels: Array) -> float:
    """The share of pairs of a one and a zero that are in order, ties for half."""
    _, place, counts = np.unique(logits, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place.reshape(-1)]
    ones = labels > 0
    positive, negative = int(ones.sum()), int((~ones).sum())
    return float((ranks[ones].sum() - positive * (positive + 1) / 2) / (positive * negative))


def trained_quality(
    make: Callable[[], nn.Module],
    change: Change | None,
    data: Impressions,
    plan: ClickTraining,
    seed: int,
    device: str = "cpu",
) -> Quality:
    """Of a model that begins with the seed's weights, is changed and trained."""
    torch.manual_seed(seed)
    model = make().to(device)
    if change is not None:
        change(model)
    train(model, data, plan, seed, device)
    return quality(*predictions(model, data, plan, device))


def relative(base: Sequence[Quality], changed: Sequence[Quality]) -> Interval:
    """Percent of relative log loss over paired seeds, with its interval of 95 %."""
    return interval(
        [100 * (one.log_loss / other.log_loss - 1) for one, other in zip(changed, base, strict=True)]
    )


def paired(
    make: Callable[[], nn.Module],
    changes: Mapping[str, Change | None],
    data: Impressions,
    plan: ClickTraining,
    seeds: Sequence[int],
    device: str = "cpu",
) -> dict[str, list[Quality]]:
    """Qualities by name of a change, over the seeds."""
    return {
        name: [trained_quality(make, change, data, plan, seed, device) for seed in seeds]
        for name, change in changes.items()
    }


__all__ = [
    "FULL",
    "QUICK",
    "Change",
    "ClickTraining",
    "Quality",
    "auc",
    "paired",
    "quality",
    "relative",
    "train",
    "trained_quality",
]
