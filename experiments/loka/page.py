"""The page of experiment `loka`: each part's findings and sections, in the order of `PAGES`."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.harness.rows import Row
from experiments.loka import probe_page, published_page, schemes_page, speed_page, workloads_page
from experiments.report.content import Headline, Section
from experiments.report.targets import RunTargets

EXPERIMENT = "loka"
TITLE = "Low precision in recommendation models"
QUESTION = "Where is low precision safe in recommendation models, what does it cost, and is a kernel right?"
ABOUT = (
    (
        "LoKA (arXiv 2605.10886) trains large recommendation models in FP8 in three parts: Probe measures each layer's "
        "errors on learned inputs, Mods change models, Dispatch chooses kernels. Its code is not public; this is a "
        "reconstruction from descriptions of the paper, on reproduced models, on public data of packages and on synthetic "
        "impressions of a documented generator, with estimators of our own."
    ),
)
#: Figures that the top of the page shows: the first that there is.
FEATURED = ("loka-faults-full", "loka-faults-full-cpu", "loka-faults-quick")
#: What each part says.
PAGES = (probe_page, schemes_page, workloads_page, speed_page, published_page)


def findings(rows: Sequence[Row]) -> list[str]:
    """Of all parts."""
    return [one for page in PAGES for one in page.findings(rows)]


def main_finding(rows: Sequence[Row]) -> str:
    """Where it is safe, whether a kernel is right, and what it costs."""
    words = [
        *probe_page.findings(rows)[:1],
        *probe_page.findings(rows)[2:4],
        *workloads_page.findings(rows)[:1],
    ]
    return " ".join(words).rstrip(".")


comparisons = published_page.comparisons


def headlines(rows: Sequence[Row]) -> list[Headline]:
    """Of all parts."""
    return [one for page in PAGES for one in page.headlines(rows)]


def sections(rows: Sequence[Row]) -> list[Section]:
    """Of all parts."""
    return [one for page in PAGES for one in page.sections(rows)]


def targets_by_run(rows: Sequence[Row]) -> list[RunTargets]:
    """Of all parts."""
    return [one for page in PAGES for one in page.targets_by_run(rows)]
