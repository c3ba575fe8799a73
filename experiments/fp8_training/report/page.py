"""The page of experiment `fp8_training`: gaps to bfloat16 first, then speed, with published tables beside ours."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.fp8_training.report import convergence, found, speed, targets
from experiments.fp8_training.report.published_tables import comparisons
from experiments.fp8_training.run import TITLE
from experiments.fp8_training.training.plans import MARGIN
from experiments.harness.rows import Row
from experiments.report.content import Section

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


def sections(rows: Sequence[Row]) -> list[Section]:
    """Convergence, faults, then speed."""
    return [*convergence.sections(rows), *speed.sections(rows)]


__all__ = ["ABOUT", "FEATURED", "TITLE", "comparisons", "findings", "sections"]
