"""Targets of the speed and memory of training, relative to bfloat16 and torchao in the same table; which of them are missed.

Targets of the recipes themselves are those for precise sums in both gradients; "fast sums" have their own. Times and memory of
a CPU say nothing, so they have no target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from experiments.fp8_training.methods import FLOAT8, MXFP8, OURS, PLAIN, SUMMED_FAST, Method
from experiments.fp8_training.report.convergence import gap_of, totals
from experiments.fp8_training.speed import blocks, fsdp, linear
from experiments.fp8_training.speed.blocks import COMPILED
from experiments.fp8_training.training.convergence import GAPS
from experiments.fp8_training.training.gaps import UNDECIDED
from experiments.fp8_training.training.plans import MARGIN
from experiments.harness.libraries import TORCHAO
from experiments.harness.rows import Row
from experiments.models.llama_shapes import LLAMA_3_8B_TWO_LAYERS
from experiments.pretraining.run import BITS
from experiments.report.content import Table
from experiments.report.limits import RunTargets, by_device
from experiments.report.results import Results, Where, best_run, by_run
from experiments.report.targets import Target, counts, known, missed, rest

TIME, TIME_RATIO, SPEED_RATIO = "time", "time over bfloat16", "speed over bfloat16"
MEMORY_RATIO = "peak memory over bfloat16"


def ours(recipe: str, *, fast_sums: bool = False) -> str:
    """The name of a recipe of ours in rows."""
    return Method(library=OURS, recipe=recipe, fast_sums=fast_sums).name


#: Largest times of a linear layer over bfloat16's, eager and from a CUDA graph, by shape and method.
TIMES = {
    ("16384x4096x14336", ours("rowwise", fast_sums=True)): 0.60,
    ("16384x4096x14336", ours("tensorwise", fast_sums=True)): 0.58,
    ("16384x4096x14336", ours("rowwise")): 0.66,
    ("16384x4096x14336", ours("tensorwise")): 0.66,
    ("16384x4096x14336", ours(MXFP8)): 1 / 0.9,
    ("8192x4096x4096", ours("rowwise")): 0.74,
}
#: Shapes that launches dominate, where an eager layer of ours is to take at most this part of torchao's time at its best.
SMALL, OF_TORCHAO = ("4096x1024x2048", "2048x1024x1024"), 0.5
#: Smallest speeds over bfloat16 of two blocks of Llama-3-8B, two texts of 8192 tokens, no checkpointing.
SPEEDS = {"tensorwise": 1.38, "rowwise": 1.30}
#: Smallest speed of a step on two GPUs whose weights are gathered as float8, over the same gathered as bfloat16; largest part
#: of the bytes: one of two of each weight, and scales.
OF_GATHER, OF_BYTES, OF_WIDE, GATHERED = 1.05, 0.52, "speed over bfloat16 all-gather", "all-gather"
#: Largest eager time there over the compiled one, and largest peak of memory over bfloat16's.
OF_COMPILED, OF_MEMORY = 1.10, 1.0


def of_linear(where: Where, results: Results) -> list[Target]:
    """Targets of one shape."""
    if where.device == "cpu":
        return []
    limits = [(method, limit) for (data, method), limit in TIMES.items() if data == where.data]
    found = [
        at_most(
            f"{method}, {setting}: {TIME_RATIO}", results.value(setting, method, TIME_RATIO), limit,
            results.day(setting, method),
        )
        for method, limit in limits
        for setting in (linear.EAGER, linear.GRAPH)
    ]  # fmt: skip
    recipes = FLOAT8 if where.data in SMALL else ()
    return found + [
        at_most(
            f"{ours(one)}, {linear.EAGER}: time over torchao's best", over_torchao(results, one), OF_TORCHAO,
            results.day(linear.EAGER, ours(one)),
        )
        for one in recipes
    ]  # fmt: skip


def over_torchao(results: Results, recipe: str) -> float | None:
    """Ours over the shortest eager time of torchao's rows of that recipe, compiled or not; None where either is missing."""
    times = [results.value(linear.EAGER, one, TIME) for one in theirs(recipe)]
    return ratio(results.value(linear.EAGER, ours(recipe), TIME), shortest(times))


