"""Records of tuning: a product, what can compute it, what was chosen. Serving, training and sparse weights have the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

import torch

from reference.training.recipe import PRODUCTS

#: What products are of: a layer with a quantized weight; the three of a training step; a whole training step of a layer.
DIRECTIONS = ("inference", *PRODUCTS, "training")
#: The choice for a training layer none of whose products runs in low precision.
DENSE = "dense"
#: What may be chosen for "training": every subset of the three products that run in low precision, all of them first.
SUBSETS = tuple("+".join(low) or DENSE for count in (3, 2, 1, 0) for low in combinations(PRODUCTS, count))
#: Ranges of rows are the powers of two; one that was not measured follows one that was, at most so many powers away.
NEAR = 2


@dataclass(frozen=True)
class Problem:
    """A product of a layer: all that choices depend on.

    a, b: keys of the operands' schemes, "" for a dense one; for "training" a recipe's key and "". rows: the layer's rows
    (tokens) rounded up to a power of two, so that a choice holds for a range of them. n, k: the product's other two lengths. As
    (rows of a, rows of b, sum) these are (rows, n, k), and (k, n, rows) for "weight_grad", whose sum runs over tokens.
    sparsity: "" or a pattern of b, such as "2:4". accumulation: how a product of training adds, "fast" or "precise"; "" for the
    other directions, whose keys say all. experts: how many matrices b holds, rows being sorted by expert; 0 for one matrix.
    """

    direction: str
    a: str
    b: str
    n: int
    k: int
    rows: int
    dtype: str
    sparsity: str = ""
    accumulation: str = ""
    experts: int = 0


@dataclass(frozen=True)
class Candidate:
    """A function that can compute a product.

    seconds: the median of what the choice goes by, in eager mode the larger one of 1.5 `host` (until all is launched) and `gpu`
    (until all is computed, launches hidden), under graphs `gpu`. spread: half of what lies between its 20% and 80% quantiles.
    error: the norm of the difference over the exact product's norm. reason: why it was not measured; "" where it was.
    most_rows: where that is the number of rows, the most that it takes.
    """

    kernel: str
    seconds: float | None = None
    spread: float | None = None
    error: float | None = None
    reason: str = ""
    host: float | None = None
    gpu: float | None = None
    most_rows: int | None = None

    def __str__(self) -> str:
        if self.seconds is None:
            return f"{self.kernel} (not measured: {self.reason})"
        error = "" if self.error is None else f", error {self.error:.1e}"
        return f"{self.kernel} ({self.seconds * 1e6:.1f} us{error})"


@dataclass(frozen=True)
class Choice:
    """What was chosen for a problem, and all that was looked at, the default first."""

    problem: Problem
    kernel: str
    candidates: tuple[Candidate, ...] = ()

    @property
    def candidate(self) -> Candidate:
        """The one that was chosen."""
        return next((c for c in self.candidates if c.kernel == self.kernel), Candidate(self.kernel))

    def covers(self, rows: int) -> bool:
        """Whether all that could compute a range of rows was looked at, and not left out for the rows that were measured."""
        fewest = rows // 2 + 1
        return rows >= self.problem.rows or all(
            c.most_rows is None or c.most_rows < fewest for c in self.candidates
        )

    def __str__(self) -> str:
        p = self.problem
        chosen = self.candidate
        others = ", ".join(str(c) for c in self.candidates if c is not chosen and c.seconds is not None)
        of = f" of {p.experts} expert{'s' * (p.experts > 1)}" if p.experts else ""
        beside = f"; beside {others}" if others else ""
        return f"{p.direction}{of} {p.n}x{p.k}, rows <= {p.rows}: {chosen}{beside}"


def problem_of(
    direction: str,
    a: str,
    b: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype | str,
    accumulation: str = "",
    experts: int = 0,
) -> Problem:
    """The problem of a product a (M, K) @ b.T (K, N), shape = (M, N, K), whose rows or sum are a layer's rows."""
    m, n, k = shape
    rows, k = (k, m) if direction == "weight_grad" else (m, k)
    rows = rows_range(rows)
    return Problem(direction, a, b, n, k, rows, str(dtype), accumulation=accumulation, experts=experts)


def rows_range(rows: int) -> int:
    """The power of two that stands for a number of rows: the smallest that is not below it."""
    return 1 << max(rows - 1, 0).bit_length()


def nearest(rows: int, measured: Iterable[tuple[int, str]]) -> str | None:
    """The choice for a range of rows from (range, choice) of others.

    Its own where it was measured. Between two that agree, theirs. Else that of the nearest range, the larger one of two, at
    most `NEAR` powers of two away. None elsewhere.
    """
    known = dict(measured)
    if rows in known:
        return known[rows]
    below = max((r for r in known if r < rows), default=None)
    above = min((r for r in known if r > rows), default=None)
    if below is not None and above is not None and known[below] == known[above]:
        return known[below]
    steps = {r: abs(r.bit_length() - rows.bit_length()) for r in (above, below) if r is not None}
    near = min(steps, key=lambda r: steps[r], default=None)
    return known[near] if near is not None and steps[near] <= NEAR else None


__all__ = [
    "DENSE",
    "DIRECTIONS",
    "SUBSETS",
    "Candidate",
    "Choice",
    "Problem",
    "nearest",
    "problem_of",
    "rows_range",
]
