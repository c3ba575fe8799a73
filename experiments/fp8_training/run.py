"""Experiment `fp8_training`: low-precision training, measured beside bfloat16, torchao and the tables that others published.

Parts, each a kind of table: "linear" (one layer, forward and backward), "grid" (LayerNorm, linear, sigmoid; 36 by 6 shapes),
"grid_eager" (its smaller cells, tuned for eager mode; GPUs alone), "blocks" (decoder layers of published models), trainings
("paired", "curves", "gaps", "sweep", "long"), "faults", and "fsdp" (decoder layers on two GPUs, weights gathered as bfloat16
and as float8; on a CPU two processes); "paired:nvfp4" is one recipe of "paired". Published values
(`experiments/published/fp8_training.csv` and `fp8_rowwise_grid.csv`) stand beside measured ones of the same shape and recipe
alone. Stand-in: on a CPU recipes are emulated, shapes and models are tiny; their times say nothing, their losses and
errors are those of the recipes.

A run that has a limit of seconds starts nothing after it and publishes what it has; the same call goes on from there, and so
does one on another machine with the same kind of device from what was published. Trainings go on one by one; what is timed is
measured whole or not at all (`experiments.fp8_training.run`), so that the sides of a ratio are of one run.

What is measured whole or not at all, because its methods are divided by each other: the layer of a shape, decoder layers
eager and compiled, a cell of the grid.

Where a method of one is missing, all of them are measured again, so that a ratio is of one process on one host. What was
never measured comes before what lacks a method: one that fails wherever it is tried keeps nothing else waiting. A whole
that the deadline cut is dropped: an older measurement stays, and the next run begins it anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from ao_lab.cli.terminal import say
from experiments.fp8_training import blocks, convergence, linear, real
from experiments.fp8_training.methods import LONG, LONG_RECIPES, PAIRED, PLANS, RARE_BYTES, RECIPES, SWEEP
from experiments.harness.measuring import Deadline, Values, bar, is_late, keep, status
from experiments.harness.rows import Journal, Row, table_name, table_parts
from experiments.runs.real_models import subject as subject
from experiments.runs.run import all_rows, published_shapes
from experiments.runs.settings import Settings

EXPERIMENT = "fp8_training"


def run(settings: Settings, journal: Journal | None = None) -> list[Row]:
    """Rows of all parts, or of those that `settings.only` names, or of real models where these were asked for; rows in the
    journal are not measured again."""
    journal = journal if journal is not None else Journal()
    if settings.asked is not None:
        return real.run_real(settings, journal)
    deadline, failed = Deadline(settings.seconds), list[Row]()
    for name, part in {**PARTS, **SMALLER}.items():
        if name in (settings.only or PARTS):
            part(settings, journal, failed, deadline)
    return all_rows(settings, journal, failed)


def linear_part(settings: Settings, journal: Journal, failed: list[Row], deadline: Deadline) -> None:
    """Single layers, shape by shape."""
    shapes = linear.SHAPES if published_shapes(settings) else linear.STAND_INS
    bench = cache(partial(linear.Bench.of, settings.device, settings.seed, deadline))
    methods = [
        (linear.EAGER, linear.label(one), one.missing()) for one in linear.all_methods(settings.device)
    ]

    def whole(shape: linear.Shape) -> Comparison:
        name = linear.data_of(shape)
        return Comparison(
            linear.KIND, name, name, (Part.of(methods, lambda: linear.measure(bench(), shape)),)
        )

    measure_comparisons("linear layers", map(whole, shapes), settings, journal, failed, deadline)


def blocks_part(
    settings: Settings, journal: Journal, failed: list[Row], deadline: Deadline, only: str = ""
) -> None:
    """Decoder layers: eager, then the same compiled, as one is a ratio of the other. only: those of one setting."""
    groups = blocks.GPU_GROUPS if published_shapes(settings) else blocks.TINY_GROUPS
    bench = cache(partial(blocks.Bench.of, settings.device, settings.seed, deadline))
    pairs: dict[tuple[str, str], list[blocks.Group]] = {}
    for group in groups:
        _, _, rest = group.setting.partition(", ")
        pairs.setdefault((group.shape.name, rest), []).append(group)
    comparisons = [
        Comparison(blocks.KIND, data, f"{data}, {rest}", tuple(part_of(group, bench) for group in pair))
        for (data, rest), pair in pairs.items()
        if only in ("", rest)
    ]
    measure_comparisons("decoder layers", comparisons, settings, journal, failed, deadline)


def part_of(group: blocks.Group, bench: Callable[[], blocks.Bench]) -> Part:
    """A group of decoder layers."""

    def measure() -> Found:
        found = blocks.measure(bench(), group)
        return {(group.setting, method.name): values for method, values in found.items()}

    return Part.of([(group.setting, one.name, one.missing()) for one in group.methods], measure)


def fsdp_part(settings: Settings, journal: Journal, failed: list[Row], deadline: Deadline) -> None:
    """Decoder layers on two ranks."""
    case = blocks.CASES["cuda" if published_shapes(settings) else "cpu"]
    methods = [(case.setting, side.name, case.missing()) for side in blocks.SIDES]
    part = Part.of(methods, lambda: blocks.fsdp_measure(case, settings.seed))
    comparisons = [Comparison(blocks.FSDP_KIND, case.shape.name, case.setting, (part,))]
    measure_comparisons("two ranks", comparisons, settings, journal, failed, deadline)


def grid_part(settings: Settings, journal: Journal, failed: list[Row], deadline: Deadline) -> None:
    """The grid, cell by cell."""
    cells = linear.CELLS if published_shapes(settings) else linear.GRID_STAND_INS
    comparisons = [cell_comparison(settings, linear.GRID_KIND, cell, linear.grid_measure) for cell in cells]
    measure_comparisons("grid", comparisons, settings, journal, failed, deadline)


def grid_eager_part(settings: Settings, journal: Journal, failed: list[Row], deadline: Deadline) -> None:
    """The smaller cells tuned for eager mode; on a CPU there are no launches, and `grid` says all."""
    cells = linear.EAGER_CELLS if published_shapes(settings) else ()
    comparisons = [
        cell_comparison(settings, linear.EAGER_KIND, cell, partial(linear.grid_measure, launches="eager"))
        for cell in cells
    ]
    measure_comparisons("grid, eager", comparisons, settings, journal, failed, deadline)


def cell_comparison(
    settings: Settings, kind: str, cell: linear.Cell, measure: Callable[[str, int, linear.Cell], Any]
) -> Comparison:
    """A cell of the grid."""
    setting = linear.setting_of(cell)

    def found() -> Found:
        values = measure(settings.device, settings.seed, cell)
        return {(setting, method.name): one for method, one in values.items()}

    part = Part.of([(setting, method.name, method.missing()) for method in linear.SIDES], found)
    return Comparison(kind, linear.MODULE, setting, (part,))


def faults_part(settings: Settings, journal: Journal, failed: list[Row], deadline: Deadline) -> None:
    """Trainings with planted faults."""
    convergence.fault_run(settings, journal, PLANS[settings.scale], deadline)


def trained_part(*kinds: str) -> Callable[[Settings, Journal, list[Row], Deadline], None]:
    """Trainings of some kinds."""

    def part(settings: Settings, journal: Journal, failed: list[Row], deadline: Deadline) -> None:
        convergence.run(settings, journal, PLANS[settings.scale], kinds, deadline)

    return part


def rare_bytes_part(settings: Settings, journal: Journal, failed: list[Row], deadline: Deadline) -> None:
    """Paired trainings of a tiny model, long enough to tell common bytes from those that are hardly trained."""
    for plan in RARE_BYTES:
        convergence.run(settings, journal, plan, (PAIRED,), deadline)


OK = "status: ok"
#: Values of each (setting, method).
Found = dict[tuple[str, str], Values]


@dataclass(frozen=True)
class Part:
    """What is timed in turn: the (setting, method) that can be measured here, of a layer those of one setting; what measures
    them; and of others why they cannot be."""

    methods: tuple[tuple[str, str], ...]
    measure: Callable[[], Found]
    absent: Found

    @classmethod
    def of(cls, methods: Iterable[tuple[str, str, str | None]], measure: Callable[[], Found]) -> Part:
        """Of settings and methods with the reason why one cannot be measured here, or None."""
        reasons = {(setting, method): reason for setting, method, reason in methods}
        here = tuple(one for one, reason in reasons.items() if reason is None)
        return cls(here, measure, {one: status(reason) for one, reason in reasons.items() if reason})


@dataclass(frozen=True)
class Comparison:
    """Parts of one table. name: what progress calls it."""

    kind: str
    data: str
    name: str
    parts: tuple[Part, ...]

    def table(self, settings: Settings) -> str:
        """The table of its rows."""
        return table_name(self.kind, settings.scale, self.data)

    def methods(self, settings: Settings) -> set[tuple[str, str, str]]:
        """All that is measured, with the table."""
        return {(self.table(settings), *one) for part in self.parts for one in part.methods}


def measure_comparisons(
    title: str, comparisons: Iterable[Comparison], settings: Settings, journal: Journal, failed: list[Row], deadline: Deadline
) -> None:  # fmt: skip
    """Measure those that miss a method; rows of what went well go into the journal, others to `failed`."""
    done = {(row.table, row.setting, row.method) for row in journal.rows}
    missing = []
    for comparison in comparisons:
        if not comparison.methods(settings) <= done:
            missing.append(comparison)
        else:
            add(comparison, [part.absent for part in comparison.parts], settings, journal, failed)
    # Sorting is stable: otherwise in the order in which they were given.
    missing.sort(key=lambda one: bool(one.methods(settings) & done))
    with bar(title, len(missing)) as step:
        for comparison in missing:
            if deadline.reason() is None:
                measure_one(comparison, settings, journal, failed)
            step(comparison.name)


def measure_one(comparison: Comparison, settings: Settings, journal: Journal, failed: list[Row]) -> None:
    """Measure all parts, up to one that the deadline cut, and put them in the place of what was there; nothing is put there
    where not all parts were reached or all failed."""
    made: list[Found] = []
    for part in comparison.parts:
        found = part.measure()
        if any(is_late(metric) for values in found.values() for metric in values):
            say(
                f"{comparison.name}: the time of this run ended before all was measured; the next one begins it anew"
            )
            break
        made.append(found)
    setting, _ = comparison.parts[0].methods[0]
    name = comparison_of(comparison.table(settings), setting)
    old = [row for row in journal.rows if measured_whole(row) == name]
    useless = not any(OK in one for found in made for one in found.values())
    if len(made) == len(comparison.parts) and not (old and useless):
        journal.drop(old)
        add(comparison, made, settings, journal, failed)


def add(
    comparison: Comparison, made: Iterable[Found], settings: Settings, journal: Journal, failed: list[Row]
) -> None:
    """Rows of values, or of a status."""
    for found in made:
        for (setting, method), values in found.items():
            keep(
                journal,
                failed,
                settings.rows(EXPERIMENT, comparison.kind, comparison.data, setting, method, values),
            )


def measured_whole(row: Row) -> tuple[str, str] | None:
    """What a row is measured together with; None where its line stands for itself."""
    return comparison_of(row.table, row.setting)


def comparison_of(table: str, setting: str) -> tuple[str, str] | None:
    """By table and setting: a whole layer, decoder layers whether compiled or not, those on two ranks, a cell."""
    kind, _, _ = table_parts(table)
    if kind == linear.KIND:
        return table, ""
    if kind == blocks.KIND:
        return table, setting.partition(", ")[2]
    return (table, setting) if kind in (linear.GRID_KIND, linear.EAGER_KIND, blocks.FSDP_KIND) else None


#: By the names that `--only` takes, in the order in which they are measured.
PARTS: dict[str, Callable[[Settings, Journal, list[Row], Deadline], None]] = {
    linear.KIND: linear_part,
    blocks.KIND: blocks_part,
    blocks.FSDP_KIND: fsdp_part,
    linear.GRID_KIND: grid_part,
    linear.EAGER_KIND: grid_eager_part,
    convergence.KIND: faults_part,
    SWEEP: trained_part(SWEEP),
    PAIRED: trained_part(PAIRED),
    LONG: trained_part(LONG),
}


def one_recipe(kind: str, recipe: str) -> Callable[[Settings, Journal, list[Row], Deadline], None]:
    """Trainings of a kind by one recipe; paired ones with the baseline, which their gaps are to."""

    def part(settings: Settings, journal: Journal, failed: list[Row], deadline: Deadline) -> None:
        plan = PLANS[settings.scale].of_recipe(recipe)
        convergence.run(settings, journal, plan, (kind,), deadline)

    return part


#: Parts of `paired` and `long`, for devices whose time is not enough for all recipes: "paired:nvfp4", "long:rowwise".
ONE_RECIPE = {f"{PAIRED}:{recipe}": one_recipe(PAIRED, recipe) for recipe in RECIPES} | {
    f"{LONG}:{recipe}": one_recipe(LONG, recipe) for recipe in LONG_RECIPES
}
#: Decoder layers of one batch and way of checkpointing: "blocks:2 x 8192, checkpointing none".
ONE_SETTING = {
    f"{blocks.KIND}:{rest}": partial(blocks_part, only=rest)
    for rest in dict.fromkeys(group.setting.partition(", ")[2] for group in blocks.GPU_GROUPS)
}
#: What is less than a part, or runs only where it is named.
SMALLER: dict[str, Callable[[Settings, Journal, list[Row], Deadline], None]] = {
    **ONE_SETTING,
    **ONE_RECIPE,
    "rare_bytes": rare_bytes_part,
}


check_models = real.check_recipes


def check_parts(names: Sequence[str]) -> None:
    """ValueError for a name that is no part."""
    unknown = [name for name in names if name not in PARTS and name not in SMALLER]
    if unknown:
        raise ValueError(
            f"unknown part {unknown[0]!r} of {EXPERIMENT}; the parts are {', '.join(PARTS)}, paired:RECIPE for one of "
            f"{', '.join(RECIPES)}, long:RECIPE for one of {', '.join(LONG_RECIPES)}, rare_bytes, and {'; '.join(ONE_SETTING)}"
        )
