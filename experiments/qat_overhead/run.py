"""Experiment `qat_overhead`: what quantization-aware training costs beside plain bfloat16 training, ours and torchao's.

A step is forward and backward, without the optimizer. Two blocks of Llama-3-8B over 8192 tokens are trained by all arms in
turn, round by round in one process, as they are and compiled block by block; Llama-3.2-3B whole, as it is. Where there is no
GPU, or at quick scale, tiny stand-ins go the same way; their rows check the code and say nothing of time.

Before its clock starts an arm takes a step: what it gives must be finite and near what plain training gives, every parameter
must have a finite gradient, and a compiled model must give what it gave before.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from experiments.decode.configs import TORCHAO, version_of
from experiments.decode.model import Shape
from experiments.decode.run import COMPILED_LIMIT, SCHEME_LIMIT, gate
from experiments.harness.progress import bar
from experiments.harness.rows import Journal, Row, table_name
from experiments.harness.settings import Settings
from experiments.harness.timing import AGAIN, CudaWatch, Plan, Stopwatch, rounds_of, summary
from experiments.kernels.outcome import Values, attempt, free, keep, status
from experiments.qat_overhead.model import LLAMA_3B, TINY_BLOCKS, TINY_WHOLE, TWO_BLOCKS
from experiments.qat_overhead.step import HostWatch, Trainee
from experiments.qat_overhead.variants import (
    ARMS,
    COPY_RATE,
    INT8_INT4,
    PLAIN,
    RECIPES,
    Arm,
    linear_shapes,
    rounding_bytes,
)

EXPERIMENT = KIND = "qat_overhead"
TITLE = "Quantization-aware training: what it costs"
EAGER, COMPILED = "eager", "compiled"
#: Seconds after which nothing more is begun: a run that ends publishes what it has.
SECONDS = 150.0
#: Programs that one function may have at once: blocks of all arms are compiled beside each other.
PROGRAMS = 64
#: Steps of an arm before the one that is timed.
SETTLE = 2


STEADY = Plan(rounds=30, warmup=2, seconds=7.0, fewest=8)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Arms that are timed in turn: the same model and tokens, compiled or not."""

    shape: Shape
    batch: int
    length: int
    setting: str = EAGER
    whole: bool = False
    arms: tuple[Arm, ...] = ARMS
    plan: Plan = STEADY
    backend: str = "inductor"

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.length


BOTH = tuple(arm for arm in ARMS if arm.recipe in ("", INT8_INT4))
#: In the order in which they are measured: what takes least first.
GPU_GROUPS = (
    Group(shape=TWO_BLOCKS, batch=2, length=4096),
    Group(shape=TWO_BLOCKS, batch=2, length=4096, setting=COMPILED),
    Group(
        shape=LLAMA_3B,
        batch=2,
        length=4096,
        whole=True,
        arms=BOTH,
        plan=Plan(rounds=8, warmup=1, seconds=12.0, fewest=4),
    ),
)
QUICK = Plan(rounds=2, warmup=1, seconds=1.0, fewest=2)
TINY = Group(shape=TINY_BLOCKS, batch=1, length=16, plan=QUICK, backend="aot_eager")
#: torchao's is not traced here: that takes longer than all the rest.
MINE = tuple(arm for arm in ARMS if arm.maker != TORCHAO)
TINY_GROUPS = (
    TINY,
    replace(TINY, setting=COMPILED, arms=MINE),
    replace(TINY, shape=TINY_WHOLE, whole=True, arms=BOTH),
)


def subject(settings: Settings) -> str:
    """What rows are about: the seed and the libraries that compile or compare."""
    return "-".join([f"seed{settings.seed}", *(name + version_of(name) for name in ("triton", TORCHAO))])


def is_exact(settings: Settings) -> bool:
    """Whether shapes are the real ones: at full scale on a GPU."""
    return settings.scale == "full" and settings.device == "cuda"


@dataclass
class Bench:
    """What a run uses."""

    settings: Settings
    groups: Sequence[Group]
    watch: Stopwatch
    clock: Callable[[], float] = time.perf_counter
    until: float = field(init=False)

    def __post_init__(self) -> None:
        self.until = self.clock() + SECONDS

    @classmethod
    def of(cls, settings: Settings) -> Bench:
        """The bench of a run: the real shapes at full scale on a GPU, otherwise the stand-ins."""
        watch: Stopwatch = CudaWatch() if settings.device == "cuda" else HostWatch()
        return cls(settings, GPU_GROUPS if is_exact(settings) else TINY_GROUPS, watch)

    def late(self) -> str | None:
        """Why nothing more is begun; None while there is time."""
        return f"not run: the {SECONDS:.0f} s of a run were over" if self.clock() > self.until else None


def run(settings: Settings, journal: Journal | None = None) -> list[Row]:
    """Rows of all arms. Finished ones are taken from the journal; what failed is tried again and not kept there."""
    return measure(Bench.of(settings), journal if journal is not None else Journal())


def measure(bench: Bench, journal: Journal) -> list[Row]:
    """Rows of all groups, one after the other; plain training goes along wherever an arm is missing."""
    failed: list[Row] = []
    with bar("training", len(bench.groups)) as step:
        for group in bench.groups:
            table = table_name(KIND, bench.settings.scale, group.shape.name)
            done = {arm for arm in group.arms if journal.finished(table, group.setting, arm.method)}
            if len(done) < len(group.arms):
                found = measured(bench, replace(group, arms=remaining(group.arms, done)))
                for arm, values in found.items():
                    if arm not in done:
                        keep(journal, failed, rows_of(bench, group, arm, values))
            step(f"{group.shape.name}, {group.setting}")
    return journal.rows + failed


