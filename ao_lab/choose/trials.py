"""The KL divergence from a model to itself with quantized weights, measured on data, batch by batch for all candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from ao_lab.choose.scores import counted, logits_of
from ao_lab.choose.weights import Setting, Weights
from ao_lab.eval import divergence
from ao_lab.transforms.data import Call

#: Predictions that are compared at a time.
ROWS = 1024


def divergences(
    model: nn.Module,
    calls: Sequence[Call],
    weights: Weights,
    settings: Sequence[Setting],
    done: Callable[[], None],
) -> list[float]:
    """The mean over predictions of the divergence to the model as it is, nats, for each setting."""
    sums, tokens = [0.0] * len(settings), 0
    for args, kwargs in calls:
        base = logits_of(model(*args, **kwargs))
        which = counted((args, kwargs), base)
        tokens += int(which.sum())
        for i, setting in enumerate(settings):
            with weights.placed(setting):
                sums[i] += _sum(base, logits_of(model(*args, **kwargs)), which)
        done()
    return [value / max(tokens, 1) for value in sums]


def _sum(base: torch.Tensor, logits: torch.Tensor, which: torch.Tensor) -> float:
    total, flat = 0.0, (base.reshape(-1, base.shape[-1]), logits.reshape(-1, logits.shape[-1]))
    for one, other, counts in zip(*(torch.split(x, ROWS) for x in (*flat, which)), strict=True):
        terms = divergence(one.float().log_softmax(-1), other.float().log_softmax(-1))
        total += float(torch.where(counts, terms, 0.0).sum())
    return total
