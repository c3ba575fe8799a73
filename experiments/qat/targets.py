"""Targets of experiment `qat`: the percentage of the PTQ loss that QAT is to recover, mean over seeds."""

from __future__ import annotations

from experiments.report.results import Results
from experiments.report.targets import Target

#: Percent to recover, by bits of the weights.
TARGETS = {4: 90.0, 3: 80.0}
#: Metrics of rows: the target of a method, and what it reached.
TARGET_METRIC, RECOVERED = "bar", "recovered"


def targets_of(results: Results) -> list[Target]:
    """The targets of all methods that have one; without a value where the loss is too small for a percentage."""
    found = dict.fromkeys((row.setting, row.method) for row in results.rows if row.metric == TARGET_METRIC)
    return [
        Target(
            name=method,
            value=results.value(setting, method, RECOVERED),
            limit=results.value(setting, method, TARGET_METRIC) or 0.0,
            unit="%",
            value_format=".1f",
            limit_format=".0f",
            day=results.day(setting, method),
        )
        for setting, method in found
    ]
