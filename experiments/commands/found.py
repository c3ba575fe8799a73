"""What `ao-lab reproduce EXPERIMENT --model DIR` prints of the models that were measured: as text, and as values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ao_lab.cli.terminal import console, say
from experiments.harness.paths import Paths
from experiments.harness.registry import EXPERIMENTS


def show_findings(
    names: Sequence[str], models: Sequence[str], folders: Paths, written: Sequence[str] = ()
) -> None:
    """What the pages of experiments say first of these models, what was not measured, and where the rest is: on pages of the
    experiments, where such were written, else on the page of the models alone."""
    from experiments.report.model_values import late, told_missing

    found = told_of(names, models, folders)
    for line in (*found["findings"], *told_missing(found["not_measured"])):
        console().print(line, markup=False)
    if not found["findings"] and not any(late(one["reason"]) for one in found["not_measured"]):
        say(
            "no finding: so few tokens or schemes make none; the tables have the numbers, and --json prints them"
        )
    pages = [f"{name}.html" for name in names if f"{name}: page" in written] or ["index.html"]
    for page in pages:
        say(f"all tables and figures: {folders.reports / page}")


def told_of(names: Sequence[str], models: Sequence[str], folders: Paths) -> dict[str, list[Any]]:
    """Of these models the numbers of the experiments with their intervals, what is said in words, the findings, and what was
    not measured, and why."""
    from experiments.harness.rows import read
    from experiments.models.causal_lm import real_model
    from experiments.report import model_values

    titles = [real_model(given, folders.cache).name for given in models]
    told: dict[str, list[Any]] = {"findings": [], "not_measured": [], "words": [], "rows": []}
    for name in names:
        every = list(read(folders.rows(name)))
        found = EXPERIMENTS[name].page_module().findings(every)
        told["findings"] += [line for line in found if any(title in line for title in titles)]
        rows = model_values.of_models(every, titles)
        told["not_measured"] += model_values.missing(rows)
        told["words"] += model_values.words(rows)
        told["rows"] += model_values.values(rows)
    return told
