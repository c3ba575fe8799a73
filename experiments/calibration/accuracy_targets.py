"""Targets of accuracy, from rows of language models: what the best method leaves of rounding's loss, in each scheme.

The best method on a text is the one that recovers most of rounding's KL divergence on the run's other text. Held to a bound are
the change of the loss of SmolLM2 on WikiText-2, the share of the perplexity gap to the dense model that is closed (on each
text), and that no method is worse than rounding on a text (the least share of the KL divergence that the best method recovers).
Automatic choices are held to one scheme for all layers and to a rule by hand of their size, all over searched scales.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.calibration.cases import EXPERIMENT, ROUNDING
from experiments.calibration.choice import CHOSEN_BY, OVER
from experiments.harness.rows import Row
from experiments.models.causal_lm import BASE
from experiments.models.quantized_model import WEIGHTS
from experiments.report.real_runs import CHANGE, RECOVERED, RealRun, real_runs
from experiments.report.targets import Limit, RunTargets, Target, limits

#: Metrics of ``targets.csv`` beside those of rows.
GAP, LEAST = "perplexity gap closed", "least recovered"
#: How the names begin of the text and of the models whose loss is held to a bound.
WIKITEXT, MODELS = "wikitext", "SmolLM2"
METRICS = (CHANGE, GAP, LEAST, OVER)
#: Units of the metrics, and formats of their values; percent else.
UNITS = {CHANGE: ("nat", ".3f"), OVER: ("", ".3f")}


def targets_by_run(rows: Sequence[Row]) -> list[RunTargets]:
    """Of each model at full scale."""
    lines = [one for one in limits(EXPERIMENT) if one.metric in METRICS]
    return [
        RunTargets(run.where, [target for line in lines for target in targets_of(run, line)], "accuracy")
        for run in real_runs(rows)
        if run.where.scale == "full"
    ]


def targets_of(run: RealRun, limit: Limit) -> list[Target]:
    """A target for each text that a line of ``targets.csv`` is about."""
    found = []
    for text in run.texts:
        value = value_of(run, text, limit)
        if value is not None:
            unit, form = UNITS.get(limit.metric, ("%", ".1f"))
            name = f"{limit.key}, {text}: {limit.metric}"
            found.append(limit.target(name, value, unit=unit, value_format=form, limit_format="g"))
    return found


def value_of(run: RealRun, text: str, limit: Limit) -> float | None:
    """What the line is about on a text; None where it was not measured, or where text or model are none of the line's."""
    if limit.metric == CHANGE and not (text.startswith(WIKITEXT) and run.model.startswith(MODELS)):
        return None
    if limit.metric == OVER:
        return run.texts[text].value(limit.key, CHOSEN_BY, OVER)
    if limit.metric == LEAST:
        least = [
            one
            for setting in run.texts[text].settings
            if (one := best(run, text, setting, RECOVERED)) is not None
        ]
        return min(least, default=None)
    if limit.metric == CHANGE:
        return best(run, text, limit.key, CHANGE)
    value = run.texts[text].value
    ours, rounding, dense = (
        best(run, text, limit.key, "perplexity"),
        value(limit.key, ROUNDING, "perplexity"),
        value(WEIGHTS, BASE, "perplexity"),
    )
    if ours is None or rounding is None or dense is None or rounding == dense:
        return None
    return 100 * (rounding - ours) / (rounding - dense)


def best(run: RealRun, text: str, setting: str, metric: str) -> float | None:
    """A value of the best method of a scheme on a text; None without one."""
    results = run.texts[text]
    methods = dict.fromkeys(row.method for row in results.with_setting(setting).rows)
    chosen = run.chosen(text, setting, methods, RECOVERED, most=True)
    return results.value(setting, chosen, metric) if chosen else None
