"""The page of experiment `fp8_training`: gaps to bfloat16 first, then speed, with published tables beside ours."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.fp8_training.report import convergence, found, speed, targets
from experiments.fp8_training.report.published_tables import comparisons
from experiments.fp8_training.report.targets import targets_by_run
from experiments.fp8_training.run import TITLE
from experiments.fp8_training.training.plans import MARGIN
from experiments.harness.rows import Row
from experiments.report.content import Headline, Section

QUESTION = "Is training in 8, 6 and 4 bits faster than in bfloat16, and does it converge as well?"
ABOUT = (
    "Linear layers whose three matrix products run in low precision: what they cost or gain in time and memory beside "
    "bfloat16 and torchao, and whether models converge as they do in bfloat16.",
    f"Convergence is of byte-level language models from random weights over paired seeds; the margin was named beforehand: "
    f"{MARGIN}% of the loss. On a CPU recipes are emulated and sizes are tiny.",
)
FEATURED = ("fp8-gaps-full", "fp8-gaps-full-prose", "fp8-gaps-quick")


def findings(rows: Sequence[Row]) -> list[str]:
    """Trainings of the largest runs, and how many targets are reached."""
    return [*found.of_trainings(rows), *targets.finding(rows)]


def headlines(rows: Sequence[Row]) -> list[Headline]:
    """Speed of two blocks, and gaps of paired trainings."""
    return [*speed.headlines(rows), *found.headlines(rows)]


def main_finding(rows: Sequence[Row]) -> str:
    """How many targets of speed and memory are reached, on the last device."""
    words = targets.finding(rows)
    return words[-1].removesuffix(".") if words else ""


def sections(rows: Sequence[Row]) -> list[Section]:
    """Convergence, faults, then speed."""
    return [*convergence.sections(rows), *speed.sections(rows)]


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
