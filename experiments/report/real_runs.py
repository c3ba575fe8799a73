"""Rows of real models as pages read them: a run of one model, its texts, the conditions of its tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from experiments.harness.rows import Row, table_parts
from experiments.models.causal_lm import BASE, FILE, MODEL, REAL
from experiments.models.quantized_model import WEIGHTS, activations_of
from experiments.report.results import Results, Where, number

CHANGE, CHANGE_ERROR = "loss, change", "loss, standard error of the change"
KL, KL_ERROR = "KL", "KL, standard error"
#: Of methods with data the shares of rounding's KL and of its loss that they take away.
RECOVERED, RECOVERED_ERROR = "KL, recovered", "KL, standard error of the recovered"
LOSS, LOSS_ERROR = "loss, recovered", "loss, standard error of the recovered"


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

    def told(self, prefix: str) -> str:
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
        made.append(RealRun(model, Where(scale, device, model), texts, Results(tables.get(MODEL, []))))
    return sorted(made, key=lambda one: (one.model, one.where.scale != "full", one.where.device))


def best_runs(rows: Iterable[Row]) -> list[RealRun]:
    """One run of each model: the largest scale, with results."""
    found: dict[str, RealRun] = {}
    for run in real_runs(rows):
        if run.texts:
            found.setdefault(run.model, run)
    return list(found.values())


def title_of(run: RealRun) -> str:
    """The title of a run's section."""
    return f"{run.model} ({run.where.scale} scale, {run.where.device})"


def about_of(run: RealRun) -> list[str]:
    """What a section says first: on which grid the file's weights were before, and the conditions of each text."""
    grid = f"**Grid of the file's weights before:** {run.told('grid: ')}. The baseline is the model as that file gives it."
    return [grid, *(conditions(name, results) for name, results in run.texts.items())]


def quality_cells(results: Results, setting: str, method: str) -> list[str]:
    """Perplexity, change of the loss and KL, as cells of a table."""
    return [
        number(results.value(setting, method, "perplexity"), 2),
        with_error(results, setting, method, CHANGE, CHANGE_ERROR),
        with_error(results, setting, method, KL, KL_ERROR),
    ]


def conditions(name: str, results: Results) -> str:
    """Text, windows and beginning of a table, and the dense model's perplexity."""
    value = {
        metric: results.value(WEIGHTS, BASE, metric)
        for metric in ("windows", "tokens of a window", "perplexity")
    }
    bos = results.value(WEIGHTS, BASE, "windows begin with BOS")
    beginning = "each begins with BOS" if bos else "none begins with BOS"
    return (
        f"Text {name}: {number(value['windows'], 0)} windows of {number(value['tokens of a window'], 0)} tokens, {beginning}; "
        f"the dense model's perplexity is {number(value['perplexity'], 2)}."
    )


def with_error(results: Results, setting: str, method: str, metric: str, error: str) -> str:
    """A value and its standard error, in parentheses where it is noise."""
    value, spread = results.value(setting, method, metric), results.value(setting, method, error)
    if value is None or spread is None or method == BASE:
        return ""
    text = f"{number(value, 3)} ± {number(spread, 3)}"
    return f"({text})" if abs(value) <= 2 * spread else text
