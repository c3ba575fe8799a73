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
measured whole or not at all (`experiments.fp8_training.speed.wholes`), so that the sides of a ratio are of one run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from experiments.fp8_training.deadline import Deadline
from experiments.fp8_training.speed import blocks, fsdp, grid, grid_eager, linear
from experiments.fp8_training.speed.wholes import Found, Part, Whole, measure_wholes, measured_whole
from experiments.fp8_training.training import convergence, planted
from experiments.fp8_training.training.plans import LONG, LONG_RECIPES, PAIRED, PLANS, RECIPES, SWEEP
from experiments.harness.libraries import seed_and_libraries
from experiments.harness.rows import NOT_RUN, Journal, Row
from experiments.runs.settings import Settings, published_shapes

EXPERIMENT = "fp8_training"
TITLE = "Low-precision training: speed and convergence"


def subject(settings: Settings) -> str:
    """What a journal can be resumed for: the corpus, the seed, and the libraries that compile or are compared."""
    return f"{settings.corpus.name}-{seed_and_libraries(settings.seed)}"


def run(settings: Settings, journal: Journal | None = None) -> list[Row]:
    """Rows of all parts, or of those that `settings.only` names; rows in the journal are not measured again."""
    journal = journal if journal is not None else Journal()
    deadline, failed = Deadline(settings.seconds), list[Row]()
    for name, part in {**PARTS, **SMALLER}.items():
        if name in (settings.only or PARTS):
            part(settings, journal, failed, deadline)
    if settings.seconds is not None:
        # What another run measured stays as it is where this one did not come to it.
        failed = [row for row in failed if not row.metric.startswith(NOT_RUN)]
    return journal.rows + failed


def linear_part(settings: Settings, journal: Journal, failed: list[Row], deadline: Deadline) -> None:
    """Single layers, shape by shape."""
    shapes = linear.SHAPES if published_shapes(settings) else linear.STAND_INS
    bench = cache(partial(linear.Bench.of, settings.device, settings.seed, deadline))
    methods = [
        (linear.EAGER, linear.label(one), one.missing()) for one in linear.all_methods(settings.device)
    ]

    def whole(shape: linear.Shape) -> Whole:
        name = linear.data_of(shape)
        return Whole(linear.KIND, name, name, (Part.of(methods, lambda: linear.measure(bench(), shape)),))

    measure_wholes("linear layers", map(whole, shapes), settings, journal, failed, deadline)


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
    wholes = [
        Whole(blocks.KIND, data, f"{data}, {rest}", tuple(part_of(group, bench) for group in pair))
        for (data, rest), pair in pairs.items()
        if only in ("", rest)
    ]
    measure_wholes("decoder layers", wholes, settings, journal, failed, deadline)


def part_of(group: blocks.Group, bench: Callable[[], blocks.Bench]) -> Part:
    """A group of decoder layers."""

    def measure() -> Found:
        found = blocks.measure(bench(), group)
        return {(group.setting, method.name): values for method, values in found.items()}

    return Part.of([(group.setting, one.name, one.missing()) for one in group.methods], measure)


def fsdp_part(settings: Settings, journal: Journal, failed: list[Row], deadline: Deadline) -> None:
    """Decoder layers on two ranks."""
    case = fsdp.CASES["cuda" if published_shapes(settings) else "cpu"]
    methods = [(case.setting, side.name, case.missing()) for side in fsdp.SIDES]
    part = Part.of(methods, lambda: fsdp.measure(case, settings.seed))
    wholes = [Whole(fsdp.KIND, case.shape.name, case.setting, (part,))]
    measure_wholes("two ranks", wholes, settings, journal, failed, deadline)


def grid_part(settings: Settings, journal: Journal, failed: list[Row], deadline: Deadline) -> None:
    """The grid, cell by cell."""
    cells = grid.CELLS if published_shapes(settings) else grid.STAND_INS
    wholes = [cell_whole(settings, grid.KIND, cell, grid.measure) for cell in cells]
    measure_wholes("grid", wholes, settings, journal, failed, deadline)


def grid_eager_part(settings: Settings, journal: Journal, failed: list[Row], deadline: Deadline) -> None:
    """The smaller cells tuned for eager mode; on a CPU there are no launches, and `grid` says all."""
    cells = grid_eager.CELLS if published_shapes(settings) else ()
    wholes = [cell_whole(settings, grid_eager.KIND, cell, grid_eager.measure) for cell in cells]
    measure_wholes("grid, eager", wholes, settings, journal, failed, deadline)


def cell_whole(
    settings: Settings, kind: str, cell: grid.Cell, measure: Callable[[str, int, grid.Cell], Any]
) -> Whole:
    """A cell of the grid."""
    setting = grid.setting_of(cell)

    def found() -> Found:
        values = measure(settings.device, settings.seed, cell)
        return {(setting, method.name): one for method, one in values.items()}

    part = Part.of([(setting, method.name, method.missing()) for method in grid.SIDES], found)
    return Whole(kind, grid.MODULE, setting, (part,))


def faults_part(settings: Settings, journal: Journal, failed: list[Row], deadline: Deadline) -> None:
    """Trainings with planted faults."""
    planted.run(settings, journal, PLANS[settings.scale], deadline)


def trained_part(*kinds: str) -> Callable[[Settings, Journal, list[Row], Deadline], None]:
    """Trainings of some kinds."""

    def part(settings: Settings, journal: Journal, failed: list[Row], deadline: Deadline) -> None:
        convergence.run(settings, journal, PLANS[settings.scale], kinds, deadline)

    return part


#: By the names that `--only` takes, in the order in which they are measured.
PARTS: dict[str, Callable[[Settings, Journal, list[Row], Deadline], None]] = {
    linear.KIND: linear_part,
    blocks.KIND: blocks_part,
    fsdp.KIND: fsdp_part,
    grid.KIND: grid_part,
    grid_eager.KIND: grid_eager_part,
    planted.KIND: faults_part,
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
#: What is less than a part.
SMALLER: dict[str, Callable[[Settings, Journal, list[Row], Deadline], None]] = {**ONE_SETTING, **ONE_RECIPE}


def check_parts(names: Sequence[str]) -> None:
    """ValueError for a name that is no part."""
    unknown = [name for name in names if name not in PARTS and name not in SMALLER]
    if unknown:
        raise ValueError(
            f"unknown part {unknown[0]!r} of {EXPERIMENT}; the parts are {', '.join(PARTS)}, paired:RECIPE for one of "
            f"{', '.join(RECIPES)}, long:RECIPE for one of {', '.join(LONG_RECIPES)}, and {'; '.join(ONE_SETTING)}"
        )


__all__ = [
    "EXPERIMENT",
    "PARTS",
    "TITLE",
    "check_parts",
    "measured_whole",
    "run",
    "subject",
]
