"""What the page of `loka` says of probes: predictions of layers and logits, the cost online, and of faulty kernels."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.harness.rows import Row
from experiments.loka.faulty_kernels import ALARMS, ERROR, ERRORS, FAULTY, KINDS, MERE, NAMED, SIGMAS
from experiments.loka.prediction import (
    ADDED,
    FORMULA,
    INDEPENDENT,
    LAYERS,
    MEASURED,
    OUTPUTS,
    PREDICTED,
    RATIO,
    SITES,
    SOURCES,
    SPREAD,
    WITHIN,
    WORST,
)
from experiments.loka.sampling_cost import CADENCES, COST, GATHERED, KEPT, SAMPLED, STEP
from experiments.report.content import Drawing, Headline, Section, Table
from experiments.report.phones import dots_twice
from experiments.report.plots import dots
from experiments.report.results import Results, Where, best_run, by_run, number, sections_by_run
from experiments.report.targets import RunTargets, Target, limit_of

EXPERIMENT = "loka"
#: Candidates whose errors are beyond first order: the target is for 8 bits.
FOUR_BITS = ("nf4", "nvfp4 x nvfp4")
SITE_TEXT = (
    "A layer's error is the norm of what quantized operands change of its output, over the output's norm. It is predicted from "
    "1024 tokens of earlier impressions, or from a model of them, and compared with that on later ones. N(0, 1) is what "
    "benchmarks of kernels draw, weights too.",
    "MERE, the mean of |error / output| by which LoKA selects, has no finite expectation where outputs pass through zero; "
    "the last column is its largest over its smallest value in eight samples of one layer's later impressions.",
)
OUTPUT_TEXT = (
    "All linear layers in a candidate at once. One backward pass over earlier impressions predicts the root mean square change "
    "of a logit; later impressions measure it. That errors "
    "of single layers cannot be propagated to the loss is a limit that LoKA states. "
    "The prediction is of first order: 4 bits, which move a logit by more than its deviation, are beyond it.",
)
COST_TEXT = (
    "A step that is sampled keeps tokens and gradients of each layer and runs eagerly; the others are as without one. "
    "LoKA samples every 100 steps (published: at most 1% of the time). Ranks are processes of one CPU.",
)
FAULT_TEXT = (
    "Defective kernels of `reference.probe.faults` and what tells them from correct ones: standard errors of the strongest "
    "test of `ao_lab.testing.probe_kernel` (inputs as they are, times powers of two, of other lengths, with a NaN; 10^6 where "
    "something is infinite or NaN that may not be). From 5 on the kernel is defective. MERE of inputs as they are, in its own "
    "standard errors over eight samples of a right kernel. LoKA reports one defect: MERE 0.42 for the correct and the "
    "faulty kernel on random inputs, 0.37 and 17.04 on learned ones.",
)


def findings(rows: Sequence[Row]) -> list[str]:
    """Sentences of the best run of each part."""
    words: list[str] = []
    if (best := best_run(by_run(rows, SITES))) is not None:
        share, worst = site_summary(best[1])
        random = max(best[1].value(s, m, f"{WORST}, {SOURCES[-1]}") or 0 for s, m in best[1].lines)
        words.append(
            f"From 1024 tokens a layer's error on later impressions is predicted within 5% for {number(share, 0)}% of layers "
            f"and candidates, at worst {number(worst, 2)}x; from random normal inputs up to {number(random, 1)}x."
        )
    if (best := best_run(by_run(rows, OUTPUTS))) is not None:
        ratios = [value for one in eight_bits(best[1]) if (value := best[1].value(*one, RATIO)) is not None]
        words.append(
            f"One backward pass predicts a logit's change in 8 bits at {number(min(ratios), 2)} to {number(max(ratios), 2)} of "
            f"what is measured."
        )
    if (best := best_run(by_run(rows, FAULTY))) is not None:
        found = {kind: [len(seen(best[1], kind, metric)) for metric in (SIGMAS, MERE)] for kind in KINDS}
        count = len(best[1].settings)
        parts = [f"{tests} and {mere} on {kind}" for kind, (tests, mere) in found.items()]
        words.append(
            f"Of a bank of {count} faulty kernels `probe_kernel` finds and MERE, the mean of |error / output|, finds: "
            f"{'; '.join(parts)}."
        )
    if (best := best_run(by_run(rows, ALARMS))) is not None:
        (one,) = best[1].lines
        told = (best[1].value(*one, metric) for metric in ("false alarms", "right kernels"))
        words.append(
            "Of right kernels {} of {} are taken for faulty ones.".format(
                *(number(value, 0) for value in told)
            )
        )
    return words


def eight_bits(results: Results) -> list[tuple[str, str]]:
    """Those of 8 bits."""
    return [one for one in results.lines if one[1] not in FOUR_BITS]


def site_summary(results: Results) -> tuple[float, float]:
    """The share of layers and candidates within 5 %, and the worst ratio."""
    counts = [
        (results.value(*one, LAYERS) or 0, results.value(*one, f"{WITHIN}, {SOURCES[0]}") or 0)
        for one in results.lines
    ]
    whole = sum(count for count, _ in counts)
    worst = max(results.value(*one, f"{WORST}, {SOURCES[0]}") or 0 for one in results.lines)
    return sum(count * share for count, share in counts) / max(whole, 1), worst


def seen(results: Results, kind: str, metric: str) -> list[str]:
    """The faults that are found on a kind of inputs."""
    return [name for name in results.settings if (results.value(name, kind, metric) or 0) >= ERRORS]


def sections(rows: Sequence[Row]) -> list[Section]:
    """Layers, logits, faults, cost; run by run."""
    made = (
        (SITES, "Errors of layers", SITE_TEXT, site_table),
        (OUTPUTS, "Changes of logits", OUTPUT_TEXT, output_table),
        (FAULTY, "Faulty kernels", FAULT_TEXT, fault_table),
        (ALARMS, "Right kernels", (), alarm_table),
        (COST, "Cost of sampling", COST_TEXT, cost_table),
    )
    return sections_by_run(rows, made, drawings_of)


def drawings_of(kind: str, where: Where, results: Results) -> list[Drawing]:
    """The figure of a kind of table, where there is one."""
    draw = {SITES: site_drawing, OUTPUTS: output_drawing, FAULTY: fault_drawing}.get(kind)
    return [] if draw is None else [draw(where, results)]


def site_table(results: Results) -> Table:
    """A line for every model and candidate."""
    sources = [source for source in SOURCES if f"{WORST}, {source}" in results.metrics]
    columns = [
        "candidate",
        "model",
        "layers",
        "error",
        *(f"{one}: within 5% (%), worst" for one in sources),
        "MERE's spread",
    ]
    body = [
        [
            method, setting, number(results.value(setting, method, LAYERS), 0),
            number(results.value(setting, method, "error, median of layers"), 4),
            *(f"{number(results.value(setting, method, f'{WITHIN}, {one}'), 0)}, "
              f"{number(results.value(setting, method, f'{WORST}, {one}'), 2)}x" for one in sources),
            number(results.value(setting, method, SPREAD), 1) + "x",
        ]
        for setting, method in results.lines
    ]  # fmt: skip
    return Table("Predicted error over that on later impressions", columns, body, results.rows)


def site_drawing(where: Where, results: Results) -> Drawing:
    """The worst prediction of each model and candidate, by where inputs come from."""
    shown = results.lines
    sources = [source for source in SOURCES if f"{WORST}, {source}" in results.metrics]
    series = {one: [results.value(*line, f"{WORST}, {one}") for line in shown] for one in sources}
    figure = dots(labels(shown), series, "worst ratio of predicted and measured errors of layers", base=1.0)
    return Drawing(
        f"loka-layers-{where.scale}{where.device_ending}",
        "Errors of layers: the prediction that is furthest off.",
        figure,
    )


def output_drawing(where: Where, results: Results) -> Drawing:
    """A logit's change, predicted and measured."""
    shown = results.lines
    series = {
        name: [results.value(*line, metric) for line in shown]
        for name, metric in (
            ("predicted", PREDICTED),
            ("as if layers were independent", INDEPENDENT),
            ("measured", MEASURED),
        )
    }
    figure = dots(labels(shown), series, "root mean square change of a logit", base=0.0)
    return Drawing(
        f"loka-logits-{where.scale}{where.device_ending}",
        "What all layers in a candidate change of a logit.",
        figure,
    )


