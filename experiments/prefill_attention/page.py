"""The page of experiment `prefill_attention`: errors of attention in 8 bits by recipe, and what is predicted with it."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.harness.rows import Row
from experiments.kv_cache.decode_attention import Size
from experiments.models.causal_lm import REAL
from experiments.prefill_attention.run import ALL, ATTENTION, COSINE, NORM, WORST
from experiments.prefill_attention.speed import COSINE as COSINE_OF_LAST
from experiments.prefill_attention.speed import GRAPH, PEERS, QUANTIZATION, RATE, SPEED, TIME
from experiments.report.content import Drawing, Headline, Section, Table
from experiments.report.phones import dots_twice
from experiments.report.plots import NARROW, curves
from experiments.report.real_runs import PREDICTED, divergences, predicted_cells, relative
from experiments.report.results import Results, Where, best_run, by_run, number
from experiments.report.targets import RunTargets, limit_of

EXPERIMENT = "prefill_attention"
TITLE = "Attention in 8 bits"
QUESTION = "How much accuracy does attention lose when both of its matmuls have 8-bit operands?"
ABOUT = (
    (
        "Queries times keys in int8 or e4m3, after a Hadamard transform of both and without the mean key, neither of "
        "which changes softmax; weights times values in e4m3, with sums in two levels. Errors are measured on the "
        "activations of trained models, and predictions beside the model's own."
    ),
)
#: Figures that the top of the page shows: the first that there is.
FEATURED = tuple(
    f"prefill-attention-smollm2-135m-instruct-wikitext-2-v1-test-{run}"
    for run in ("full", "full-cpu", "quick")
)
ERROR_TEXT = (
    "One window of the text; the error of attention over its result, the mean and the worst of the layers, beside float64 of "
    "the same states. Recipes without one of the two exact steps say what it is for.",
)
PREDICTED_TEXT = (
    "Every token of the windows with the model's attention replaced; changes are from its own predictions. After ± stands half "
    "of the 95% interval (Student's t), over windows of a text of one document and over documents where there are several.",
)
ERRORS = {COSINE: ("cosine", 5), COSINE + WORST: ("worst layer's", 5), NORM: ("norm of the error (%)", 2),
          NORM + WORST: ("worst layer's (%)", 2)}  # fmt: skip

SPEED_TEXT = (
    "Causal attention of a prompt on random states, microseconds, all methods in turn, as CUDA graphs and launched one by one; "
    "quantization is in every call, and beside it alone. Speed is of graphs.",
)
OVER = "speed over SDPA"
TIMES = {f"{TIME}{GRAPH}": ("CUDA graph (us)", 0), TIME: ("launched (us)", 0),
         f"{QUANTIZATION}{TIME}{GRAPH}": ("quantization alone (us)", 0), RATE: ("TFLOP/s", 0),
         COSINE_OF_LAST: ("cosine", 5)}  # fmt: skip


def kinds(rows: Sequence[Row]) -> list[str]:
    """Kinds of tables of real models."""
    return sorted({row.table.split("/")[0] for row in rows if row.table.startswith(REAL)})


def findings(rows: Sequence[Row]) -> list[str]:
    """Errors and changes of perplexity of each model."""
    words = []
    for kind in kinds(rows):
        best = best_run(by_run(rows, kind))
        if best is None:
            continue
        where, results = best
        errors = _said(results, ATTENTION, NORM, 100, 1)
        changes = changes_of(results)
        name = kind.removeprefix(REAL)
        if errors:
            words.append(
                f"Error of attention over the norm of its result, {name} ({where}, the first window): {errors}."
            )
        if changes:
            told = divergences(results, ALL)
            more = f"; KL divergence from its own predictions, in nats: {told}" if told else ""
            words.append(f"Change of the perplexity of {name} ({where}): {changes}{more}.")
    best_speed = best_run(by_run(rows, SPEED))
    if best_speed is not None and best_speed[0].scale != "quick":
        setting = best_speed[1].settings[-1]
        parts = [f"{name} {number(value, 2)}" for name, value in speeds(best_speed[1], setting).items()]
        words.append(f"Speed over SDPA's best at {setting} tokens ({best_speed[0]}): {', '.join(parts)}.")
    return words


def speeds(results: Results, setting: str) -> dict[str, float]:
    """How many times as quick as the quickest of torch's backends each recipe is, in CUDA graphs."""
    times = {name: results.value(setting, name, f"{TIME}{GRAPH}") for name in results.methods}
    best = min((us for name, us in times.items() if name in PEERS and us is not None), default=None)
    return {name: best / us for name, us in times.items() if best and us and name not in PEERS}


def targets_by_run(rows: Sequence[Row]) -> list[RunTargets]:
    """The quickest recipe of each size, at full scale."""
    limit = limit_of(EXPERIMENT, "any", OVER)
    return [
        RunTargets(
            where,
            [
                limit.target(f"quickest recipe: {OVER}, {Size.of(setting).tokens} tokens", max(found.values()), unit="x",
                             value_format=".2f", limit_format=".2f", day=results.day(setting, next(iter(found))))
                for setting in results.settings
                if (found := speeds(results, setting))
            ],
            "prefill attention",
        )
        for where, results in by_run(rows, SPEED).items()
        if where.scale != "quick"
    ]  # fmt: skip


