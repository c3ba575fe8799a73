"""Part "cost" of `loka`: what an online probe adds to steps of training, on the clock of the machine at hand."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch
from torch.nn import functional

from ao_lab import Probe
from experiments.harness.measuring import Values
from experiments.loka.subjects import SIZES, impressions, subject

COST = "cost"
STEP, SAMPLED = "ordinary step", "sampled step over an ordinary one"
CADENCES = (1, 10, 100, 1000)


def cost_values(name: str, scale: str, seed: int, device: str) -> Values:
    """Ordinary and sampled steps in turn; what a sample every so many steps adds."""
    model = subject(name, scale, seed, device).model.train()
    probe = Probe(model, ["rowwise"], every=2, tokens=1024)
    data, size = impressions(scale, seed), SIZES[scale]
    times: dict[bool, list[float]] = {True: [], False: []}
    for batch in data.batches(size.plan.batch, seed, 14, device):
        _wait(device)
        started = time.perf_counter()
        with probe.step() as sampled:
            functional.binary_cross_entropy_with_logits(
                model(batch.dense, batch.ids).float(), batch.labels
            ).backward()
        _wait(device)
        times[sampled].append(time.perf_counter() - started)
        model.zero_grad()
    model.eval()
    # The first of each kind warms up.
    plain, with_sample = (statistics.median(times[kind][1:]) for kind in (False, True))
    more = max(with_sample / plain - 1, 0.0)
    values: Values = {STEP: (1e3 * plain, "ms"), SAMPLED: (with_sample / plain, "x")}
    return values | dict(_shares(more))


def _shares(more: float) -> Iterator[tuple[str, tuple[float, str]]]:
    for every in CADENCES:
        yield f"a sample every {every} steps", (100 * more / every, "%")


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


__all__ = ["COST", "cost_values"]
