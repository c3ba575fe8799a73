"""The part of the page of `sparsity` on real models: what two zeros in every four weights cost, by score."""

from __future__ import annotations

import math
from collections.abc import Sequence

from experiments.harness.rows import Row
from experiments.models.quantized_model import WEIGHTS
from experiments.report.content import Section, Table
from experiments.report.real_runs import (
    CHANGE,
    CHANGE_ERROR,
    RealRun,
    about_of,
    findings_of,
    quality_cells,
    real_runs,
    title_of,
)
from experiments.report.results import Results, failures, number

TEXT = (
    "Two of every four weights along a layer's inputs are zero, in all linear layers but a head that is tied to the embedding; "
    "they are pruned at once, in the model's order, and not trained afterwards. int4: the weights that stay are rounded to "
    "int4_g64. Changes are paired by window with the dense model's; after ± stands the standard error, over windows of a text "
    "of one document and over documents where there are several.",
)


def real_sections(rows: Sequence[Row]) -> list[Section]:
    """A section for each run."""
    return [
        Section(title_of(run), [*about_of(run), *TEXT, *failures(run.whole)], [],
                [table(run, name, results) for name, results in run.texts.items()])
        for run in real_runs(rows)
    ]  # fmt: skip


def table(run: RealRun, text: str, results: Results) -> Table:
    """A line for each arm."""
    columns = ["weights", "perplexity", "loss, change", "KL", "minutes"]
    lines = []
    for method in dict.fromkeys(row.method for row in results.rows):
        seconds = run.whole.value(WEIGHTS, method, "time to prune")
        lines.append([method, *quality_cells(results, WEIGHTS, method), number(seconds, 2, 1 / 60)])
    return Table(f"{run.model}, {text}", columns, lines, [*results.rows, *run.whole.rows])


def real_findings(rows: Sequence[Row]) -> list[str]:
    """What each score costs each model on its first text."""
    return findings_of(rows, finding)


def finding(run: RealRun) -> str:
    """The costs of one model."""
    text, results = next(iter(run.texts.items()))
    words = []
    for method in dict.fromkeys(row.method for row in results.rows):
        change, error = (results.value(WEIGHTS, method, one) for one in (CHANGE, CHANGE_ERROR))
        if method.startswith("2:4") and change is not None and error is not None and math.isfinite(change):
            words.append(
                f"{method.removeprefix('2:4, ')} {100 * math.expm1(change):+.0f}% ({change:+.2f} ± {error:.2f} nats)"
            )
    return (
        f"2:4 without training, {run.model}, perplexity over the dense model's on {text}: {', '.join(words)}."
        if words
        else ""
    )
