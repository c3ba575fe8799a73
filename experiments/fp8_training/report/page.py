"""The page of experiment `fp8_training`: gaps to bfloat16 first, then speed, with published tables beside ours."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.fp8_training.report import convergence, speed, targets
from experiments.fp8_training.report.published_tables import comparisons
from experiments.fp8_training.run import TITLE
from experiments.fp8_training.training.convergence import GAPS
from experiments.fp8_training.training.plans import MARGIN
from experiments.harness.rows import Row
from experiments.pretraining.run import BITS
from experiments.report.content import Section
from experiments.report.results import best_run, by_run

ABOUT = (
    "Linear layers whose three matrix products run in low precision: what they cost or gain in time and memory beside "
    "bfloat16 and torchao, and whether models converge as they do in bfloat16.",
    f"Convergence is of byte-level language models from random weights over paired seeds; the margin was named beforehand: "
    f"{MARGIN}% of the loss. On a CPU recipes are emulated and sizes are tiny.",
)
FEATURED = ("fp8-gaps-full", "fp8-gaps-full-prose", "fp8-gaps-quick")


def findings(rows: Sequence[Row]) -> list[str]:
    """The gaps of the largest run, and how many targets are reached."""
    return [*gaps_found(rows), *targets.finding(rows)]


def gaps_found(rows: Sequence[Row]) -> list[str]:
    """The gap of each recipe on held-out text, of the largest run."""
    found = best_run(by_run(rows, GAPS))
    if found is None:
        return []
    where, gaps = found
    metric = next((one for one in convergence.totals(gaps) if one.startswith(f"{BITS}, held")), None)
    if metric is None:
        return []
    words = []
    for setting, method in dict.fromkeys((row.setting, row.method) for row in gaps.rows):
        one = convergence.gap_of(gaps, setting, method, metric)
        if one is not None:
            words.append(f"{method} {one.mean:+.2f} ± {one.half:.2f}% ({one.verdict(MARGIN)})")
    name = metric.removeprefix(f"{BITS}, ")
    return [f"Gap to bfloat16 on {name} text, {where}: {'; '.join(words)}."] if words else []


def sections(rows: Sequence[Row]) -> list[Section]:
    """Convergence, faults, then speed."""
    return [*convergence.sections(rows), *speed.sections(rows)]


__all__ = ["ABOUT", "FEATURED", "TITLE", "comparisons", "findings", "sections"]
