"""Running the cases: inputs, check, time, rows. First all of ours, then the baselines, as far as their time reaches.

A row's setting is the shape and its method the case; baselines have a table of their own, whose setting is ``case, shape`` and
whose method is the baseline. Every case has a row ``status: ...``: ok; missing, where `fast` has no such function; wrong, where
a result differs from the reference, which is not timed then; error, with its text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from experiments.harness.launched import launched
from experiments.harness.libraries import seed_and_libraries
from experiments.harness.outcome import Values, attempt, keep, kernel, status
from experiments.harness.progress import bar
from experiments.harness.rows import Journal, Row
from experiments.harness.timing import (
    AGAIN,
    Call,
    CudaWatch,
    cache_bytes,
    host_times,
    in_turn,
    input_sets,
    interleaved,
    prepare,
    spread,
    summary,
)
from experiments.kernels import jax_calls
from experiments.kernels.baselines import BASELINES, Baseline, calls_of, offers
from experiments.kernels.cases.all_cases import CASES
from experiments.kernels.cases.case import HUGE, SHAPES, Case, Inputs
from experiments.kernels.cases.floors import Shape, fraction
from experiments.kernels.gate import check
from experiments.kernels.outcome import (
    BASELINE_PLAN,
    BASELINE_SECONDS,
    BASELINE_TABLE,
    KERNELS,
    PLAN,
    Bench,
    rows_of,
    table,
)
from experiments.runs.settings import Settings

TITLE = "Speed of the kernels on a GPU"
OURS, COPY, WRAPPED = "ours", "copy", "wrapped"
#: How often the graphs of small kernels are captured: where one lies in memory is worth a tenth of such a kernel's time.
INSTANCES = 5
#: Bytes of a word of copies, what their sizes are multiples of, and the most that one of them has.
WORD, PAGE, PIECE = 8, 4096, 448 * 2**20


def subject(settings: Settings) -> str:
    """What rows are about: the seed, and the libraries that make or compare kernels."""
    return seed_and_libraries(settings.seed)


def run(
    settings: Settings,
    journal: Journal | None = None,
    *,
    baselines: Sequence[Baseline] = BASELINES,
    baseline_seconds: float = BASELINE_SECONDS,
    seconds: float = math.inf,
) -> list[Row]:
    """Rows of all cases at their shapes; NoDevice without a GPU. Baselines may take `baseline_seconds`, all `seconds`."""
    import fast

    started = time.perf_counter()
    bench = Bench(settings, fast, CudaWatch(), PLAN, BASELINE_PLAN, baselines, baseline_seconds)
    journal = journal if journal is not None else Journal()
    failed = jax_calls.measure(bench, journal)
    left = replace(bench, seconds=seconds - (time.perf_counter() - started))
    return measure(left, pairs(list(CASES.values())), journal) + failed


def pairs(cases: Sequence[Case], shapes: Mapping[str, Shape] = SHAPES) -> list[tuple[Case, str, Shape]]:
    """(case, name of the shape, shape) in the order of measurement: shape by shape.

    A shape of the list belongs to the cases that name it, any other to all but those for small tensors.
    """
    return [
        (case, name, shape)
        for name, shape in shapes.items()
        for case in cases
        if (name in case.shapes if name in SHAPES else case.operation != "small")
    ]


@torch.no_grad()
def measure(
    bench: Bench, work: Sequence[tuple[Case, str, Shape]], journal: Journal | None = None
) -> list[Row]:
    """Rows of these cases. Finished ones are taken from the journal; what failed is tried again and not stored there."""
    journal = journal if journal is not None else Journal()
    end = bench.clock() + bench.seconds
    failed: list[Row] = []
    compare = comparisons(bench.baselines, work)
    with bar("kernels", len(work) + len(compare)) as step:
        for case, name, shape in work:
            if not journal.finished(table(bench, KERNELS), name, case.name):
                keep(journal, failed, case_rows(bench, case, name, shape, end))
            step(f"{case.name} {name}")
        deadline = min(bench.clock() + bench.baseline_seconds, end)
        for baseline, case, name, shape in compare:
            if not journal.finished(table(bench, BASELINE_TABLE), f"{case.name}, {name}", baseline.name):
                keep(journal, failed, baseline_rows(bench, baseline, case, name, shape, deadline))
            step(f"{baseline.name}: {case.name} {name}")
    return journal.rows + failed


def comparisons(
    baselines: Sequence[Baseline], work: Sequence[tuple[Case, str, Shape]]
) -> list[tuple[Baseline, Case, str, Shape]]:
    """Which baselines run beside which cases: cases with targets first, should the time for baselines not reach all."""
    ordered = sorted((one for one in work if one[1] != HUGE), key=lambda one: not one[0].targets)
    return [(baseline, *one) for one in ordered for baseline in baselines if offers(baseline, one[0])]


def case_rows(bench: Bench, case: Case, name: str, shape: Shape, end: float = math.inf) -> list[Row]:
    """Rows of one case at one shape; after `end`, one that says that there was no time."""
    if bench.clock() > end:
        return rows_of(
            bench, KERNELS, name, case.name, status(f"not run: the {bench.seconds:.0f} s were over")
        )
    # Targets are stated for the shapes of the list, and a small tensor has others than a large one.
    stated = case.targets if name in case.shapes and name != HUGE else ()
    targets: Values = {f"target: {one.name}": (one.limit, unit_of(one.name)) for one in stated}
    values = tried(bench, partial(timed, bench, case, shape), case)
    return rows_of(bench, KERNELS, name, case.name, {**values, **targets})


def tried(bench: Bench, work: Callable[[], Values], case: Case) -> Values:
    """What work finds, or why it found nothing. One kernel that fails must not end the others' run."""
    if missing := case.missing(bench.fast):
        return status("missing: fast has no " + ", ".join(missing))
    return attempt(work)


