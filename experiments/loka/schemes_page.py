"""What the page of `loka` says of predictions for a Llama and a vision transformer in every scheme."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.harness.rows import Row
from experiments.loka.every_scheme import BITS, ERROR, EVERY, OUTPUTS
from experiments.loka.prediction import LAYERS, MEASURED, PREDICTED, RATIO, SOURCES, WITHIN, WORST
from experiments.report.content import Drawing, Headline, Section, Table
from experiments.report.plots import dots
from experiments.report.results import Results, Where, best_run, by_run, number
from experiments.report.targets import RunTargets, limit_of

EXPERIMENT = "loka"
#: A logit's change over its deviation up to which an error is small, and bits from which the target for logits holds.
SMALL, LEAST_BITS = 0.1, 8
TEXT = (
    "A byte-level Llama and a vision transformer of collages of digits, small ones that are trained here. One pass over 256 "
    "examples predicts each layer's error in a scheme (of weights alone) or in a recipe of training, and the root mean square "
    "change of a logit with all layers in it; 256 later examples show both. The prediction is of first order: where outputs "
    f"move by much of their own deviation it is not meant to hold, and the target is for {LEAST_BITS} bits.",
    "Layers that a scheme's blocks do not divide stay out; a scheme for which no layer is left has no line.",
)


def measured(results: Results) -> list[tuple[str, str]]:
    """Settings with their methods that have a layer."""
    found = dict.fromkeys((row.setting, row.method) for row in results.rows)
    return [one for one in found if results.value(*one, LAYERS)]


def share_within(results: Results) -> float | None:
    """The share of layers and candidates whose error is predicted within 5 %."""
    counts = [
        (results.value(*one, LAYERS) or 0.0, results.value(*one, f"{WITHIN}, {SOURCES[0]}") or 0.0)
        for one in measured(results)
    ]
    whole = sum(count for count, _ in counts)
    return sum(count * share for count, share in counts) / whole if whole else None


def worst(results: Results) -> float | None:
    """The prediction of a layer's error that is furthest off."""
    found = [results.value(*one, f"{WORST}, {SOURCES[0]}") for one in measured(results)]
    return max((value for value in found if value is not None), default=None)


def ratios(results: Results) -> list[float]:
    """Predicted over measured changes of logits, of `LEAST_BITS` bits and more."""
    found = [
        results.value(*one, RATIO)
        for one in measured(results)
        if (results.value(*one, BITS) or 0) >= LEAST_BITS
    ]
    return [value for value in found if value is not None]


def findings(rows: Sequence[Row]) -> list[str]:
    """A sentence of the best run."""
    best = best_run(by_run(rows, EVERY))
    if best is None or not (found := ratios(best[1])):
        return []
    _, results = best
    count = len({method for _, method in measured(results)})
    return [
        f"In {count} schemes and recipes of a {' and a '.join(results.settings)} {number(share_within(results), 1)}% of "
        f"layers' errors are predicted within 5% (at worst by a factor of {number(worst(results), 2)}), and a logit's change "
        f"in {LEAST_BITS} bits at {number(min(found), 2)} to {number(max(found), 2)} of what is measured."
    ]


def sections(rows: Sequence[Row]) -> list[Section]:
    """Run by run: a figure and a table a model."""
    return [
        Section(
            f"Every scheme ({where})",
            TEXT,
            [drawing(where, results.with_setting(one)) for one in results.settings],
            [table(results.with_setting(one), one) for one in results.settings],
        )
        for where, results in by_run(rows, EVERY).items()
    ]


def table(results: Results, setting: str) -> Table:
    """A line for every candidate of a model."""
    metrics = {LAYERS: 0, ERROR: 4, f"{WITHIN}, {SOURCES[0]}": 0, f"{WORST}, {SOURCES[0]}": 3, PREDICTED: 4, MEASURED: 4,
               RATIO: 3}  # fmt: skip
    body = [
        [
            method, number(results.value(setting, method, BITS), 0),
            *(number(results.value(setting, method, one), digits) for one, digits in metrics.items()),
            number(relative(results, setting, method), 3),
        ]
        for _, method in measured(results)
    ]  # fmt: skip
    columns = ["candidate", "bits", "layers", "error", "within 5% (%)", "worst (x)", "logit's change, predicted", "measured",
               "ratio", "measured over the logit's deviation"]  # fmt: skip
    return Table(f"{setting}: predicted beside measured", columns, body, results.rows)


def relative(results: Results, setting: str, method: str) -> float | None:
    """A logit's change over its deviation."""
    change, whole = (results.value(setting, method, one) for one in (MEASURED, OUTPUTS))
    return change / whole if change is not None and whole else None


def drawing(where: Where, results: Results) -> Drawing:
    """Predicted over measured changes of logits whose errors are small, and those of layers, at worst."""
    (setting,) = results.settings
    shown = [
        one
        for _, one in measured(results)
        if (relative(results, setting, one) or 1) <= SMALL and "." not in one
    ]
    series = {
        name: [results.value(setting, one, metric) for one in shown]
        for name, metric in (
            ("change of a logit", RATIO),
            ("error of a layer, at worst", f"{WORST}, {SOURCES[0]}"),
        )
    }
    figure = dots(shown, series, "predicted over measured", base=1.0)
    caption = f"{setting}: predictions of candidates that move a logit by at most {SMALL:g} of its deviation."
    return Drawing(f"loka-schemes-{setting.lower()}-{where.scale}{where.device_ending}", caption, figure)


def headlines(rows: Sequence[Row]) -> list[Headline]:
    """None: the first page has ten."""
    return []


def targets_by_run(rows: Sequence[Row]) -> list[RunTargets]:
    """Shares of layers, and logits of 8 bits either way."""
    found = []
    for where, results in by_run(rows, EVERY).items():
        targets = [
            limit_of(EXPERIMENT, "schemes", "layers within 5%").target(
                "layers within 5%", share_within(results)
            ),
            limit_of(EXPERIMENT, "schemes", "predicted over measured").target(
                f"a logit's change in {LEAST_BITS} bits, either way",
                max((max(one, 1 / one) for one in ratios(results)), default=None),
            ),
        ]
        found.append(RunTargets(where, targets, "predictions in every scheme"))
    return found