def remaining(arms: Sequence[Arm], done: set[Arm]) -> tuple[Arm, ...]:
    """Plain training, and the arms that have no rows."""
    return (PLAIN, *(arm for arm in arms if arm not in done and arm is not PLAIN))


def rows_of(bench: Bench, group: Group, arm: Arm, values: Values) -> list[Row]:
    """Tidy rows of an arm."""
    place = (EXPERIMENT, KIND, group.shape.name, group.setting, arm.method)
    return [bench.settings.row(*place, metric, value, unit) for metric, (value, unit) in values.items()]


def measured(bench: Bench, group: Group) -> dict[Arm, Values]:
    """Everything about the arms of a group: each on its own first, then all in turn."""
    trainees: dict[Arm, Trainee] = {}
    torch.manual_seed(bench.settings.seed)
    with compiler():
        found = {arm: prepared(bench, group, arm, trainees) for arm in group.arms}
        if PLAIN in trainees:
            with_times(bench, group, trainees, found)
    trainees.clear()
    free()
    return {
        arm: values if PLAIN in found and ok(found[PLAIN]) else without(values)
        for arm, values in found.items()
    }


def ok(values: Values) -> bool:
    """Whether an arm went well."""
    return values.get("status: ok", (0.0, ""))[0] == 1.0


def without(values: Values) -> Values:
    """What is left of an arm where plain training failed."""
    return status("not run: plain training failed") if ok(values) else values


@contextmanager
def compiler() -> Iterator[None]:
    """The compiler's settings for a group."""
    import torch._dynamo.config as tracer

    torch.compiler.reset()
    with tracer.patch(recompile_limit=PROGRAMS), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def prepared(bench: Bench, group: Group, arm: Arm, trainees: dict[Arm, Trainee]) -> Values:
    """Make a model, check it, see what it keeps and what it needs; it joins the trainees if all went well."""
    reason = arm.missing() or bench.late()
    return status(reason) if reason else attempt(partial(_prepared, bench, group, arm, trainees))


def _prepared(bench: Bench, group: Group, arm: Arm, trainees: dict[Arm, Trainee]) -> Values:
    settings = bench.settings
    trainee = Trainee.of(
        group.shape, group.batch, group.length, settings.device, settings.seed, whole=group.whole
    )
    arm.prepare(trainee.model)
    plain = trainees[PLAIN].result if PLAIN in trainees else None
    trainee.result = trainee.look()
    values: Values = {
        "change of the result": gate(trainee.result, plain, SCHEME_LIMIT, "from plain training's")
    }
    started = bench.clock()
    if group.setting == COMPILED:
        trainee.compile(group.backend)
    made = trainee.first_step()
    bench.watch.sync()
    values["first step"] = (bench.clock() - started, "s")
    if group.setting == COMPILED:
        values["change by compiling"] = gate(made, trainee.result, COMPILED_LIMIT, "by compiling")
    del made
    values |= trainee.memory()
    if arm.rounds:
        moved = rounding_bytes(RECIPES[arm.recipe], linear_shapes(trainee.model), group.tokens)
        values["bytes to round"] = (moved / 1e9, "GB")
        values["time to round at the copy rate"] = (moved / COPY_RATE * 1e3, "ms")
    trainees[arm] = trainee
    return values


def with_times(bench: Bench, group: Group, trainees: Mapping[Arm, Trainee], found: dict[Arm, Values]) -> None:
    """Times of all trainees in turn, and everything over plain training, join what was found."""
    times = in_turn(bench.watch, trainees, group.plan)
    base = summary(times[PLAIN.method]).median
    for arm in trainees:
        timing = summary(times[arm.method])
        values = found[arm]
        values["time"] = (timing.median * 1e3, "ms")
        values["time, 20%"], values["time, 80%"] = (timing.low * 1e3, "ms"), (timing.high * 1e3, "ms")
        values["tokens/s"] = (group.tokens / timing.median, "tokens/s")
        values["time over plain"] = (over(timing.median, base), "%")
        for metric in ("peak memory", "kept for backward"):
            if metric in values and metric in found[PLAIN]:
                values[f"{metric} over plain"] = (over(values[metric][0], found[PLAIN][metric][0]), "%")
    again = summary(times[AGAIN]).median
    found[PLAIN]["time again over plain"] = (over(again, base), "%")


def in_turn(watch: Stopwatch, trainees: Mapping[Arm, Trainee], plan: Plan) -> dict[str, list[float]]:
    """Seconds of a step of each arm by its name, round by round in turn, and of plain training once more under AGAIN.

    A GPU that is near its power limit runs faster after a step that was easy on it. So each arm takes steps of its own before
    the one that counts: it is timed as it trains, after itself.
    """
    order = [*trainees, PLAIN]
    names = [*(arm.method for arm in trainees), AGAIN]
    calls = [trainees[arm].step for arm in order for _ in range(SETTLE + 1)]
    warm = [sum(watch.seconds(calls)) for _ in range(plan.warmup)]
    rounds = [
        watch.seconds(calls)[SETTLE :: SETTLE + 1] for _ in range(rounds_of(plan, min(warm, default=0.0)))
    ]
    return {name: list(seconds) for name, seconds in zip(names, zip(*rounds, strict=True), strict=True)}


def over(value: float, base: float) -> float:
    """How much more a value is than another, in percent of that."""
    return (value / base - 1) * 100


__all__ = ["EXPERIMENT", "KIND", "TITLE", "Bench", "Group", "measure", "run", "subject"]
