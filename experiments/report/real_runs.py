"""Rows of real models as pages read them: a run of one model, its texts, the conditions of its tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from experiments.harness.rows import Row, table_parts
from experiments.models.causal_lm import BASE, FILE, MODEL, REAL
from experiments.models.quantized_model import WEIGHTS, activations_of
from experiments.models.serving import THREADS
from experiments.report.content import windows_in
from experiments.report.results import Results, Where, interval_cell, number

CHANGE, CHANGE_ERROR = "loss, change", "loss, standard error of the change"
PERPLEXITY = "perplexity, change"
KL, KL_ERROR = "KL", "KL, standard error"
#: Of methods with data the shares of rounding's KL and of its loss that they take away.
RECOVERED, RECOVERED_ERROR = "KL, recovered", "KL, standard error of the recovered"
LOSS, LOSS_ERROR = "loss, recovered", "loss, standard error of the recovered"
T = TypeVar("T")


@dataclass(frozen=True)
class RealRun:
    """The rows of one model at one scale on one device: of each text by name, and of the model."""

    model: str
    where: Where
    texts: dict[str, Results]
    whole: Results

    @property
    def ending(self) -> str:
        """How names of its figures end."""
        word = "".join(letter if letter.isalnum() else "-" for letter in self.model.lower())
        return f"{word}-{self.where.scale}{self.where.device_ending}"

    def fact(self, prefix: str) -> str:
        """What a row of the file says after a prefix; "" without one."""
        metrics = (row.metric for row in self.whole.rows if row.setting == FILE)
        return next((one.removeprefix(prefix) for one in metrics if one.startswith(prefix)), "")

    @property
    def lines(self) -> list[str]:
        """Methods, the largest first."""
        names = [one for one in self.whole.methods if one != FILE]
        return sorted(names, key=lambda one: -(self.size(one) or 0.0))

    def size(self, method: str) -> float | None:
        """Bytes of the model, by whichever of its settings was measured."""
        found = (self.whole.value(self.setting(method, inputs), method, "size") for inputs in (False, True))
        return next((one for one in found if one is not None), None)

    def setting(self, method: str, activations: bool) -> str:
        """The setting of a method with its inputs quantized or not; "" where it has none."""
        found = dict.fromkeys(
            row.setting for row in self.whole.rows if row.method == method and row.setting != FILE
        )
        return next((one for one in found if (activations_of(one) is not None) == activations), "")

    def measured(self) -> Iterator[tuple[str, str]]:
        """(setting, method) of everything, the largest model first, weights alone before inputs too."""
        for method in self.lines:
            yield from ((one, method) for inputs in (False, True) if (one := self.setting(method, inputs)))

    def panels(self, panel: Callable[[Results, bool], T | None]) -> dict[str, T]:
        """Panels of a figure by title: of each text for weights alone, and with inputs; empty ones are left out."""
        found = {
            f"{name}: {words}": panel(results, inputs)
            for name, results in self.texts.items()
            for inputs, words in ((False, "weights"), (True, "weights and inputs"))
        }
        return {title: one for title, one in found.items() if one}

    def chosen(
        self, text: str, setting: str, methods: Iterable[str], metric: str, *, most: bool = False
    ) -> str:
        """The method of the least (or most) mean of a metric over the other texts, so that none is chosen by the text that
        judges it; where there is no other, by that text. "" where none was measured."""
        return self.chosen_by(
            text, methods, lambda results, method: results.value(setting, method, metric), most=most
        )

    def chosen_by(
        self, text: str, methods: Iterable[str], value: Callable[[Results, str], float | None], *, most: bool = False
    ) -> str:  # fmt: skip
        """The same of any value of a text's results and a method; None where it was not measured."""
        others = [one for name, one in self.texts.items() if name != text] or [self.texts[text]]
        known = {}
        for method in methods:
            values = [value(one, method) for one in others]
            there = [value for value in values if value is not None and math.isfinite(value)]
            if len(there) == len(others):
                known[method] = fmean(there)
        return (max if most else min)(known, key=known.__getitem__, default="")


def real_runs(rows: Iterable[Row]) -> list[RealRun]:
    """The runs, each model's largest scale first."""
    found: dict[tuple[str, str, str], dict[str, list[Row]]] = {}
    # Of several seeds the last row of a value is the one that `Results` gives: that of the first seed.
    for row in sorted(rows, key=lambda row: -row.seed):
        kind, scale, data = table_parts(row.table)
        if kind.startswith(REAL):
            tables = found.setdefault((kind.removeprefix(REAL), scale, row.device), {})
            tables.setdefault(data, []).append(row)
    made = []
    for (model, scale, device), tables in found.items():
        texts = {
            name: Results(table) for name, table in sorted(tables.items(), reverse=True) if name != MODEL
        }
        where = Where(
            scale, device, model, windows_in(row for results in texts.values() for row in results.rows)
        )
        made.append(RealRun(model, where, texts, Results(tables.get(MODEL, []))))
    return sorted(made, key=lambda one: (one.model, one.where.scale != "full", one.where.device))


