"""Rows of experiment `kernels` read back: one line per case and shape, with its targets, whether they are met, and the
fastest baseline. What was measured with another kernel than runs today (`experiments.report.launched`) has that as its status,
and no value: it misses no target."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch

from ao_lab.config.recipe import named
from experiments.harness.rows import Row
from experiments.kernels.baselines import BASELINES
from experiments.kernels.cases import CASES
from experiments.kernels.operations import HUGE, SHAPES, SHOWN, SMALL, Case
from experiments.kernels.run import BASELINE_TABLE, KERNELS, TORCH, WAYS
from experiments.kernels.run import KIND as JAX
from experiments.report import launched
from experiments.report.results import Results, Where, by_run
from experiments.report.targets import BASELINE_TOLERANCE, RunTargets, Target
from fast.gemm.choose import choose
from fast.gemm.families import CODES, HOPPER, PLAIN, Family, Problem
from reference import SCHEMES

STATUS, TARGET = "status: ", "target: "
#: What precedes and follows the words of a failure: the class, and where to search for it.
ERROR, ADVICE = re.compile(r"^error: (?:\w+: )?"), re.compile(r"\s*Search for `.*$", re.DOTALL)
#: What a value of a metric is of, where its name does not say it.
OF = {"fraction": "of a copy's bandwidth"}
#: Metrics for which less is better.
LESS = ("time over elementwise", "host time", "host time, added", *(f"{way} over {TORCH}" for way in WAYS))


@dataclass(frozen=True)
class BaselineResult:
    """A baseline beside a case: its time over ours, or why there is none."""

    baseline: str
    ratio: float | None
    status: str
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True)
class CaseResult:
    """What is known of one case at one shape: its values, targets and baselines."""

    case: str
    shape: str
    status: str
    values: dict[str, float]
    targets: tuple[Target, ...]
    baselines: tuple[BaselineResult, ...] = ()
    rows: tuple[Row, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether it was measured."""
        return self.status == "ok"

    @property
    def best_baseline(self) -> BaselineResult | None:
        """The fastest baseline that ran."""
        ran = [one for one in self.baselines if one.ratio is not None]
        return min(ran, key=lambda one: one.ratio or 0.0, default=None)

    @property
    def missed(self) -> list[str]:
        """Targets that were not met, in words; a wrong result misses its targets, what did not run misses none (`reason`)."""
        if self.wrong:
            return [self.status] if self.targets else []
        return [str(target) for target in self.targets if target.reached is False]

    @property
    def below(self) -> bool:
        """Whether it misses a target of the fraction of a copy's bandwidth, of what figures of it show."""
        return any(target.name == "fraction" and target.reached is False for target in self.targets)

    @property
    def wrong(self) -> bool:
        """Whether it ran, and its result was not the reference's."""
        return self.status.startswith("wrong")

    @property
    def reason(self) -> str:
        """Why a case was not measured, in a few words: what its program said, without its class and its advice."""
        return ADVICE.sub("", ERROR.sub("", self.status)).strip()

    @property
    def faster_baselines(self) -> list[BaselineResult]:
        """Baselines that are faster than ours."""
        return [one for one in self.baselines if one.ratio is not None and one.ratio < 1 - BASELINE_TOLERANCE]

    @property
    def slower_than(self) -> list[str]:
        """The same in words."""
        return [f"{one.baseline} {one.ratio:.2f}x" for one in self.faster_baselines]

    @property
    def verdict(self) -> str:
        """Of the targets: yes, no with the reason, or nothing where there is none."""
        if self.missed:
            return "MISSED: " + "; ".join(self.missed)
        if not self.ok:
            return f"not measured: {self.reason}"
        return "yes" if self.targets else ""


def results_of(rows: Iterable[Row]) -> dict[Where, list[CaseResult]]:
    """Lines of every run, in the order of the registry and of the shapes."""
    rows = list(rows)
    baselines = by_run(rows, BASELINE_TABLE)
    return {
        where: ordered([line(key, found, baselines.get(where)) for key in found.keys])
        for where, found in ((where, Found(results)) for where, results in by_run(rows, KERNELS).items())
    }


class Found:
    """The rows of a run by (shape, case)."""

    def __init__(self, results: Results) -> None:
        self.rows: dict[tuple[str, str], list[Row]] = {}
        for row in results.rows:
            self.rows.setdefault((row.setting, row.method), []).append(row)

    @property
    def keys(self) -> list[tuple[str, str]]:
        """(shape, case) in the order of the rows."""
        return list(self.rows)


def line(key: tuple[str, str], found: Found, baselines: Results | None) -> CaseResult:
    """One line from its rows and its baselines'."""
    shape, case = key
    rows = found.rows[key]
    if old := next(filter(None, map(outdated, rows)), ""):
        return CaseResult(case, shape, old, {}, (), (), tuple(rows))
    values = {row.metric: row.value for row in rows if not row.metric.startswith((STATUS, TARGET))}
    targets = tuple(target_of(row, values) for row in rows if row.metric.startswith(TARGET))
    beside = baseline_results(baselines, f"{case}, {shape}") if baselines else ()
    return CaseResult(case, shape, status_of(rows), values, targets, beside, tuple(rows))


