"""Fit the model of `linear_sparse`'s choice to times, and say what its choice loses. No GPU is needed.

    PYTHONPATH=. python tests/gpu/sparsity/rates.py reports/data/linear_sparse_times.json

The file has rows of `validate.py sm90_sparse24_gemm --part times`. Prints the constants for
`fast.kernels.sm90_sparse24_gemm.select.Rates`, how far predictions are off, and for each shape what the model takes of what was
timed, before and after.

Least squares on the logarithm of times, over the logarithms of the constants; each is held to its value of before as weakly as
one measurement (`PRIOR`), so that what no time says anything of stays where it was. The clock is not fitted: a factor of it is
one of all others. Levenberg's steps with differences for derivatives, from several beginnings: the model is a maximum of three,
whose valleys are many.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from fast.kernels.sm90_sparse24_gemm.select import MULTIPROCESSORS, RATES, Rates, Terms, cycles_of, terms
from fast.kernels.sm90_sparse24_gemm.variants import Variant
from tests.gpu.sparsity.gemm import BITS

#: The weight of a constant's deviation: a factor of e counts as a time that is off by so much (in logarithms).
PRIOR = 0.1
STEPS, DIFFERENCE = 60, 1e-4
#: Factors of the rates of caches and of the tensor core in the beginnings.
BEGINNINGS = (0.5, 1.0, 2.0)


class Choice(NamedTuple):
    """What the model takes of what was timed for a shape, and how its time lies over the quickest (1: none is quicker)."""

    shape: tuple[int, ...]
    dtype: str
    name: str
    best: str
    regret: float


def usable(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that were right and timed."""
    return [row for row in rows if row.get("us") and row.get("right", True)]


def described_now(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with what the model says of their variants as it is now; files of before have what it said then."""

    def now(row: dict[str, Any]) -> Terms:
        (m, n, k), bits = row["shape"], BITS[row["dtype"]]
        return terms(Variant(**row["variant"]), m, n, k * bits // 8, bits, MULTIPROCESSORS)

    return [{**row, "terms": now(row)._asdict()} for row in rows]


def fitted(rows: Sequence[dict[str, Any]], before: Rates = RATES) -> Rates:
    """The constants that fit best, for the clock of before; ValueError where fewer times than constants are there."""
    found = usable(rows)
    if len(found) < len(before) - 1:
        raise ValueError(
            f"{len(before) - 1} constants are fitted to at least as many times, got {len(found)}"
        )
    parts = [Terms(**row["terms"]) for row in found]
    measured = np.log([row["us"] for row in found])
    start = np.log(np.array(before[:-1]))
    results = [
        descended(parts, measured + np.log(before.clock), start, start + np.log([low, read, core, 1.0, 1.0]))
        for low, read, core in product(BEGINNINGS, BEGINNINGS, (1.0, 1.5))
    ]
    return Rates(*map(float, np.exp(min(results, key=lambda one: one[0])[1])), before.clock)


def descended(
    parts: Sequence[Terms], measured: np.ndarray, prior: np.ndarray, point: np.ndarray
) -> tuple[float, np.ndarray]:
    """(sum of squares, constants' logarithms) at the end of the steps from a point."""
    damping = 1e-2
    here = residuals(parts, measured, prior, point)
    for _ in range(STEPS):
        slopes = np.stack(
            [
                (residuals(parts, measured, prior, point + DIFFERENCE * axis) - here) / DIFFERENCE
                for axis in np.eye(len(point))
            ],
            1,
        )
        normal = slopes.T @ slopes
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -slopes.T @ here)
        there = residuals(parts, measured, prior, point + step)
        if there @ there < here @ here:
            point, here, damping = point + step, there, damping / 3
        else:
            damping *= 4
    return float(here @ here), point


def residuals(
    parts: Sequence[Terms], measured: np.ndarray, prior: np.ndarray, point: np.ndarray
) -> np.ndarray:
    """Differences of logarithms of times, then of constants."""
    rates = Rates(*np.exp(point), 1.0)
    predicted = np.log([microseconds(one, rates) for one in parts])
    return np.concatenate([predicted - measured, PRIOR * (point - prior)])


def microseconds(parts: Terms, rates: Rates) -> float:
    """The time of a product by the model."""
    return cycles_of(parts, rates) / rates.clock / 1e3


def spread(rows: Sequence[dict[str, Any]], rates: Rates) -> float:
    """The root mean square of differences of logarithms: about the share by which predictions are off."""
    found = usable(rows)
    off = [np.log(microseconds(Terms(**row["terms"]), rates) / row["us"]) for row in found]
    return float(np.sqrt(np.mean(np.square(off))))


def choices(rows: Sequence[dict[str, Any]], rates: Rates) -> list[Choice]:
    """Of each shape, among what was timed."""
    groups: dict[tuple[tuple[int, ...], str], list[dict[str, Any]]] = defaultdict(list)
    for row in usable(rows):
        groups[tuple(row["shape"]), row["dtype"]].append(row)
    found = []
    for (shape, dtype), mine in groups.items():
        taken = min(mine, key=lambda row: microseconds(Terms(**row["terms"]), rates))
        best = min(mine, key=lambda row: row["us"])
        found.append(Choice(shape, dtype, taken["name"], best["name"], taken["us"] / best["us"]))
    return found


def main(arguments: list[str]) -> int:
    """Read, fit, report."""
    if len(arguments) != 1:
        print(__doc__)
        return 2
    content = json.loads(Path(arguments[0]).read_text())
    rows = described_now(content.get("rows") or content["times"])
    found = fitted(rows)
    print(f"{content['device']}: Rates({', '.join(f'{k}={v:.4g}' for k, v in found._asdict().items())})")
    for name, rates in (("before", RATES), ("fitted", found)):
        report(name, rows, rates)
    return 0


def report(name: str, rows: list[dict[str, object]], rates: Rates) -> None:
    """How far predictions are off, and every choice that is not the quickest."""
    made = choices(rows, rates)
    worst = max(one.regret for one in made)
    mean = sum(one.regret for one in made) / len(made)
    off = f"predictions off by {spread(rows, rates):.1%}"
    print(
        f"{name}: {off}, choices slower than the quickest by {mean - 1:.1%} in the mean, {worst - 1:.1%} at most"
    )
    for one in sorted(made, key=lambda one: -one.regret):
        if one.regret > 1:
            shape = "x".join(map(str, one.shape))
            print(f"    {shape} {one.dtype}: {one.name}, {one.regret:.3f} of {one.best}")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
