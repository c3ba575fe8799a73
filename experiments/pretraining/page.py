"""The page of experiment `pretraining`: what each training reached, how fast it was, and its loss along the way."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.harness.rows import Row
from experiments.pretraining.run import BITS, CURVES, RUNS, of_common
from experiments.report.content import Drawing, Section, Table
from experiments.report.plots import dots
from experiments.report.results import Results, Where, best_run, by_run, number

TITLE = "Byte-level language models trained from scratch (proxy models)"
QUESTION = "How well do the models that are the baseline of low-precision training train?"
ABOUT = (
    (
        "Proxy models: byte-level Llamas trained here from random weights, in bfloat16 on a GPU. They are the baseline "
        "of low-precision training; neighbouring learning rates show how well each is trained."
    ),
)
#: Figures that the top of the page shows: the first that there is.
FEATURED = ("pretraining-full-prose", "pretraining-full", "pretraining-quick-prose", "pretraining-quick")
#: What metrics of common bytes leave out, and why.
COMMON_TEXT = (
    "Bits per common byte leave out bytes that the training text has less than once in a million; their share (%) stands "
    "beside. A model hardly learns them, and each costs many bits. Bits without rare bytes are of the text from which these "
    "are deleted, so that they stand in no context either."
)
TEXT = (
    "Tokens are bytes, so bits per byte need no tokenizer. Windows of evaluation lie at fixed places: every byte of a text is "
    "predicted once, with at least half a context in front of it. The total of a split is over its bytes. Books differ from "
    "each other more than close methods do.",
    COMMON_TEXT,
    "A token is a byte. Speed counts steps alone, without compilation, checkpoints and evaluation. The share of the peak is "
    "6 N + 6 L T w operations a trained byte (N parameters of linear layers, L layers of width w, sequences of T bytes, causal "
    "attention) over NVIDIA's dense bfloat16 peak of 989 TFLOP/s.",
)
SPEED = {
    "steps": ("steps", 0, 1.0),
    "trained bytes": ("trained (MB)", 1, 1e-6),
    "time of steps": ("time (s)", 1, 1.0),
    "tokens a second": ("tokens a second (10^3)", 1, 1e-3),
    "share of the bfloat16 peak": ("of the bfloat16 peak (%)", 1, 1.0),
    f"training {BITS} at the end": ("training, last steps", 4, 1.0),
}

Line = tuple[str, str, int]


def findings(rows: Sequence[Row]) -> list[str]:
    """The best training of each size."""
    found = best_run(by_run(rows, RUNS))
    if found is None:
        return []
    where, results = found
    total = totals(results)[:1]
    return [
        f"{best[0]}, {best[1]}: {number(value, 4)} {total[0]} ({where})."
        for best, value in (best_line(results, size, total[0]) for size in sizes(results))
    ]


def sections(rows: Sequence[Row]) -> list[Section]:
    """One per run."""
    curves = by_run(rows, CURVES)
    return [section(where, results, curves.get(where)) for where, results in by_run(rows, RUNS).items()]


def section(where: Where, results: Results, curves: Results | None) -> Section:
    """Evaluation, speed and curves."""
    tables = [speed_table(results), *([curve_table(curves)] if curves else [])]
    return Section(f"Trainings ({where})", TEXT, [drawing(where, results)], [bits_table(results), *tables])


def lines(results: Results) -> list[Line]:
    """(setting, method, seed) of every training."""
    return list(dict.fromkeys((row.setting, row.method, row.seed) for row in results.rows))


def values(results: Results) -> dict[tuple[Line, str], float]:
    """All values by training and metric."""
    return {((row.setting, row.method, row.seed), row.metric): row.value for row in results.rows}


def totals(results: Results) -> list[str]:
    """Metrics of evaluation, those over whole splits first."""
    found = [metric for metric in results.metrics if metric.startswith(f"{BITS}, ")]
    return sorted(found, key=lambda metric: "/" in metric)


def sizes(results: Results) -> list[str]:
    """Sizes that were trained, in order."""
    return list(dict.fromkeys(row.setting.partition(",")[0] for row in results.rows))


def best_line(results: Results, size: str, metric: str) -> tuple[Line, float]:
    """The training of a size with the fewest bits, and these."""
    known = values(results)
    mine = [
        (known[line, metric], line)
        for line in lines(results)
        if line[0].partition(",")[0] == size and (line, metric) in known
    ]
    value, line = min(mine)
    return line, value


def label(line: Line) -> str:
    """A training's name."""
    return f"{line[0]}, {line[1]}, seed {line[2]}"


def bits_table(results: Results) -> Table:
    """Bits per byte of every text."""
    known, metrics = values(results), [*totals(results), *of_common(results.metrics)]
    columns = ["training", *(metric.removeprefix(f"{BITS}, ") for metric in metrics)]
    rows = [
        [label(line), *(number(known.get((line, metric)), 4) for metric in metrics)]
        for line in lines(results)
    ]
    return Table("Bits per byte, by split and by text", columns, rows, results.rows)


def speed_table(results: Results) -> Table:
    """Steps, bytes, time, speed and share of the peak."""
    known = values(results)
    columns = ["training", *(name for name, _, _ in SPEED.values())]
    rows = []
    for line in lines(results):
        cells = []
        for metric, (_, digits, factor) in SPEED.items():
            value = known.get((line, metric))
            cells.append(number(value, digits, factor))
        rows.append([label(line), *cells])
    return Table("Training", columns, rows, results.rows)


def curve_table(results: Results) -> Table:
    """Means of the training loss over parts of the steps."""
    known, metrics = values(results), results.metrics
    columns = ["training", *(metric.rpartition("part ")[2] for metric in metrics)]
    rows = [
        [label(line), *(number(known.get((line, metric)), 3) for metric in metrics)]
        for line in lines(results)
    ]
    return Table("Training loss (bits per byte), means over parts of the steps", columns, rows, results.rows)


def drawing(where: Where, results: Results) -> Drawing:
    """Bits per byte of each split."""
    known = values(results)
    series = {
        metric.removeprefix(f"{BITS}, "): [known.get((line, metric)) for line in lines(results)]
        for metric in totals(results)
        if "/" not in metric
    }
    figure = dots([label(line) for line in lines(results)], series, BITS)
    return Drawing(f"pretraining-{where.ending}", "Bits per byte of text that was not trained on.", figure)