def theirs(recipe: str) -> list[str]:
    """torchao's rows of a recipe, compiled or not."""
    methods = [Method(library=TORCHAO, recipe=recipe, compiled=compiled) for compiled in (False, True)]
    return [linear.label(one) for one in methods]


def of_blocks(where: Where, results: Results) -> list[Target]:
    """Targets of two blocks of Llama-3-8B; other models have none."""
    if where.device == "cpu" or where.data != LLAMA_3_8B_TWO_LAYERS.name:
        return []
    names = [(ours(one, fast_sums=fast), SPEEDS[one]) for one in SUMMED_FAST for fast in (False, True)]
    found = [target for name, limit in names for target in of_method(results, name, limit)]
    others = [ours(one) for one in (*FLOAT8, MXFP8) if one not in SPEEDS]
    return found + [target for name in others for target in of_memory(results, name)]


def of_method(results: Results, name: str, limit: float) -> Iterator[Target]:
    """Speed over bfloat16, eager over compiled, and memory both ways."""
    eager, compiled = (blocks.blocks(2, compiled=one).setting for one in (False, True))
    speeds = [results.value(compiled, name, SPEED_RATIO), best_over_best(results, name, (eager, compiled))]
    fastest = max((one for one in speeds if one is not None), default=None)
    day = results.day(compiled, name)
    yield at_least(f"{name}: {SPEED_RATIO}, both {COMPILED} or each at its best", fastest, limit, day)
    times = [results.value(setting, name, TIME) for setting in (eager, compiled)]
    yield at_most(f"{name}: time of eager over {COMPILED}", ratio(*times), OF_COMPILED, day)
    yield from of_memory(results, name)


def of_memory(results: Results, name: str) -> Iterator[Target]:
    """The largest peak of memory over bfloat16's, eager and compiled."""
    for setting in (blocks.blocks(2, compiled=one).setting for one in (False, True)):
        yield at_most(
            f"{name}, {setting}: {MEMORY_RATIO}", results.value(setting, name, MEMORY_RATIO), OF_MEMORY,
            results.day(setting, name),
        )  # fmt: skip


def of_fsdp(where: Where, results: Results) -> list[Target]:
    """Float8 against bfloat16 all-gather of each recipe on two GPUs, and the bytes that are gathered."""
    if where.device == "cpu":
        return []
    setting, found = fsdp.TWO_GPUS.setting, list[Target]()
    base = results.value(setting, fsdp.SIDES[0].name, GATHERED)
    for side in fsdp.SIDES:
        if side.codes:
            speed = results.value(setting, side.name, OF_WIDE)
            day = results.day(setting, side.name)
            found.append(at_least(f"{side.name}: {OF_WIDE}", speed, OF_GATHER, day))
            bytes_ratio = ratio(results.value(setting, side.name, GATHERED), base)
            found.append(at_most(f"{side.name}: {GATHERED} over bfloat16's", bytes_ratio, OF_BYTES, day))
    return found


def best_over_best(results: Results, name: str, settings: Sequence[str]) -> float | None:
    """bfloat16's shortest time among some settings over a method's; None where one is missing."""
    base, mine = ([results.value(one, method, TIME) for one in settings] for method in (PLAIN.name, name))
    return None if None in (*base, *mine) else ratio(shortest(base), shortest(mine))


def shortest(times: Sequence[float | None]) -> float | None:
    """The shortest of the times that were measured."""
    return min((one for one in times if one is not None), default=None)


def ratio(value: float | None, base: float | None) -> float | None:
    """value / base, where both were measured."""
    return None if value is None or base is None else value / base


def at_most(name: str, value: float | None, limit: float, day: str = "") -> Target:
    """A target that is an upper limit."""
    return Target(name, value, limit, at_least=False, value_format=".3f", day=day)


def at_least(name: str, value: float | None, limit: float, day: str = "") -> Target:
    """One that is a lower limit."""
    return Target(name, value, limit, value_format=".3f", day=day)


