"""The gap of a recipe to bfloat16 over paired seeds, with its interval, and what that says of a margin named beforehand.

Of each seed there are two trainings with the same initial weights and the same text in the same order. The gap of a seed is
100 (loss of the recipe / loss of bfloat16 - 1) percent, positive where the recipe is worse; over seeds it has Student's
interval of 95%.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.qat.summary import interval

WITHIN, BEYOND, UNDECIDED = "within the margin", "beyond the margin", "undecided"


@dataclass(frozen=True)
class Gap:
    """Percent of bfloat16's loss: the mean over seeds, half the width of its 95% interval, and how many seeds."""

    mean: float
    half: float
    seeds: int

    def verdict(self, margin: float) -> str:
        """Within: the whole interval lies below the margin. Beyond: all of it lies above. Else undecided.

        Being better than bfloat16 is within: the question is whether a recipe costs anything.
        """
        if self.mean + self.half < margin:
            return WITHIN
        return BEYOND if self.mean - self.half > margin else UNDECIDED


def gap(base: Sequence[float], recipe: Sequence[float]) -> Gap:
    """Of the losses of each seed, in the same order; ValueError for fewer than two seeds, or a base that is not positive."""
    if min(base, default=0.0) <= 0:
        raise ValueError(f"losses to compare with are positive, got {list(base)}")
    percents = [100 * (mine / theirs - 1) for mine, theirs in zip(recipe, base, strict=True)]
    found = interval(percents)
    return Gap(found.mean, found.half, len(percents))


__all__ = ["BEYOND", "UNDECIDED", "WITHIN", "Gap", "gap"]
