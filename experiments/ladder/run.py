"""Experiment `ladder`: from eager bfloat16 to the last lever, for models of several modalities at exact shapes.

Random weights: speed does not depend on their values, quality is other experiments'. Tables:

* `ladder`: the time of a unit (a token, a request) with every set of levers of `rungs`, at batch 1 and the largest batch;
* `trace`: of the rungs of the ladder, shares of operators and of idle time. A profiler slows every later launch of its process:
  what is not recorded as a CUDA graph is timed before any trace, and traced last; a recorded one is one launch, traced at once;
* `acceptance`: how many drafts a model accepts that was trained here with layer dropout and losses of early exits;
* `summary`: the geometric mean over models of the last rung's speed over the first, beside the published one: of all rows that
  are published together (`summarized`).

At quick scale, and without a GPU: tiny models of the same classes, whose times mean nothing. What does not apply to a model has
a row that says why. A configuration is measured whole; a run that ends goes on with the next one.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ao_lab.measure.memory import Peak
from ao_lab.measure.turns import summary
from experiments.generate.run import unique_graphs
from experiments.harness.measuring import Deadline, Stages, Values, Wrong, attempt, bar, free, keep, status
from experiments.harness.registry import check_known
from experiments.harness.revision import seed_and_libraries, version_of
from experiments.harness.rows import Journal, Row, table_name
from experiments.ladder import acceptance
from experiments.ladder.rungs import Levers, configurations, ladder
from experiments.ladder.subjects import MODELS, STAND_INS, Subject
from experiments.ladder.summary import TIME, summarized
from experiments.ladder.trace import OPERATORS, busy, scopes, shares, traced
from experiments.ladder.work import Work, weights_in, work_of
from experiments.models.llama import COMPILED_LIMIT, SCHEME_LIMIT, relative_change
from experiments.runs.run import all_rows, published_shapes
from experiments.runs.settings import Settings

EXPERIMENT = "ladder"
KIND, TRACE = "ladder", "trace"
ONE, LARGEST = "batch 1", "largest batch"
#: The largest batch of a stand-in.
FEW = 2
#: What `--only` names beside models and settings: rungs of the ladder, of these the first and the last one that a model has
#: (without self-speculation: what the mean is of), levers alone and left out, traces, acceptance.
RUNGS, ENDS, LEVERS = "rungs", "ends", "levers"
GROUPS = (RUNGS, LEVERS, TRACE, acceptance.KIND)
PARTS = (*(one.name for one in MODELS), ONE, LARGEST, ENDS, *GROUPS)
IDLE, BUSY, BATCH, CHANGE, ROUND = "idle share", "busy", "batch", "logits, change", "round"
#: Runs that are timed: on a GPU, of a stand-in.
RUNS = {"cuda": 10, "cpu": 2}
#: Where a run takes long, fewer are enough: at least so many, and more until so many seconds are over.
FEWEST, ENOUGH = 3, 20.0
#: A trace's kernels may take so much longer than the step without it.
AGREES = 1.03
check_parts = partial(check_known, EXPERIMENT, PARTS)


def subject(settings: Settings) -> str:
    """What a journal can be resumed for: the seed, the corpus, and the libraries that compile and compute."""
    return (
        f"{settings.corpus.name}-{seed_and_libraries(settings.seed)}-transformers{version_of('transformers')}"
    )


@dataclass(frozen=True)
class Case:
    """A configuration of a subject at a batch; 0: the largest."""

    subject: Subject
    levers: Levers
    batch: int

    @property
    def setting(self) -> str:
        """The setting of its rows."""
        return ONE if self.batch else LARGEST


def run(settings: Settings, journal: Journal | None = None) -> list[Row]:
    """Rows of all models, or of those that `settings.only` names; rows in the journal are not measured again."""
    journal = journal if journal is not None else Journal()
    chosen = Chosen.of(settings)
    bench = Bench(settings, journal, Deadline(settings.seconds), traces=TRACE in chosen.groups)
    bench.rows_of(KIND, bench.timed, chosen.timed())
    if acceptance.KIND in chosen.groups:
        bench.acceptances()
    bench.rows_of(TRACE, bench.traced, chosen.traced())
    return summarized(all_rows(settings, journal, bench.failed))


@dataclass(frozen=True)
class Chosen:
    """What a run measures. real: whether at exact shapes; of a stand-in, whose compiler takes most of the time, levers alone
    and traces are at batch 1 and not compiled."""

    subjects: tuple[Subject, ...]
    settings: tuple[str, ...]
    groups: tuple[str, ...]
    real: bool

    @classmethod
    def of(cls, settings: Settings) -> Chosen:
        """What `--only` names, of each sort all where it names none; of stand-ins those whose names begin as a model's do. The
        acceptance of trained models is no part of a model."""
        only, real = settings.only, published_shapes(settings)
        names = [one for one in only if one not in (ONE, LARGEST, ENDS, *GROUPS)]
        families = {one.partition("-")[0] for one in names}
        subjects = tuple(
            one
            for one in (MODELS if real else STAND_INS)
            if not names or (one.name in names if real else one.name.partition("-")[0] in families)
        )
        default = GROUPS[:-1] if names else GROUPS
        groups = tuple(one for one in (ENDS, *GROUPS) if one in only) or default
        return cls(
            subjects, tuple(one for one in (ONE, LARGEST) if one in only) or (ONE, LARGEST), groups, real
        )

    def timed(self) -> list[Case]:
        """Rungs of the ladder, then levers alone and left out, those with CUDA graphs last; weights change least often."""
        found: list[Case] = []
        for one in self.subjects:
            rungs, every = ladder(one.weights), configurations(one.weights)
            if RUNGS in self.groups:
                found += self.cases(one, [x for x in every if x in rungs], one.batches)
            elif ENDS in self.groups:
                found += self.cases(one, ends(one), one.batches)
            if LEVERS in self.groups:
                others = [x for x in every if x not in rungs and (self.real or not x.compiled)]
                found += self.cases(one, others, one.batches if self.real else one.batches[:1])
        return sorted(found, key=lambda case: case.levers.graphs)

    def traced(self) -> list[Case]:
        """Rungs of the ladder, or of these the ends that alone are timed."""
        found: list[Case] = []
        for one in self.subjects if TRACE in self.groups else ():
            every = ends(one) if ENDS in self.groups and RUNGS not in self.groups else ladder(one.weights)
            rungs = [x for x in every if self.real or not x.compiled]
            found += self.cases(one, rungs, one.batches if self.real else one.batches[:1])
        return found

    def cases(self, one: Subject, levers: Sequence[Levers], batches: Sequence[int]) -> list[Case]:
        """Batch by batch."""
        found = [Case(one, chosen, batch) for batch in batches for chosen in levers]
        return [case for case in found if case.setting in self.settings]


def ends(one: Subject) -> list[Levers]:
    """The first and the last rung that a model has, without self-speculation."""
    rungs = [x for x in ladder(one.weights) if not x.speculation and one.refusal(x, 1, "cuda") is None]
    return [rungs[0], rungs[-1]]


@dataclass
class Bench:
    """What is measured with; one model at a time, with its weights as the last configuration had them."""

    settings: Settings
    journal: Journal
    deadline: Deadline
    failed: list[Row] = field(default_factory=list)
    #: Whether recorded rungs of the ladder are traced when they are timed, and what that has found of the last case.
    traces: bool = False
    found: Values | None = None
    _model: tuple[tuple[str, str], Any] | None = None
    _largest: dict[str, int] = field(default_factory=dict)
    _plain: tuple[Any, torch.Tensor] | None = None
    stages: Stages = field(default_factory=lambda: Stages("", told=False))

    def rows_of(self, kind: str, measure: Callable[[Case], Values], cases: Sequence[Case]) -> None:
        """Rows of all cases that the journal lacks."""
        device = self.settings.device
        with bar(kind, len(cases)) as step:
            for case in cases:
                table = table_name(kind, self.settings.scale, case.subject.name)
                about = f"{case.subject.name}, {case.setting}, {case.levers.name}"
                self.stages = Stages(about, told=device == "cuda")
                if not self.journal.finished(table, case.setting, case.levers.name):
                    compiles = case.levers.compiled and device == "cuda"
                    refused = case.subject.refusal(case.levers, self.batch(case), device)
                    reason = (
                        f"not applicable: {refused}"
                        if refused
                        else self.deadline.reason(case.subject.seconds[compiles])
                    )
                    values = status(reason) if reason else attempt(partial(self.whole, measure, case))
                    self.give_back()  # not in `whole`: while an error is raised, its frames hold the work
                    self.put(kind, case, values)
                    if self.found is not None:
                        self.put(TRACE, case, self.found)
                        self.found = None
                step(about)
        self.forget()

    def put(self, kind: str, case: Case, values: Values) -> None:
        """Rows of a case."""
        where = case.subject.name, case.setting, case.levers.name
        keep(self.journal, self.failed, self.settings.rows(EXPERIMENT, kind, *where, values))

    def acceptances(self) -> None:
        """Rows of trained models, arm by arm."""
        plan, data = acceptance.PLANS[self.settings.scale], self.settings.corpus.name
        name = plan.training.model.name
        table = table_name(acceptance.KIND, self.settings.scale, data)
        for arm in acceptance.ARMS:
            wanted = list(acceptance.methods(plan, arm))
            if all(self.journal.finished(table, name, one) for one in wanted):
                continue
            reason = self.deadline.reason(plan.seconds)
            found = {one: status(reason) for one in wanted} if reason else self.arm(plan, arm, wanted)
            for one, values in found.items():
                keep(
                    self.journal, self.failed,
                    self.settings.rows(EXPERIMENT, acceptance.KIND, data, name, one, values),
                )  # fmt: skip

    def arm(self, plan: acceptance.Plan, arm: str, wanted: Sequence[str]) -> dict[str, Values]:
        """Values of an arm's exits; where it fails, the reason for each."""
        found: dict[str, Values] = {}

        def train() -> Values:
            found.update(acceptance.measure(self.settings, plan, arm))
            return {}

        said = attempt(train)
        return {one: {**found.get(one, {}), **said} for one in wanted}

    @torch.no_grad()
    def whole(self, measure: Callable[[Case], Values], case: Case) -> Values:
        """Values of a case. Programs are forgotten after it."""
        try:
            return measure(case)
        finally:
            if case.levers.compiled:
                torch.compiler.reset()

    def batch(self, case: Case) -> int:
        """Units of the batch at once."""
        if case.batch:
            return case.batch
        if self.settings.device != "cuda":
            return FEW
        if case.subject.name in self._largest:
            return self._largest[case.subject.name]
        with torch.device("meta"):
            weights = sum(one.numel() for one in case.subject.build("meta", 0).parameters())
        total = torch.cuda.get_device_properties(0).total_memory
        largest: int = case.subject.largest(total - 2 * weights)  # type: ignore[attr-defined]
        self._largest[case.subject.name] = largest
        return largest

    def work(self, case: Case, levers: Levers) -> Work:
        """The work of a case with these levers, not prepared; the model is built anew where its weights are other ones."""
        wanted = case.subject.name, levers.weights
        if self._model is None or self._model[0] != wanted:
            self.forget()
            built = case.subject.build(self.settings.device, self.settings.seed)
            self.stages.done("built")
            self._model = wanted, weights_in(case.subject, built, levers.weights)
            self.stages.done(f"weights in {levers.weights or 'bfloat16'}")
        return work_of(
            case.subject, self._model[1], levers, self.batch(case), self.settings.device, self.settings.seed
        )

    def forget(self) -> None:
        """Give the model's memory back."""
        self._model = self._plain = None
        self.give_back()

    def give_back(self) -> None:
        """Memory of a GPU that nothing holds any more."""
        if self.settings.device == "cuda":
            gc.collect()
            free()

    def expected(self, case: Case) -> torch.Tensor:
        """Outputs of the same weights, eagerly by fused attention and a cache in bfloat16."""
        where = case.subject.name, case.levers.weights, case.batch
        if self._plain is None or self._plain[0] != where:
            plain = self.work(case, case.levers.plain)
            plain.prepare()
            self._plain = where, plain.outputs().clone()
            # A loop is a cycle: its cache would stand beside that of the case, for which the largest batch has no room.
            del plain
            self.give_back()
        return self._plain[1]

    def timed(self, case: Case) -> Values:
        """Times of a configuration whose outputs are right and whose levers changed something."""
        speculates, on_gpu = case.levers.speculation, self.settings.device == "cuda"
        expected = None if speculates else self.expected(case)
        self.stages.done("outputs of the same weights, eagerly")
        peak, started = Peak(torch.device(self.settings.device)), time.perf_counter()
        work, programs = self.work(case, case.levers), unique_graphs()
        if on_gpu:
            peak.begin()
        work.prepare()
        if case.levers.compiled != (unique_graphs() > programs):
            raise Wrong("compiled did not change the model: the row would be of another rung")
        warm = time.perf_counter() - started
        self.stages.done("compiled, recorded and run")
        change = relative_change(
            work.outputs(), expected, limit_of(case), "from those of the same weights, eagerly"
        )
        work.evidence()
        timing = summary(self.runs(work))
        self.stages.done("compared and timed")
        values: Values = {} if speculates else timing.values()
        if speculates:
            values[ROUND] = (1e3 * timing.median, "ms")
        if self.traces and case.levers.graphs and case.levers in ladder(case.subject.weights):
            self.found = attempt(partial(self.trace, work, case, 1e3 * timing.median))
        if not case.levers.graphs:  # whose trace would have slowed the host, and which it does not bound
            values |= host_values(self.settings.device)
        if on_gpu:
            values["memory beside weights"] = ((peak.over() or 0) / 1e9, "GB")
        return {
            **values, **work.values(timing.median), BATCH: (self.batch(case), ""), CHANGE: change, "warm-up": (warm, "s"),
        }  # fmt: skip

    def runs(self, work: Work) -> list[float]:
        """Seconds of a unit in each of RUNS runs, or of fewer that take ENOUGH seconds."""
        taken: list[float] = []
        started = time.perf_counter()
        while len(taken) < RUNS[self.settings.device]:
            taken.append(self.seconds(work))
            if len(taken) >= FEWEST and time.perf_counter() - started > ENOUGH:
                break
        return taken

    def seconds(self, work: Work) -> float:
        """Seconds of a unit in one run."""
        work.begin()
        self.wait()
        started = time.perf_counter()
        work.run()
        self.wait()
        return (time.perf_counter() - started) / work.units

    def wait(self) -> None:
        """Wait for the GPU."""
        if self.settings.device == "cuda":
            torch.cuda.synchronize()

    def traced(self, case: Case) -> Values:
        """Shares of operators, and of the time without a kernel, of a configuration that was timed before."""
        work = self.work(case, case.levers)
        work.prepare()
        return self.trace(work, case, self.unprofiled(case) if self.settings.device == "cuda" else None)

    def trace(self, work: Work, case: Case, milliseconds: float | None) -> Values:
        """The same of prepared work. milliseconds: of a unit without the profiler; None: with it, of a stand-in."""
        work.begin()
        self.wait()
        launched_one_by_one = not (case.levers.compiled or case.levers.graphs)
        with scopes(work.model if launched_one_by_one else nn.Module()):
            kernels, seconds = traced(work.run, self.settings.device)
        return trace_values(kernels, work.units, milliseconds or 1e3 * seconds / work.units)

    def unprofiled(self, case: Case) -> float:
        """Milliseconds of a unit without the profiler; Wrong where it has no row."""
        table = table_name(KIND, self.settings.scale, case.subject.name)
        for row in self.journal.rows:
            if (row.table, row.setting, row.method) == (
                table,
                case.setting,
                case.levers.name,
            ) and row.metric in (TIME, ROUND):
                return row.value
        raise Wrong("there is no time of this configuration to compare its trace with")