def best_runs(rows: Iterable[Row]) -> list[RealRun]:
    """One run of each model: the largest scale, with results."""
    found: dict[str, RealRun] = {}
    for run in real_runs(rows):
        if run.texts:
            found.setdefault(run.model, run)
    return list(found.values())


def findings_of(rows: Iterable[Row], finding: Callable[[RealRun], str]) -> list[str]:
    """A sentence for each model, of its largest run; none where there is nothing to say."""
    return [sentence for run in best_runs(rows) if (sentence := finding(run))]


def title_of(run: RealRun, ending: str = "") -> str:
    """The title of a run's section or table."""
    return f"{run.model}{ending} ({run.where.run})"


def grid_of(run: RealRun) -> str:
    """On which grid the file's weights were before."""
    return f"**Grid of the file's weights before:** {run.fact('grid: ')}."


def about_of(run: RealRun, describe: Callable[[str, Results], str] | None = None) -> list[str]:
    """What a section says first: the grid, and the conditions of each text."""
    grid = f"{grid_of(run)} The baseline is the model as that file gives it; numbers on one text compare."
    return [grid, *((describe or conditions)(name, results) for name, results in run.texts.items())]


def training_of(run: RealRun) -> str:
    """How models of a run were trained."""
    steps, tokens, rate = (
        run.whole.value(FILE, FILE, name) for name in ("steps", "tokens of a step", "learning rate")
    )
    return (
        f"Trained for {number(steps, 0)} steps of {number(tokens, 0)} tokens at a peak rate of {rate or 0:g}, weights in "
        f"{run.fact('trains in: ')}."
    )


def by_seed(results: Results, setting: str, method: str, metric: str) -> dict[int, float]:
    """Values of a metric by seed."""
    return {
        row.seed: row.value
        for row in results.rows
        if (row.setting, row.method, row.metric) == (setting, method, metric)
    }


def quality_cells(results: Results, setting: str, method: str) -> list[str]:
    """Perplexity, change of the loss and KL, as cells of a table."""
    return [
        number(results.value(setting, method, "perplexity"), 2),
        "" if method == BASE else results.with_half(setting, method, CHANGE, CHANGE_ERROR),
        "" if method == BASE else results.with_half(setting, method, KL, KL_ERROR),
    ]


def relative(results: Results, setting: str, method: str) -> str:
    """The change of perplexity with half of its 95% interval, in percent; "" where it was not measured or is not finite."""
    change, loss = (results.value(setting, method, one) for one in (PERPLEXITY, CHANGE))
    half = results.half(setting, method, CHANGE_ERROR)
    if change is None or loss is None or half is None or not math.isfinite(change):
        return ""
    # The error of a ratio of perplexities is that of the loss times the ratio.
    return interval_cell(change, 100 * math.exp(loss) * half, noise=False, sign=True, unit="%")


def predicted_cells(results: Results, setting: str, method: str) -> list[str]:
    """Change of perplexity (percent) and KL (nat), each with half of its 95% interval, and the share of same first choices."""
    return [
        relative(results, setting, method),
        results.with_half(setting, method, KL, KL_ERROR),
        number(results.value(setting, method, "same first choice"), 2),
    ]


#: Their columns.
PREDICTED = ("perplexity, change", "KL (nat)", "same first choice (%)")


def divergences(results: Results, setting: str) -> str:
    """The KL divergence of each method with half of its interval, in words; "" where none was measured."""
    found = {name: results.with_half(setting, name, KL, KL_ERROR) for name in results.methods}
    return ", ".join(f"{name} {cell}" for name, cell in found.items() if cell)


def threads_of(results: Results) -> str:
    """With how many CPU threads speeds of a table were timed, in words that follow others; "" where its rows do not say it."""
    found = sorted({int(row.value) for row in results.rows if row.metric == THREADS})
    return f"; timed with {' or '.join(map(str, found))} CPU thread{'s' * (found != [1])}" if found else ""


def windows_of(results: Results) -> str:
    """How much text a table is measured on: "32 windows of 2048 tokens"; "" where its rows do not say it."""
    return str(windows_in(results.rows) or "")


def conditions(name: str, results: Results) -> str:
    """Text, windows and beginning of a table, and the dense model's perplexity."""
    perplexity = results.value(WEIGHTS, BASE, "perplexity")
    bos = results.value(WEIGHTS, BASE, "windows begin with BOS")
    beginning = "each begins with BOS" if bos else "none begins with BOS"
    return f"Text {name}: {windows_of(results)}, {beginning}; the dense model's perplexity is {number(perplexity, 2)}."