def timed(bench: Bench, case: Case, shape: Shape) -> Values:
    """Check, then time a case beside a copy of its input's size and what else stands beside it."""
    sets = make_sets(bench, case, shape)
    check(case, bench.fast, sets[0], shape)
    works = {OURS: case.call, **case.beside}
    calls: dict[str, list[Call]] = {
        name: [partial(work, bench.fast, inputs) for inputs in sets] for name, work in works.items()
    }
    calls[COPY] = copies(bench, case, shape, len(sets))
    values = values_of(case, shape, times_of(bench, calls, INSTANCES if case.host else 1), bench)
    values |= kernel(launched(calls[OURS][0]))
    if case.host:
        hosts = {OURS: calls[OURS][0]}
        if case.wraps is not None:
            hosts[WRAPPED] = partial(case.wraps, bench.fast, sets[0])
        found = host_times(hosts, bench.watch.sync, clock=bench.clock)
        values["host time"] = (found[OURS] * 1e6, "us")
        if case.wraps is not None:
            values["host time, added"] = ((found[OURS] - found[WRAPPED]) * 1e6, "us")
    return values


def make_sets(bench: Bench, case: Case, shape: Shape) -> list[Inputs]:
    """Input sets that the cache does not hold together, each from its own seed."""
    count = input_sets(case.read(shape), cache_bytes())
    seeds = range(bench.settings.seed, bench.settings.seed + count)
    return [case.make(bench.fast, shape, bench.settings.device, 1000 * seed) for seed in seeds]


