"""The part of the page of `fp8_training` on real models: the loss after fine-tuning in each recipe, beside bfloat16's."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from experiments.fp8_training.methods import BASE
from experiments.fp8_training.real import method_of
from experiments.harness.rows import Row, interval
from experiments.models.quantized_model import WEIGHTS
from experiments.report.content import Section, Table
from experiments.report.real_runs import RealRun, by_seed, real_runs, title_of, training_of
from experiments.report.results import Results, failures, number

TEXT = (
    (
        "For each seed the model is fine-tuned in bfloat16 and in each recipe on the same sequences, in the same order,"
        " with the same optimizer, and evaluated in bfloat16. Changes of the loss are relative to bfloat16 of the same "
        "seed, means over seeds with half of the 95% interval of a paired t test."
    ),
)
#: Columns of values of the model, by their metric and factor.
TRAINING = {
    "time of a step": ("time of a step (ms)", 1e3, 1),
    "memory of training": ("memory of training (GB)", 1e-9, 2),
}


def real_sections(rows: Sequence[Row]) -> list[Section]:
    """A section for each run."""
    return [section(run) for run in real_runs(rows)]


def section(run: RealRun) -> Section:
    """What recipes cost one model."""
    tables = [table(run, name, results) for name, results in run.texts.items()]
    return Section(title_of(run), [training_of(run), *TEXT, *failures(run.whole)], [], tables)


def table(run: RealRun, text: str, results: Results) -> Table:
    """A line for the model as it came, and for each recipe."""
    columns = [
        "model",
        "perplexity",
        "change of the loss (nats)",
        "seeds",
        *(name for name, _, _ in TRAINING.values()),
    ]
    first = ("fine-tuned", method_of(BASE))
    found = dict.fromkeys(row.method for row in results.rows)
    methods = sorted(found, key=lambda name: (name.startswith(first[0]), name != first[1]))
    lines = [line(run, results, method) for method in methods]
    return Table(f"{run.model}, {text}", columns, lines, results.rows)


def line(run: RealRun, results: Results, method: str) -> list[str]:
    """The cells of one model."""
    perplexities = by_seed(results, WEIGHTS, method, "perplexity")
    found, base = (by_seed(results, WEIGHTS, name, "loss") for name in (method, method_of(BASE)))
    both = (
        sorted(found.keys() & base.keys())
        if method.startswith("fine-tuned") and method != method_of(BASE)
        else []
    )
    change = ""
    if len(both) > 1:
        one = interval([found[seed] - base[seed] for seed in both])
        change = f"{one.mean:+.4f} ± {one.half:.4f}"
    cells = [
        number(run.whole.value(WEIGHTS, method, metric), digits, factor)
        for metric, (_, factor, digits) in TRAINING.items()
    ]
    return [method, number(fmean(perplexities.values()), 2), change, str(len(perplexities)), *cells]
