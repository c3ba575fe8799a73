"""What a run of the benchmark uses, and the tables of its rows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.harness.outcome import Values
from experiments.harness.rows import Row
from experiments.harness.timing import Plan, Watch
from experiments.kernels.baselines import BASELINES, Baseline
from experiments.runs.settings import Settings

EXPERIMENT = "kernels"
KERNELS, BASELINE_TABLE, DATA = "kernels", "baselines", "random-normal"
#: Seconds after which no further baseline starts.
BASELINE_SECONDS = 200.0


PLAN = Plan()
BASELINE_PLAN = Plan(rounds=15, warmup=2)


@dataclass(frozen=True)
class Bench:
    """What a run uses: settings of its rows, the kernels, a watch, how long to look, which baselines and for how long, and
    the time for all."""

    settings: Settings
    fast: Any
    watch: Watch
    plan: Plan = PLAN
    baseline_plan: Plan = BASELINE_PLAN
    baselines: Sequence[Baseline] = BASELINES
    baseline_seconds: float = BASELINE_SECONDS
    #: Seconds after which no further case, and no baseline, starts.
    seconds: float = math.inf
    clock: Callable[[], float] = time.perf_counter


def table(bench: Bench, kind: str) -> str:
    """The table of this run's rows."""
    return f"{kind}/{bench.settings.scale}/{DATA}"


def rows_of(bench: Bench, kind: str, setting: str, method: str, values: Values) -> list[Row]:
    """Tidy rows."""
    return bench.settings.rows(EXPERIMENT, kind, DATA, setting, method, values)
