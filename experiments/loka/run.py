"""Experiment `loka`: probes of recommendation models and of kernels (our reconstruction of arXiv 2605.10886, and more).

Parts are modules of this folder, each with its lines: what is measured at once. "sites" and "outputs" are what a probe predicts
(`prediction`), "cost" what it takes online (`sampling_cost`), "faults" and "right kernels" what is told of kernels
(`faulty_kernels`), "schemes" predictions for other models in all schemes (`every_scheme`). Faults are computed on a CPU.
"trajectory", "policies", "speed" and "shapes" are of workloads (`workloads`); the cases of the last two are timed whole, all
methods in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from experiments.harness.measuring import (
    Deadline,
    Stages,
    Values,
    attempt,
    bar,
    forget,
    in_time,
    is_ok,
    keep,
    measure_each,
    status,
)
from experiments.harness.registry import check_known
from experiments.harness.revision import seed_and_libraries
from experiments.harness.rows import Journal, Row, table_name, table_parts
from experiments.loka import every_scheme, faulty_kernels, prediction, sampling_cost, trajectory, workloads
from experiments.loka.subjects import CANDIDATES, MODELS
from experiments.loka.workloads import IN_TURN, RANDOM, Line, Turns
from experiments.runs.settings import Settings

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
    """Part "probe": tables "sites" and "outputs"."""
    quick = settings.scale == "quick"
    place = settings.scale, settings.seed, settings.device
    for name in models_of(settings):
        for candidate in QUICK["candidates"] if quick else CANDIDATES:
            for kind, find in (
                (prediction.SITES, prediction.site_values),
                (prediction.OUTPUTS, prediction.output_values),
            ):
                yield Line(kind, DATA, name, candidate, partial(find, name, candidate, *place))


def models_of(settings: Settings) -> Iterable[str]:
    """Those of a scale."""
    return QUICK["models"] if settings.scale == "quick" else MODELS


def cost_lines(settings: Settings) -> Iterator[Line]:
    """Part "cost": exact shapes on a GPU, ranks at scale full on a CPU, and small networks, which are trained first."""
    kind, method = sampling_cost.COST, "rowwise"
    for name in sampling_cost.EXACT if settings.device == "cuda" else ():
        work = partial(sampling_cost.exact_values, name, settings.device)
        yield Line(kind, RANDOM, f"{name}, compiled", method, work)
    if (settings.scale, settings.device) == ("full", "cpu"):
        for wrapped in sampling_cost.WRAPPED:
            work = partial(sampling_cost.rank_values, wrapped)
            yield Line(kind, RANDOM, f"DCN, {wrapped} on two ranks", method, work)
    place = settings.scale, settings.seed, settings.device
    for name in models_of(settings):
        yield Line(kind, DATA, name, method, partial(sampling_cost.cost_values, name, *place))


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
PARTS: dict[str, Callable[[Settings], Iterator[Line] | Iterator[Turns]]] = {
    "probe": probe_lines,
    "cost": cost_lines,
    "kernels": kernel_lines,
    "schemes": scheme_lines,
    "trajectory": workloads.trajectory_lines,
    "policies": workloads.policy_lines,
    "speed": workloads.speed_lines,
    "shapes": workloads.shape_lines,
}


check_parts = partial(check_known, EXPERIMENT, PARTS)


def subject(settings: Settings) -> str:
    """What a journal can be resumed for."""
    return f"drawn-{seed_and_libraries(settings.seed)}"


def measured_whole(row: Row) -> tuple[str, str] | None:
    """What a row is timed in turn with, by table and setting; None where its line stands for itself."""
    return (row.table, row.setting) if table_parts(row.table)[0] in IN_TURN else None


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
                stages = Stages(f"{line.kind}, {line.setting}", told=settings.device == "cuda")
                measure(settings, journal, failed, line, deadline)
                stages.done(f"{', '.join(methods_of(line)[:2])}: done")
                step(f"{line.kind}, {line.setting}, {', '.join(methods_of(line)[:2])}")
    works = {
        f"{line.data}, {line.setting}, {line.method}, seed {line.seed}": partial(rows_of, settings, line)
        for line in apart
        if isinstance(line, Line) and not is_finished(settings, journal, line)
    }
    if works:
        name = trajectory.TRAJECTORY
        measure_each(name, works, settings.workers, deadline, lambda _, rows: keep(journal, failed, rows))
    return [*journal.rows, *failed]


def measure(
    settings: Settings, journal: Journal, failed: list[Row], line: Line | Turns, deadline: Deadline
) -> None:
    """What the journal lacks of one line, into the journal; methods that are timed in turn have all their rows of one run."""
    if is_finished(settings, journal, line):
        return
    if isinstance(line, Turns):
        measured = [told(settings, line, *one) for one in in_turn(line, deadline).items()]
        if any(is_ok(rows) for rows in measured):
            journal.drop(earlier(settings, journal, line))
        for rows in measured:
            keep(journal, failed, rows)
        if settings.device == "cuda":
            forget()  # models of tens of gigabytes, before the next case
    else:
        keep(journal, failed, rows_of(settings, line, deadline))


def earlier(settings: Settings, journal: Journal, line: Turns) -> list[Row]:
    """Rows that a run before left of a case; times of two runs do not compare."""
    place = table_name(line.kind, settings.scale, line.data), line.setting, settings.seed
    return [row for row in journal.rows if (row.table, row.setting, row.seed) == place]


def in_turn(line: Turns, deadline: Deadline) -> dict[str, Values]:
    """Values of each method; of a case that fails as a whole, or that the deadline does not reach, the reason."""
    found: dict[str, Values] = {}

    def work() -> Values:
        found.update(line.work(deadline))
        return {}

    reason = deadline.reason(line.needs)
    said = status(reason) if reason else attempt(work)
    return {name: found.get(name, said) for name in line.methods}


def methods_of(line: Line | Turns) -> tuple[str, ...]:
    """One, or those that are timed in turn."""
    return line.methods if isinstance(line, Turns) else (line.method,)


def is_finished(settings: Settings, journal: Journal, line: Line | Turns) -> bool:
    """Whether the journal has a line's rows."""
    seed = settings.seed if isinstance(line, Turns) or line.seed is None else line.seed
    table = table_name(line.kind, settings.scale, line.data)
    return all(journal.finished(table, line.setting, one, seed) for one in methods_of(line))


def rows_of(settings: Settings, line: Line, deadline: Deadline | None = None) -> list[Row]:
    """A line's rows; where the deadline came first, the row that says so."""
    here = replace(settings, device="cpu") if line.on_cpu else settings
    here = here if line.seed is None else replace(here, seed=line.seed)
    return told(here, line, line.method, in_time(deadline or Deadline(None), line.work))


def told(settings: Settings, line: Line | Turns, method: str, values: Values) -> list[Row]:
    """Values as rows."""
    return settings.rows(EXPERIMENT, line.kind, line.data, line.setting, method, values)


__all__ = ["check_parts", "measured_whole", "run", "subject"]