def limit_of(case: Case) -> float:
    """How far outputs may be from those of the same weights: wider where keys are rounded, and for an image, whose guidance
    takes a difference of logits several times."""
    rounds = case.levers.cache not in ("", "bfloat16") or getattr(case.subject, "image", False)
    return SCHEME_LIMIT if rounds else COMPILED_LIMIT


def trace_values(kernels: Sequence[Any], units: int, milliseconds: float) -> Values:
    """Busy milliseconds of a unit, the idle share of its time, and shares of operators. Wrong where the kernels of the trace
    took longer than the unit without it."""
    active = busy(kernels) / 1e3 / units
    if active > AGREES * milliseconds:
        raise Wrong(
            f"kernels took {active:.3f} ms in the trace, and the unit {milliseconds:.3f} ms without it"
        )
    idle = max(0.0, 1 - active / milliseconds)
    found = shares(kernels)
    parts: Values = {f"share, {name}": (found[name], "ratio") for name in OPERATORS}
    return {BUSY: (active, "ms"), IDLE: (idle, "ratio"), "kernels": (len(kernels) / units, ""), **parts}


def host_values(device: str) -> Values:
    """Microseconds of the host for a launch of an empty kernel and for an eager linear layer: baselines are bound by it."""
    layer = nn.Linear(64, 64, bias=False, device=device, dtype=torch.bfloat16)
    x = torch.zeros(1, 64, device=device, dtype=torch.bfloat16)
    calls: dict[str, Callable[[], Any]] = {"launch": x.zero_, "linear": lambda: layer(x)}
    return {f"host, {name}": (1e6 * host_seconds(call), "us") for name, call in calls.items()}


def host_seconds(call: Callable[[], Any], count: int = 200) -> float:
    """Seconds of the host for a call, the median of five times so many."""
    times = []
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(count):
            call()
        times.append((time.perf_counter() - started) / count)
    return summary(times).median


__all__ = ["check_parts", "run", "subject"]