def fault_drawing(where: Where, results: Results) -> Drawing:
    """Standard errors that find each fault on inputs of a layer: ours and MERE's."""
    series = {
        name: [results.value(one, KINDS[0], metric) for one in results.settings]
        for name, metric in (("tests of probe_kernel", SIGMAS), ("MERE", MERE))
    }
    figures = dots_twice(
        results.settings, series, "standard errors on inputs of a layer", symlog=1.0, base=ERRORS
    )
    return Drawing(
        f"loka-faults-{where.scale}{where.device_ending}",
        "Faulty kernels, by `probe_kernel` and by MERE, the mean of |error / output|: one is found from five standard errors "
        "on, the upright line.",
        *figures,
    )


def labels(shown: Sequence[tuple[str, str]]) -> list[str]:
    """Models and candidates as figures name them."""
    return [f"{setting}, {method}" for setting, method in shown]


def output_table(results: Results) -> Table:
    """A line for every model and candidate."""
    metrics = {PREDICTED: 4, INDEPENDENT: 4, MEASURED: 4, RATIO: 3, FORMULA: 5, ADDED: 5}
    body = [
        [
            method,
            setting,
            *(number(results.value(setting, method, one), digits) for one, digits in metrics.items()),
        ]
        for setting, method in results.lines
    ]
    columns = [
        "candidate",
        "model",
        "predicted",
        "as if independent",
        "measured",
        "ratio",
        "log loss by formula (nat)",
        "measured (nat)",
    ]
    return Table("What all layers in a candidate change", columns, body, results.rows)