def speed_section(where: Where, results: Results) -> Section:
    """A picture of speeds over the context, and a table of times."""
    lines = [
        [
            setting, name, *(number(results.value(setting, name, metric), digits) for metric, (_, digits) in TIMES.items()),
            number(speeds(results, setting).get(name), 2),
        ]
        for setting in results.settings
        for name in results.methods
    ]  # fmt: skip
    columns = ["sequences x tokens", "method", *(title for title, _ in TIMES.values()), "over SDPA's best"]
    drawings = []
    recipes = [name for name in results.methods if name not in PEERS]
    over = {name: [speeds(results, setting).get(name) for setting in results.settings] for name in recipes}
    if any(value is not None for values in over.values() for value in values):
        figure, narrow = (
            curves(over, "sequences x tokens", OVER, base=1.0, names=results.settings, width=width)
            for width in (7.6, NARROW)
        )
        narrow.axes[0].tick_params(axis="x", rotation=60)
        title = "Speed of causal attention in 8 bits over torch's best, quantization included."
        drawings.append(Drawing(f"prefill-attention-speed-{where.ending}", title, figure, narrow))
    return Section(f"Speed ({where})", SPEED_TEXT, drawings, [Table("A call", columns, lines, results.rows)])


def _said(results: Results, setting: str, metric: str, factor: float, digits: int) -> str:
    found = {method: results.value(setting, method, metric) for method in results.methods}
    return ", ".join(
        f"{in_words(name)} {number(factor * value, digits)}%"
        for name, value in found.items()
        if value is not None
    )


def main_finding(rows: Sequence[Row]) -> str:
    """What models predict with it, and the error of attention itself, of the last text; whole recipes alone."""
    kind = next(iter(kinds(rows)), "")
    best = best_run(by_run((row for row in rows if ", " not in row.method), kind))
    if best is None:
        return ""
    where, results = best
    changes = changes_of(results)
    words = [f"Change of the perplexity of {kind.removeprefix(REAL)} ({where}): {changes}" if changes else ""]
    errors = _said(results, ATTENTION, NORM, 100, 1)
    words += [f"error of attention over the norm of its result, first window: {errors}" if errors else ""]
    return "; ".join(filter(None, words))


def changes_of(results: Results) -> str:
    """The change of perplexity with each recipe."""
    found = {method: relative(results, ALL, method) for method in results.methods}
    return ", ".join(f"{in_words(method)} {change}" for method, change in found.items() if change)


#: Recipes without one of the exact steps, or both, by the ends of their names.
STEPS = {
    "not rotated": "without the Hadamard transform",
    "mean key left": "with the mean key",
    "neither": "without the transform and with the mean key",
}


def in_words(recipe: str) -> str:
    """A recipe by what it leaves out."""
    name, comma, step = recipe.partition(", ")
    return f"{name} {STEPS.get(step, step)}" if comma else name


def headlines(rows: Sequence[Row]) -> list[Headline]:
    """None: the first page has ten."""
    return []


def sections(rows: Sequence[Row]) -> list[Section]:
    """Models, run by run: errors, then predictions; then times."""
    models = [
        made
        for kind in kinds(rows)
        for where, results in by_run(rows, kind).items()
        for made in (
            error_section(kind.removeprefix(REAL), where, results),
            predicted_section(kind.removeprefix(REAL), where, results),
        )
        if made.tables[0].lines
    ]
    return models + [speed_section(where, results) for where, results in by_run(rows, SPEED).items()]


def error_section(name: str, where: Where, results: Results) -> Section:
    """A picture and a table by recipe."""
    methods = [method for method in results.methods if results.value(ATTENTION, method, NORM) is not None]
    norms = {
        "mean of layers": [results.value(ATTENTION, method, NORM) for method in methods],
        "worst layer": [results.value(ATTENTION, method, NORM + WORST) for method in methods],
    }
    figures = dots_twice(methods, norms, "norm of the error over that of the result")
    drawing = Drawing(
        f"prefill-attention-{name.lower()}-{where.data}-{where.ending}",
        f"What 8 bits lose in the attention of {name}.",
        *figures,
    )
    lines = [[method, *_cells(results, ATTENTION, method, ERRORS)] for method in methods]
    table = Table(
        "Errors of attention", ["recipe", *(title for title, _ in ERRORS.values())], lines, results.rows
    )
    return Section(f"Attention of {name} ({where})", ERROR_TEXT, [drawing], [table])


def predicted_section(name: str, where: Where, results: Results) -> Section:
    """A line for every recipe."""
    methods = [method for method in results.methods if results.value(ALL, method, "KL") is not None]
    lines = [[method, *predicted_cells(results, ALL, method)] for method in methods]
    table = Table("Predictions", ["recipe", *PREDICTED], lines, results.rows)
    return Section(f"Predictions of {name} ({where})", PREDICTED_TEXT, [], [table])


def _cells(results: Results, setting: str, method: str, metrics: dict[str, tuple[str, int]]) -> list[str]:
    """Values in a line; those in percent of the whole are fractions in the rows."""
    return [
        number((100 if metric.startswith(NORM) else 1) * value, digits) if value is not None else ""
        for metric, (_, digits) in metrics.items()
        for value in [results.value(setting, method, metric)]
    ]