def target_of(row: Row, values: Mapping[str, float]) -> Target:
    """The target that a row states, with the value that was measured."""
    metric = row.metric.removeprefix(TARGET)
    value, day = values.get(metric), row.date[:10]
    return Target(metric, value, row.value, metric not in LESS, day=day, **SHOWN)


def status_of(rows: Sequence[Row]) -> str:
    """What the status row says."""
    said = [row.metric.removeprefix(STATUS) for row in rows if row.metric.startswith(STATUS)]
    return said[0] if said else "unknown"


def baseline_results(baselines: Results, setting: str) -> tuple[BaselineResult, ...]:
    """Baselines of one case at one shape, in the order of BASELINES."""
    rows: dict[str, list[Row]] = {}
    for row in baselines.rows:
        if row.setting == setting:
            rows.setdefault(row.method, []).append(row)
    order = [baseline.name for baseline in BASELINES]
    names = sorted(rows, key=lambda name: order.index(name) if name in order else len(order))
    return tuple(
        BaselineResult(
            name, baselines.value(setting, name, "ratio"), status_of(rows[name]), tuple(rows[name])
        )
        for name in names
    )


def ordered(lines: Sequence[CaseResult]) -> list[CaseResult]:
    """By shape, then as in the registry; the small and the huge shape come after the others."""
    cases, shapes = list(CASES), [*(name for name in SHAPES if name not in (HUGE, SMALL)), HUGE, SMALL]

    def key(one: CaseResult) -> tuple[int, int]:
        shape = shapes.index(one.shape) if one.shape in shapes else len(shapes)
        return shape, cases.index(one.case) if one.case in cases else len(cases)

    return sorted(lines, key=key)


def targets_by_run(rows: Iterable[Row]) -> list[RunTargets]:
    """Of all cases and of calls from JAX."""
    return [
        RunTargets(where, targets_in(results.rows), kind)
        for kind in (KERNELS, JAX)
        for where, results in by_run(rows, kind).items()
    ]


def targets_in(rows: Iterable[Row]) -> list[Target]:
    """The targets that rows state, named by case, shape and metric, with the values that were measured."""
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        lines.setdefault((row.method, row.setting), []).append(row)
    found = []
    for (case, shape), mine in lines.items():
        if any(map(outdated, mine)):
            continue
        values = {row.metric: row.value for row in mine}
        stated = [target_of(row, values) for row in mine if row.metric.startswith(TARGET)]
        found += [
            replace(one, name=f"{case} at {shape}: {one.name}", unit=OF.get(one.name, "")) for one in stated
        ]
    return found


def summary(lines: Sequence[CaseResult]) -> str:
    """One sentence about a run."""
    unmeasured = sum(not one.ok for one in lines)
    return f"{len(lines)} cases (a kernel at a shape), of which {unmeasured} were not measured; {slower_words(lines)}."


def slower_words(lines: Sequence[CaseResult]) -> str:
    """How many of those that have a baseline are slower than it."""
    beside = [one for one in lines if one.best_baseline is not None]
    slower = sum(bool(one.faster_baselines) for one in beside)
    return f"{slower} of the {len(beside)} cases that have a baseline (torch, torch.compile, torchao) are slower than it"


# Which family multiplies a case today, on a Hopper GPU of 132 multiprocessors: no GPU is needed to say so.

BF16 = torch.bfloat16
#: Cases of codes by codes; of a weight as `fast.quantize` stores it; and where their names have the rows of inputs.
OF_CODES, OF_WEIGHTS = "linear_of_codes", ("linear", "linear_pair", "linear_swiglu")
ROWS = re.compile(r"\.rows(\d+)")


def family_today(row: Row) -> Family | None:
    """What multiplies the case of a row; None of cases that multiply nothing, or are none any more."""
    return family_of(row.method, row.setting)


@cache
def family_of(name: str, shape: str) -> Family | None:
    """The same by the case's name and the weight's shape."""
    case, lengths = CASES.get(name), shape.split("x")
    if case is None or len(lengths) != 2 or case.operation not in (OF_CODES, *OF_WEIGHTS):
        return None
    return next(choose(problem(case, (int(lengths[0]), int(lengths[1])))))


def problem(case: Case, shape: tuple[int, int]) -> Problem:
    """The product of a case: bfloat16 inputs, or codes of their own, by a weight in the plain layout."""
    scheme, found = SCHEMES.get(case.scheme) or named(case.scheme), ROWS.search(case.name)
    rows = int(found.group(1)) if found else 1
    if case.operation == OF_CODES:
        zero = scheme.zero is not None
        return Problem(CODES, rows, *shape, BF16, HOPPER, element=scheme.element, zero=zero)
    return Problem(PLAIN, rows, *shape, BF16, HOPPER, weight=(scheme, 1, bool(case.options["packed"])))


kernel_state = partial(launched.kernel_state, chosen=family_today)
outdated = partial(launched.outdated, chosen=family_today)