def copies(bench: Bench, case: Case, shape: Shape, count: int) -> list[Call]:
    """Copies of as many random bytes as the case reads, from as many buffers, at a copy's best.

    In whole pages and in pieces: the driver copies other sizes, and larger ones, at two thirds of the speed.
    """
    size = copied_bytes(case, shape) // WORD
    device = bench.settings.device
    target = torch.empty(size, dtype=torch.int64, device=device)
    copies_of_sets = []
    for _ in range(count):
        source = torch.randint(-(2**63), 2**63 - 1, (size,), dtype=torch.int64, device=device)
        pieces = zip(target.split(PIECE // WORD), source.split(PIECE // WORD), strict=True)
        copies_of_sets.append(in_turn([partial(into.copy_, part) for into, part in pieces]))
    return copies_of_sets


def copied_bytes(case: Case, shape: Shape) -> int:
    """The bytes that a case reads, rounded up to whole pages."""
    return -(-int(case.read(shape)) // PAGE) * PAGE


Times = dict[str, list[float]]


def times_of(bench: Bench, calls: Mapping[str, Sequence[Call]], instances: int) -> tuple[Times, Times]:
    """Seconds a call by graph replay and launched one by one, over so many captures of each graph together."""
    found: tuple[Times, Times] = ({}, {})
    for _ in range(instances):
        spans = {name: prepare(bench.watch, one, bench.plan) for name, one in calls.items()}
        for into, graph in zip(found, (True, False), strict=True):
            for name, seconds in interleaved(bench.watch, spans, bench.plan, graph=graph).items():
                into.setdefault(name, []).extend(seconds)
    return found


def values_of(case: Case, shape: Shape, both: tuple[Times, Times], bench: Bench) -> Values:
    """Metrics of a case: by graph replay, which the targets are about, and launched one by one."""
    times, eager = both
    ours, copy = summary(times[OURS]), summary(times[COPY])
    moved = case.moved(shape)
    copy_rate = 2 * copied_bytes(case, shape) / copy.median
    eager_ours = summary(eager[OURS]).median
    values: Values = {
        "time": (ours.median * 1e6, "us"),
        "time, 20%": (ours.low * 1e6, "us"),
        "time, 80%": (ours.high * 1e6, "us"),
        "time, eager": (eager_ours * 1e6, "us"),
        "repeat": (spread(times[OURS], times[AGAIN]), "ratio"),
        "bytes read": (case.read(shape), "B"),
        "bytes moved": (moved, "B"),
        "rate": (moved / ours.median / 1e12, "TB/s"),
        "copy rate": (copy_rate / 1e12, "TB/s"),
        "fraction": (fraction(moved, ours.median, copy_rate), "ratio"),
        "fraction, eager": (fraction(moved, eager_ours, copy_rate), "ratio"),
    }
    for name in case.beside:
        beside = summary(times[name]).median
        if name == "unfused":
            values["speedup over unfused"] = (beside / ours.median, "ratio")
        else:
            values[f"time over {name}"] = (ours.median / beside, "ratio")
    return values


def unit_of(metric: str) -> str:
    """Unit of a metric that has a target."""
    return "us" if metric.startswith("host time") else "ratio"


def baseline_rows(
    bench: Bench, baseline: Baseline, case: Case, name: str, shape: Shape, deadline: float
) -> list[Row]:
    """Rows of one baseline beside ours, or one that says why there are none."""
    setting = f"{case.name}, {name}"
    if bench.clock() > deadline:
        values = status("not run: the time for baselines was over")
    else:
        values = tried(bench, partial(compared, bench, baseline, case, shape), case)
    return rows_of(bench, BASELINE_TABLE, setting, baseline.name, values)


def compared(bench: Bench, baseline: Baseline, case: Case, shape: Shape) -> Values:
    """Times of ours and of a baseline in turn."""
    sets = make_sets(bench, case, shape)
    work = {
        OURS: [partial(case.call, bench.fast, inputs) for inputs in sets],
        baseline.name: calls_of(baseline, case, sets),
    }
    spans = {name: prepare(bench.watch, calls, bench.baseline_plan) for name, calls in work.items()}
    times = interleaved(bench.watch, spans, bench.baseline_plan)
    ours, theirs = summary(times[OURS]), summary(times[baseline.name])
    return kernel(launched(work[baseline.name][0])) | {
        "time": (theirs.median * 1e6, "us"),
        "time, 20%": (theirs.low * 1e6, "us"),
        "time, 80%": (theirs.high * 1e6, "us"),
        "ours": (ours.median * 1e6, "us"),
        "ratio": (theirs.median / ours.median, "ratio"),
        "repeat": (spread(times[OURS], times[AGAIN]), "ratio"),
    }
