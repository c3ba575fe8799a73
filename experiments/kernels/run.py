"""Running the cases: inputs, check, time, rows. First all of ours, then the baselines, as far as their time reaches.

A row's setting is the shape and its method the case; baselines have a table of their own, whose setting is ``case, shape`` and
whose method is the baseline. Every case has a row ``status: ...``: ok; missing, where `fast` has no such function; wrong, where
a result differs from the reference, which is not timed then; error, with its text.

What a call from JAX costs beside the same call from torch, which launches the same kernel: rows of the table ``jax``.

Three ways to call: a concrete array (``eager``), a compiled function of one quantization (``jit``), and one of PROGRAM of them
(``program``), where one dispatch stands for several kernels as in a model. All ways, torch's too, quantize the same PROGRAM
tensors. Calls are queued, and what counts is the time per quantization until the last one is done: the larger of what the host
and what the GPU takes. ``XLA's cast`` to e4m3fn, also under jit, says what JAX's own dispatch of one operation costs. A row's
setting is the size of a tensor and its method the scheme.
"""

from __future__ import annotations

import importlib.util
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ao_lab.measure.turns import (
    AGAIN,
    Call,
    CudaWatch,
    Plan,
    Watch,
    cache_bytes,
    in_turn,
    input_sets,
    interleaved,
    prepare,
    summary,
)
from experiments.harness.bench import host_times, spread
from experiments.harness.cuda_graph import launched
from experiments.harness.measuring import Values, Wrong, attempt, bar, bits_that_differ, keep, kernel, status
from experiments.harness.revision import seed_and_libraries
from experiments.harness.rows import Journal, Row
from experiments.kernels.baselines import BASELINES, Baseline, calls_of, offers
from experiments.kernels.cases import CASES
from experiments.kernels.operations import HUGE, SHAPES, Case, Compared, Inputs, Sample, Shape, fraction
from experiments.report.targets import limit_of
from experiments.runs.settings import Settings
from reference import SCHEMES

# What a run of the benchmark uses, and the tables of its rows.

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
    failed = jax_measure(bench, journal)
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
        **ours.values("us"),
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
        **theirs.values("us"),
        "ours": (ours.median * 1e6, "us"),
        "ratio": (theirs.median / ours.median, "ratio"),
        "repeat": (spread(times[OURS], times[AGAIN]), "ratio"),
    }


# The gate before the clock: a kernel's result on samples against the reference, bit for bit. What is wrong gets no time.

#: Rows that are compared at either end of a tensor, if its blocks span one row each.
ROWS = 32


def samples(case: Case, shape: Shape) -> list[Sample]:
    """The first and the last rows (columns, where blocks run along the first axis); whole blocks of rows."""
    scheme = SCHEMES.get(case.scheme)
    block = scheme.scale.block if scheme else 1
    rows = max(ROWS, block[0]) if isinstance(block, tuple) else ROWS
    length = shape[1] if case.options.get("axis") == 0 else shape[0]
    if length <= rows:
        return [Sample(0, length)]
    if case.operation == "both":
        length = min(shape)
    last = Sample(length - rows, length)
    return [Sample(0, rows), last]


def check(case: Case, fast: Any, inputs: Inputs, shape: Shape) -> int:
    """How many elements were compared; Wrong with the first difference."""
    result = case.call(fast, inputs)
    count = 0
    for sample in samples(case, shape):
        for compared in case.compare(fast, inputs, result, sample):
            count += same(compared)
    if not count:
        raise Wrong("nothing was compared")
    return count


def same(compared: Compared) -> int:
    """How many elements are equal as bits; Wrong where one is not, or where shapes or widths differ."""
    what, got, expected = compared
    if got is None and expected is None:
        return 0
    if got is None or expected is None:
        raise Wrong(f"{what}: got {'nothing' if got is None else 'some'}, the reference has the opposite")
    mine, right = raw(got), raw(expected)
    if said := bits_that_differ(mine, right, "the reference"):
        raise Wrong(f"{what}: {said}")
    return int(mine.size)


def raw(value: Any) -> np.ndarray:
    """Bit patterns as unsigned integers, on the host."""
    if isinstance(value, torch.Tensor):
        host = value.detach().cpu().contiguous()
        carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[host.element_size()]
        array = host.view(carrier).numpy()
    else:
        array = np.ascontiguousarray(value)
    return array.view(f"u{array.dtype.itemsize}")