def fault_table(results: Results) -> Table:
    """A line for every fault: standard errors on each kind of inputs, by tests and by MERE."""
    columns = [
        "fault",
        *(f"{kind}: {what}" for kind in KINDS for what in ("SE", "MERE's SE")),
        "error, of a right kernel's",
        "named",
    ]
    body = []
    for name in results.settings:
        values = [number(results.value(name, kind, metric), 1) for kind in KINDS for metric in (SIGMAS, MERE)]
        named = sum(results.value(name, kind, NAMED) or 0 for kind in KINDS)
        body.append(
            [
                name,
                *values,
                number(results.value(name, KINDS[0], ERROR), 2) + "x",
                f"{named:.0f} of {len(KINDS)}",
            ]
        )
    return Table("Standard errors that find a defect", columns, body, results.rows)


def alarm_table(results: Results) -> Table:
    """How many right kernels were taken for faulty ones."""
    metrics = ("right kernels", "false alarms", "largest difference")
    body = [
        [method, *(number(results.value(setting, method, one), 1) for one in metrics)]
        for setting, method in results.lines
    ]
    return Table(
        "Right kernels: sums in other orders, other scales, dtypes and schemes",
        ["", *metrics],
        body,
        results.rows,
    )


def cost_table(results: Results) -> Table:
    """A line for every model."""
    metrics = {STEP: 1, SAMPLED: 2, **{f"a sample every {every} steps": 3 for every in CADENCES}}
    more = {KEPT: 1, GATHERED: 1}
    metrics |= {one: digits for one, digits in more.items() if one in results.metrics}
    body = [
        [setting, *(number(results.value(setting, method, one), digits) for one, digits in metrics.items())]
        for setting, method in results.lines
    ]
    names = {KEPT: "kept of a site (MB)", GATHERED: "joining samples (s)"}
    columns = ["model", "step (ms)", "sampled step (x)", *(f"every {every} (%)" for every in CADENCES)]
    columns += [name for one, name in names.items() if one in metrics]
    return Table("What sampling adds to a step of training", columns, body, results.rows)


def headlines(rows: Sequence[Row]) -> list[Headline]:
    """None: the first page has ten."""
    return []


def targets_by_run(rows: Sequence[Row]) -> list[RunTargets]:
    """Predictions of layers and logits, faults and alarms, and the cost at 100 steps."""
    found = []
    for where, results in by_run(rows, SITES).items():
        share, worst = site_summary(results)
        values = {f"{WITHIN}, reservoir": share, f"{WORST}, reservoir": worst}
        targets = [limit_of(EXPERIMENT, "layers", name).target(name, value) for name, value in values.items()]
        found.append(RunTargets(where, targets, "predicted errors of layers"))
    for where, results in by_run(rows, OUTPUTS).items():
        targets = [_logit_target(results, *one) for one in eight_bits(results)]
        found.append(RunTargets(where, targets, "predicted changes of logits"))
    found += [
        RunTargets(where, _kernel_targets(results), "faulty kernels")
        for where, results in by_run(rows, FAULTY).items()
    ]
    for where, results in by_run(rows, ALARMS).items():
        limit = limit_of(EXPERIMENT, "right kernels", "false alarms")
        value = results.value("all", "all", "false alarms")
        found.append(RunTargets(where, [limit.target("false alarms", value)], "right kernels"))
    return found + [_cost_targets(where, results) for where, results in by_run(rows, COST).items()]


def _logit_target(results: Results, setting: str, method: str) -> Target:
    limit, value = limit_of(EXPERIMENT, "logits", RATIO), results.value(setting, method, RATIO)
    off = None if value is None else max(value, 1 / value)
    return limit.target(f"{setting}, {method}: {RATIO}, either way", off)


def _kernel_targets(results: Results) -> list[Target]:
    limit = limit_of(EXPERIMENT, "faults", SIGMAS)
    return [limit.target(name, results.value(name, KINDS[0], SIGMAS)) for name in results.settings]


def _cost_targets(where: Where, results: Results) -> RunTargets:
    units = {"a sample every 100 steps": "%", KEPT: "MB"}
    limits = {metric: limit_of(EXPERIMENT, "cost", metric) for metric in units}
    targets = [
        limits[metric].target(f"{setting}: {metric}", results.value(setting, method, metric), unit=unit)
        for setting, method in results.lines
        for metric, unit in units.items()
        if metric in results.metrics
    ]
    return RunTargets(where, targets, "cost")
