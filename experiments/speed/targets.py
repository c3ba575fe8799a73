"""Targets of experiment `speed`: the least ratios to other libraries, stored with each comparison, and import times."""

from __future__ import annotations

from experiments.report.results import Results
from experiments.report.targets import Target

#: Most seconds that an import may add to that of its libraries.
IMPORT_TARGET = 0.150
#: Metrics of rows: the target of a comparison, and why there is no ratio.
TARGET_METRIC, MISSING = "bar", "peer missing"


def target_of(results: Results, setting: str, method: str) -> Target | None:
    """The target of a comparison (a ratio) or of an import (a time); None where a row has none."""
    limit = results.value(setting, method, TARGET_METRIC)
    if limit is None:
        return None
    day = results.day(setting, method)
    if method.startswith("import "):
        return Target(
            method, results.value(setting, method, "time"), limit, at_least=False, unit="ms", day=day
        )
    return Target(method, results.value(setting, method, "ratio"), limit, day=day)