KIND = "jax"
JAX_SCHEMES = ("fp8_rowwise", "mxfp8_e4m3", "mxfp4", "nvfp4")
#: Rows of 4096 bfloat16, by what they are in MiB.
SIZES = {"64 MiB": 8192, "448 MiB": 57344}
COLUMNS = 4096
PROGRAM = 8
WAYS = ("eager", "jit", "program")
TORCH, CAST = "torch", "XLA's cast"
#: How much longer JAX may take than torch.
MOST = limit_of("kernels", "jax", "time over torch").bound
ROUNDS, WARMUP = 9, 2
#: Bytes that are read in one round of queued calls.
QUEUED = 12_800 * 2**20


def installed() -> bool:
    """Whether there is a JAX to call."""
    return importlib.util.find_spec("jax") is not None


def jax_measure(bench: Bench, journal: Journal, sizes: Mapping[str, int] = SIZES) -> list[Row]:
    """Rows of all schemes at all sizes; what failed is not stored in the journal. No rows without JAX."""
    failed: list[Row] = []
    if not installed():
        return failed
    # JAX would take three quarters of the memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    name_of_table = table(bench, KIND)
    with bar("calls from JAX", len(sizes) * len(JAX_SCHEMES)) as step:
        for label, rows in sizes.items():
            for name in JAX_SCHEMES:
                if not journal.finished(name_of_table, label, name):
                    values = attempt(partial(jax_timed, bench, name, rows))
                    limits: Values = {f"target: {way} over {TORCH}": (MOST, "ratio") for way in WAYS}
                    keep(journal, failed, rows_of(bench, KIND, label, name, {**values, **limits}))
                step(f"{name} {label}")
    return failed


def jax_timed(bench: Bench, name: str, rows: int) -> Values:
    """Compare all codes with torch's bit for bit, then time."""
    shape = (rows, COLUMNS)
    tensors = [torch.randn(shape, device=bench.settings.device, dtype=torch.bfloat16) for _ in range(PROGRAM)]
    calls, divisors = jax_calls_of(bench.fast, name, tensors)
    count = max(10, QUEUED // (2 * rows * COLUMNS))
    times = queued(calls, divisors, count, bench.clock)
    values: Values = {way: (seconds * 1e6, "us") for way, seconds in times.items()}
    for way in WAYS:
        values[f"{way} over {TORCH}"] = (times[way] / times[TORCH], "ratio")
    return values


def jax_calls_of(
    fast: Any, name: str, tensors: Sequence[torch.Tensor]
) -> tuple[dict[str, Call], dict[str, int]]:
    """Calls by name, and how many quantizations one of them is; Wrong where a result of JAX has other bits than torch's.

    Every call quantizes all tensors and keeps its results until the last is there: all ways read and write the same amount.
    """
    import jax
    import jax.numpy as jnp

    from ao_lab import jax as functions

    arrays = [jax.block_until_ready(functions.from_torch(x, copy=False)) for x in tensors]
    single = jax.jit(partial(functions.quantize, scheme=name))
    several = jax.jit(lambda *given: [functions.quantize(one, name) for one in given])
    cast = jax.jit(lambda one: one.astype(jnp.float8_e4m3fn))
    ways: dict[str, Callable[[], list[Any]]] = {
        TORCH: lambda: [fast.quantize(x, name).codes for x in tensors],
        "eager": lambda: [functions.quantize(one, name).codes for one in arrays],
        "jit": lambda: [single(one).codes for one in arrays],
        "program": lambda: [q.codes for q in several(*arrays)],
        CAST: lambda: [cast(one) for one in arrays],
    }
    wanted = ways[TORCH]()
    for way in WAYS:
        for number, (got, right) in enumerate(zip(ways[way](), wanted, strict=True)):
            same((f"{way}: codes of tensor {number}", np.asarray(got), right))
    return {way: partial(_last, results) for way, results in ways.items()}, dict.fromkeys(ways, len(tensors))


def _last(results: Callable[[], list[Any]]) -> Any:
    """The last of the results, for which `finish` waits."""
    return results()[-1]


def queued(
    calls: Mapping[str, Call],
    divisors: Mapping[str, int],
    count: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of a quantization, of `count` that are queued one after the other; in turn, round by round."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(WARMUP + ROUNDS):
        for name, call in calls.items():
            finish(call())
            repeats = max(1, count // divisors[name])
            started = clock()
            for _ in range(repeats):
                result = call()
            finish(result)
            if number >= WARMUP:
                found[name].append((clock() - started) / (repeats * divisors[name]))
    return {name: float(np.median(seconds)) for name, seconds in found.items()}


def finish(result: Any) -> None:
    """Wait for the last result, and so for all that were queued before it."""
    if isinstance(result, torch.Tensor):
        if result.is_cuda:
            torch.cuda.synchronize()
    else:
        result.block_until_ready()
