"""Experiment `loka`: probes of recommendation models and of kernels (our reconstruction of arXiv 2605.10886, and more).

Parts are modules of this folder, each with its lines: what is measured at once. "sites" and "outputs" are what a probe predicts
(`prediction`), "cost" what it takes online (`sampling_cost`), "faults" and "right kernels" what is told of kernels
(`faulty_kernels`), "schemes" predictions for other models in all schemes (`every_scheme`). Faults are computed on a CPU.
"trajectory", "policies" and "speed" are of workloads (`workloads`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from experiments.harness.measuring import Deadline, attempt, bar, keep, measure_each, status
from experiments.harness.registry import check_known
from experiments.harness.revision import seed_and_libraries
from experiments.harness.rows import Journal, Row, table_name
from experiments.loka import every_scheme, faulty_kernels, prediction, sampling_cost, trajectory, workloads
from experiments.loka.subjects import CANDIDATES, MODELS
from experiments.loka.workloads import Line
from experiments.runs.run import Settings

EXPERIMENT = "loka"
DATA, CASES = "drawn-ratings", "kernels"
#: Models and candidates by scale.
QUICK = {"models": ("DCN",), "candidates": ("rowwise", "int8_rowwise x int8_rowwise", "nf4")}
#: Faults of the quick scale: one of each kind.
SOME_FAULTS = (
    "rows shifted",
    "upper bound",
    "stale scale",
    "no scale",
    "dropped tail",
    "short accumulator",
    "nan to zero",
)


def probe_lines(settings: Settings) -> Iterator[Line]:
    """Parts "sites", "outputs" and "cost"."""
    quick = settings.scale == "quick"
    place = settings.scale, settings.seed, settings.device
    for name in QUICK["models"] if quick else MODELS:
        for candidate in QUICK["candidates"] if quick else CANDIDATES:
            for kind, find in (
                (prediction.SITES, prediction.site_values),
                (prediction.OUTPUTS, prediction.output_values),
            ):
                yield Line(kind, DATA, name, candidate, partial(find, name, candidate, *place))
        yield Line(
            sampling_cost.COST, DATA, name, "rowwise", partial(sampling_cost.cost_values, name, *place)
        )


def kernel_lines(settings: Settings) -> Iterator[Line]:
    """Parts "faults" and "right kernels"."""
    scale, seed = settings.scale, settings.seed
    for name in SOME_FAULTS if scale == "quick" else faulty_kernels.FAULTS:
        for kind in faulty_kernels.KINDS:
            work = partial(faulty_kernels.fault_values, name, kind, scale, seed)
            yield Line(faulty_kernels.FAULTY, CASES, name, kind, work, on_cpu=True)
    work = partial(faulty_kernels.alarm_values, scale, seed)
    yield Line(faulty_kernels.ALARMS, CASES, "all", "all", work, on_cpu=True)


def scheme_lines(settings: Settings) -> Iterator[Line]:
    """Part "schemes", at scale full alone."""
    for name in every_scheme.MODELS if settings.scale == "full" else ():
        for candidate in every_scheme.candidates():
            work = partial(every_scheme.scheme_values, name, candidate, settings.seed, settings.device)
            yield Line(every_scheme.EVERY, every_scheme.DATA, name, candidate, work)


#: The parts by name, and what has their lines.
PARTS: dict[str, Callable[[Settings], Iterator[Line]]] = {
    "probe": probe_lines,
    "kernels": kernel_lines,
    "schemes": scheme_lines,
    "trajectory": workloads.trajectory_lines,
    "policies": workloads.policy_lines,
    "speed": workloads.speed_lines,
}


check_parts = partial(check_known, EXPERIMENT, PARTS)


def subject(settings: Settings) -> str:
    """What a journal can be resumed for."""
    return f"drawn-{seed_and_libraries(settings.seed)}"


def run(settings: Settings, journal: Journal | None = None) -> list[Row]:
    """Rows of the parts that `settings.only` names, or of all; rows in the journal are not measured again. With several workers
    trainings of the part "trajectory" run at once, after all else."""
    journal = journal if journal is not None else Journal()
    check_parts(settings.only or ())
    deadline, failed = Deadline(settings.seconds), list[Row]()
    lines = [line for name in settings.only or PARTS for line in PARTS[name](settings)]
    apart = [line for line in lines if settings.workers > 1 and line.kind == trajectory.TRAJECTORY]
    with bar(EXPERIMENT, len(lines) - len(apart)) as step:
        for line in lines:
            if line not in apart:
                if not is_finished(settings, journal, line):
                    keep(journal, failed, rows_of(settings, line, deadline.reason(0.0)))
                step(f"{line.kind}, {line.setting}, {line.method}")
    works = {
        f"{line.data}, {line.setting}, {line.method}, seed {line.seed}": partial(rows_of, settings, line)
        for line in apart
        if not is_finished(settings, journal, line)
    }
    if works:
        name = trajectory.TRAJECTORY
        measure_each(name, works, settings.workers, deadline, lambda _, rows: keep(journal, failed, rows))
    return [*journal.rows, *failed]


def is_finished(settings: Settings, journal: Journal, line: Line) -> bool:
    """Whether the journal has a line's rows."""
    seed = settings.seed if line.seed is None else line.seed
    table = table_name(line.kind, settings.scale, line.data)
    return journal.finished(table, line.setting, line.method, seed)


def rows_of(settings: Settings, line: Line, reason: str | None = None) -> list[Row]:
    """A line's rows; where there is a reason not to measure it, the row that says so."""
    here = replace(settings, device="cpu") if line.on_cpu else settings
    here = here if line.seed is None else replace(here, seed=line.seed)
    values = status(reason) if reason else attempt(line.work)
    return here.rows(EXPERIMENT, line.kind, line.data, line.setting, line.method, values)


__all__ = ["check_parts", "run", "subject"]