#: What has targets, by kind of table, and how its tables are called.
TARGETS: dict[str, tuple[Callable[[Where, Results], list[Target]], tuple[str, ...]]] = {
    linear.KIND: (of_linear, tuple(dict.fromkeys([*(data for data, _ in TIMES), *SMALL]))),
    blocks.KIND: (of_blocks, (LLAMA_3_8B_TWO_LAYERS.name,)),
    fsdp.KIND: (of_fsdp, (LLAMA_3_8B_TWO_LAYERS.name,)),
}


def finding(rows: Sequence[Row]) -> list[str]:
    """How many targets of speed and memory are reached, and how many were not measured, by device; nothing of one on which
    none was."""
    return [
        f"Targets of speed and memory reached, full scale on {device}: {counts(targets)}."
        for device, targets in by_device(speed_targets(rows)).items()
    ]


def targets_by_run(rows: Sequence[Row]) -> list[RunTargets]:
    """Those of speed and memory, then gaps of paired trainings to bfloat16."""
    return [*speed_targets(rows), *gap_targets(rows)]


def speed_targets(rows: Sequence[Row]) -> list[RunTargets]:
    """Of single layers, of blocks and of two GPUs, on every device that measured one of these; those of a table that is
    missing have no value."""
    tables = {kind: by_run(rows, kind) for kind in TARGETS}
    devices = dict.fromkeys(
        one.device for runs in tables.values() for one in runs if (one.scale, one.device) != ("quick", "cpu")
    )
    return [
        RunTargets(where, of_one(where, tables[kind].get(where, Results([]))), kind)
        for device in devices
        for kind, (of_one, names) in TARGETS.items()
        for where in (Where("full", device, name) for name in names)
    ]


def gap_targets(rows: Sequence[Row]) -> list[RunTargets]:
    """The mean gap of each recipe to bfloat16 on each text, of the largest run: at most the margin. A gap whose interval
    holds the margin is decided neither way and has no target."""
    run = best_run(by_run(rows, GAPS))
    if run is None or run[0].scale != "full":
        return []
    where, gaps = run
    metrics = [one for one in totals(gaps) if one.startswith(BITS) and "/" not in one]
    lines = dict.fromkeys((row.setting, row.method) for row in gaps.rows)
    found = [gap_target(gaps, *line, metric) for line in lines for metric in metrics]
    return [RunTargets(where, [one for one in found if one is not None], "loss over bfloat16's")]


def gap_target(gaps: Results, setting: str, method: str, metric: str) -> Target | None:
    """The mean gap of a recipe on a text, with its interval in the name; None where it was not measured or is undecided."""
    gap = gap_of(gaps, setting, method, metric)
    if gap is None or gap.verdict(MARGIN) == UNDECIDED:
        return None
    name = f"{method}, {metric} (95% interval ± {gap.half:.2f})"
    return Target(name, gap.mean, MARGIN, False, "%", ".2f", day=gaps.day(setting, method))


def verdict(targets: Sequence[Target]) -> list[str]:
    """How many targets are missed, and which, of those that were measured; how many were not."""
    measured = known(targets)
    late, ending = missed(measured), rest(targets)
    if late:
        words = f"**Missed targets: {len(late)} of {len(measured)}{ending}.** "
        return [words + "; ".join(map(str, late)) + "."]
    if not measured:
        return [f"None of the {len(targets)} targets was measured."] if targets else []
    return [f"All {len(measured)} values that have a target meet it{ending}."]


def target_table(targets: Sequence[Target], rows: Sequence[Row] = ()) -> list[Table]:
    """All targets of a section, also of what was not measured; none where it has none."""
    lines = [
        [one.name, one.measured, f"{'≥' if one.at_least else '≤'} {one.texts[1]}", one.verdict]
        for one in targets
    ]
    return [Table("Targets", ["target", "measured", "limit", "reached"], lines, rows)] if lines else []


__all__ = ["finding", "of_blocks", "of_fsdp", "of_linear", "target_table", "targets_by_run", "verdict"]
