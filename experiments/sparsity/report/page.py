"""The page of experiment `sparsity`: gaps to dense models first, then speed beside published tables."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.harness.rows import Row
from experiments.report.content import Headline, Section
from experiments.sparsity.report import accuracy, products, speed
from experiments.sparsity.report.published_tables import comparisons
from experiments.sparsity.report.targets import targets_by_run
from experiments.sparsity.run import TITLE

QUESTION = "What do weights with two zeros in every four cost in accuracy, and what do they gain in time?"
ABOUT = (
    "Weights of which two of every four are zero: what that costs in accuracy, at once by each score and after sparse "
    "fine-tuning, alone and with 4-bit integers and FP8; and what it gains in time at the shapes of published tables.",
    "Accuracy is of stand-ins that are trained here, a vision transformer on real digits and a byte-level language model, over "
    "five paired seeds; margins were named beforehand. Times are of a GPU alone.",
    "The vision model of quick scale was chosen after results were seen: a smaller one, tuned for fewer steps, did not come "
    "back to within the margin (LOG.md has what was tried). At full scale nothing was measured before.",
)
FEATURED = ("sparsity-vision-gaps-full", "sparsity-vision-gaps-quick")


def findings(rows: Sequence[Row]) -> list[str]:
    """Gaps of the largest runs, and speeds."""
    return [*accuracy.findings(rows), *products.findings(rows), *speed.findings(rows)]


def headlines(rows: Sequence[Row]) -> list[Headline]:
    """A product, and gaps to dense."""
    return [*products.headlines(rows), *accuracy.headlines(rows)]


def main_finding(rows: Sequence[Row]) -> str:
    """What 2:4 gains of int4 layers in decoding."""
    return products.main_finding(rows)


def sections(rows: Sequence[Row]) -> list[Section]:
    """Accuracy, then products, then what they are parts of."""
    return [*accuracy.sections(rows), *products.sections(rows), *speed.sections(rows)]


__all__ = [
    "ABOUT",
    "FEATURED",
    "QUESTION",
    "TITLE",
    "comparisons",
    "findings",
    "headlines",
    "main_finding",
    "sections",
    "targets_by_run",
]
