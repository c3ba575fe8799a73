"""Calls that are timed in turn, the dense one first and once more last, and the rows of a table of them.

Nothing is timed without a GPU at full scale: rows say why then.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from ao_lab.measure.turns import AGAIN, Call, Plan, Span, Uncaptured, Watch, prepare, summary, watch_of
from experiments.harness.bench import SETTLE, repeated, steady, steady_eager
from experiments.harness.cuda_graph import launched
from experiments.harness.measuring import Deadline, Values, attempt, bar, free, keep, kernel, status
from experiments.harness.rows import Journal, Row, table_name
from experiments.runs.run import published_shapes
from experiments.runs.settings import Settings

EXPERIMENT = "sparsity"
DENSE = "dense"
NO_GPU = "not run: times are of a GPU at full scale"
GB = 1e9
#: The metric of what no CUDA graph holds.
ONE_BY_ONE = "launched one by one"


@dataclass(frozen=True)
class TimedMethod:
    """One method. build: makes what is timed, a call or one for each of several sets of operands, and checks it; it may raise.

    missing: why it cannot be measured. foreign: whether it is another library's: what that refuses is not asked for again.
    """

    name: str
    build: Callable[[], Call | list[Call]]
    missing: str | None = None
    foreign: bool = False


@dataclass(frozen=True)
class Table:
    """Methods that are timed in turn. plan: how long to look. images, operations: of a call, 0 where neither counts.

    graph: whether calls are replayed from a CUDA graph; launched one by one else. needed: about how many seconds all takes on
    an H100, compilers included: it is not begun where fewer are left.
    """

    kind: str
    data: str
    setting: str
    methods: tuple[TimedMethod, ...] = ()
    plan: Plan = field(default_factory=Plan)
    images: int = 0
    operations: float = 0.0
    graph: bool = False
    needed: float = 0.0


def run_tables(
    title: str, tables: Sequence[Table], settings: Settings, journal: Journal, failed: list[Row], deadline: Deadline
) -> None:  # fmt: skip
    """Measure each table whole: where one of its methods is missing, all are timed again, so that ratios are of one run."""
    with bar(title, len(tables)) as step:
        for one in tables:
            if not published_shapes(settings):
                failed += rows_of(settings, one, {method.name: status(NO_GPU) for method in one.methods})
            elif is_whole(settings, journal, one):
                pass
            elif reason := deadline.reason(one.needed):
                failed += rows_of(settings, one, {method.name: status(reason) for method in one.methods})
            else:
                found = measure(watch_of(settings.device), one)
                for method in one.methods:
                    keep(journal, failed, rows_of(settings, one, {method.name: found[method.name]}))
            step(f"{one.data}, {one.setting}")


def is_whole(settings: Settings, journal: Journal, table: Table) -> bool:
    """Whether nothing of a table is to be measured."""
    return all(
        method.missing or method.foreign or is_finished(settings, journal, table, method)
        for method in table.methods
    )


def is_finished(settings: Settings, journal: Journal, table: Table, method: TimedMethod) -> bool:
    """Whether a method's rows are there."""
    return journal.finished(table_name(table.kind, settings.scale, table.data), table.setting, method.name)


def rows_of(settings: Settings, table: Table, found: Mapping[str, Values]) -> list[Row]:
    """Tidy rows by method."""
    return [
        row
        for method, values in found.items()
        for row in settings.rows(EXPERIMENT, table.kind, table.data, table.setting, method, values)
    ]


def measure(watch: Watch, table: Table, settle: float = SETTLE) -> dict[str, Values]:
    """Values of each method; one that fails has a status instead."""
    calls: dict[str, list[Call]] = {}
    found = {
        method.name: status(method.missing) if method.missing else attempt(partial(built, method, calls))
        for method in table.methods
    }
    spans: dict[str, Span] = {}
    for method in table.methods:
        if method.name in calls:
            made = attempt(partial(spanned, watch, table, method, calls[method.name], spans))
            found[method.name] = {**found[method.name], **made} if method.name in spans else made
    if spans:
        times = (steady if table.graph else steady_eager)(watch, spans, table.plan, settle)
        add_times(table, times, found)
    calls.clear()
    spans.clear()
    free()
    return found


def spanned(
    watch: Watch, table: Table, method: TimedMethod, calls: list[Call], spans: dict[str, Span]
) -> Values:
    """Add the span of a method, captured where the table is of graphs; what another library does not let be captured is
    launched one by one, and says so."""
    if not table.graph:
        spans[method.name] = prepare_eager(watch, calls, table.plan)
        return {}
    try:
        spans[method.name] = prepare(watch, calls, table.plan)
        return kernel(launched(calls[0]))
    except RuntimeError:
        if not method.foreign:
            raise
        watch.sync()
        one = prepare_eager(watch, calls, table.plan)
        spans[method.name] = Span(one.count, one.eager, one.eager)
        return {ONE_BY_ONE: (1.0, "")}


def prepare_eager(watch: Watch, calls: list[Call], plan: Plan) -> Span:
    """A span of calls one by one: what renews masks looks at the host, so no CUDA graph holds it."""
    return prepare(Uncaptured(watch), calls, plan)


def built(method: TimedMethod, calls: dict[str, list[Call]]) -> Values:
    """Make the calls, run the first twice, and note the peak of memory of the second, model and inputs included."""
    before = in_use()
    made = method.build()
    several = made if isinstance(made, list) else [made]
    call = several[0]
    call()
    values: Values = {}
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        values["peak memory"] = ((torch.cuda.max_memory_allocated() - before) / GB, "GB")
    calls[method.name] = several
    return values


def in_use() -> int:
    """Bytes that are allocated on the GPU, what earlier methods keep."""
    if not torch.cuda.is_available():
        return 0
    gc.collect()
    return torch.cuda.memory_allocated()


def add_times(table: Table, times: Mapping[str, Sequence[float]], found: dict[str, Values]) -> None:
    """Median, quantiles, images or operations a second, speed over dense."""
    base = summary(times[DENSE]).median if DENSE in times else None
    for name in times:
        if name == AGAIN:
            continue
        timing, values = summary(times[name]), found[name]
        values |= timing.values()
        if table.images:
            values["images/s"] = (table.images / timing.median, "images/s")
        if table.operations:
            values["TFLOP/s"] = (table.operations / timing.median / 1e12, "TFLOP/s")
        if base is not None:
            values["speed over dense"] = (base / timing.median, "ratio")
    if base is not None:
        found[DENSE] |= repeated(times, DENSE)
