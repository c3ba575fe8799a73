"""Experiment `fp8_training`: low-precision training, measured beside bfloat16, torchao and the tables that others published.

Parts, each a kind of table: "linear" (one layer, forward and backward), "grid" (LayerNorm, linear, sigmoid; 36 by 6 shapes),
"blocks" (decoder layers of published models), trainings ("paired", "curves", "gaps", "sweep", "long") and "faults". Published
values (`experiments/published/fp8_training.csv` and `fp8_rowwise_grid.csv`) stand beside measured ones of the same shape and
recipe alone. Stand-in: on a CPU recipes are emulated, shapes and models are tiny; their times say nothing, their losses and
errors are those of the recipes.

A run that has a limit of seconds starts nothing after it and publishes what it has; the same call goes on from there, and so
does one on another machine with the same kind of device from what was published.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from experiments.fp8_training.deadline import Deadline
from experiments.fp8_training.methods import BASELINE, Method
from experiments.fp8_training.speed import blocks, grid, linear
from experiments.fp8_training.training import convergence, planted
from experiments.fp8_training.training.plans import LONG, PAIRED, PLANS, SWEEP
from experiments.harness.libraries import seed_and_libraries
from experiments.harness.outcome import Values, keep
from experiments.harness.progress import bar
from experiments.harness.rows import NOT_RUN, Journal, Row, table_name
from experiments.runs.settings import Settings, published_shapes

EXPERIMENT = "fp8_training"
TITLE = "Low-precision training: speed and convergence"
CODE = f"experiments.{EXPERIMENT}"
#: Parts are measured by several machines in turn: a partial run takes published rows as measured (`experiments.runs.resume`).
GOES_ON = True


def subject(settings: Settings) -> str:
    """What a journal can be resumed for: the corpus, the seed, and the libraries that compile or are compared."""
    return f"{settings.corpus.name}-{seed_and_libraries(settings.seed)}"


def sources(kind: str, setting: str, method: str) -> tuple[str, ...]:
    """What a row's measurement starts from."""
    trained = (f"{CODE}.training.convergence.measure", f"{CODE}.training.plans.Plan")
    known = {
        linear.KIND: (f"{CODE}.speed.linear.measure",),
        grid.KIND: (f"{CODE}.speed.grid.measure",),
        blocks.KIND: (f"{CODE}.speed.blocks.measure", f"{CODE}.speed.blocks.GPU_GROUPS"),
        planted.KIND: (f"{CODE}.training.planted.measure", f"{CODE}.training.plans.Plan"),
        convergence.GAPS: (f"{CODE}.training.convergence.gap_rows", *trained),
    }
    return known.get(kind, trained)


def about(settings: Settings) -> dict[str, object]:
    """What the record of a run says beside machine and libraries."""
    corpus = settings.corpus
    return {
        "corpus": {"name": corpus.name, "sha256": corpus.sha256, "files": len(corpus.documents)},
        "model": {"trainings": [asdict(one) for one in PLANS[settings.scale].trials()]},
    }


def run(settings: Settings, journal: Journal | None = None) -> list[Row]:
    """Rows of all parts, or of those that `settings.only` names; rows in the journal are not measured again."""
    journal = journal if journal is not None else Journal()
    deadline, failed = Deadline(settings.seconds), []
    for name, part in PARTS.items():
        if not settings.only or name in settings.only:
            part(settings, journal, failed, deadline)
    if settings.seconds is not None:
        # What another run measured stays as it is where this one did not come to it.
        failed = [row for row in failed if not row.metric.startswith(NOT_RUN)]
    return journal.rows + failed


def linear_part(settings: Settings, journal: Journal, failed: list[Row], deadline: Deadline) -> None:
    """Single layers, shape by shape; bfloat16 is measured again wherever a method is missing."""
    shapes = linear.SHAPES if published_shapes(settings) else linear.STAND_INS
    missing = {shape: unmeasured(settings, journal, shape) for shape in shapes}
    if not any(missing.values()) or deadline.reason() is not None:
        return
    bench = linear.Bench.of(settings.device, settings.seed, deadline)
    with bar("linear layers", len(shapes)) as step:
        for shape, methods in missing.items():
            if methods and deadline.reason() is None:
                every = linear.all_methods(settings.device)
                found = linear.measure(bench, shape, with_base(methods, every))
                names = {linear.label(one) for one in methods}
                wanted = {key: values for key, values in found.items() if key[1] in names}
                add(settings, journal, failed, linear.KIND, linear.data_of(shape), wanted)
            step(linear.data_of(shape))


def unmeasured(settings: Settings, journal: Journal, shape: linear.Shape) -> list[Method]:
    """Methods of a shape without rows."""
    table = table_name(linear.KIND, settings.scale, linear.data_of(shape))
    every = linear.all_methods(settings.device)
    return [one for one in every if not journal.finished(table, linear.EAGER, linear.label(one))]


def grid_part(settings: Settings, journal: Journal, failed: list[Row], deadline: Deadline) -> None:
    """The grid, cell by cell."""
    cells = grid.CELLS if published_shapes(settings) else grid.STAND_INS
    table = table_name(grid.KIND, settings.scale, grid.MODULE)
    missing = [one for one in cells if not journal.finished(table, grid.setting_of(one), grid.TUNED.name)]
    with bar("grid", len(missing)) as step:
        for cell in missing:
            if deadline.reason() is None:
                found = grid.measure(settings.device, settings.seed, cell)
                named = {(grid.setting_of(cell), method.name): values for method, values in found.items()}
                add(settings, journal, failed, grid.KIND, grid.MODULE, named)
            step(grid.setting_of(cell))


def blocks_part(settings: Settings, journal: Journal, failed: list[Row], deadline: Deadline) -> None:
    """Decoder layers, group by group; bfloat16 is measured again wherever a method is missing."""
    groups = blocks.GPU_GROUPS if published_shapes(settings) else blocks.TINY_GROUPS
    bench = blocks.Bench.of(settings.device, settings.seed, deadline)
    with bar("decoder layers", len(groups)) as step:
        for group in groups:
            table = table_name(blocks.KIND, settings.scale, group.shape.name)
            missing = [one for one in group.methods if not journal.finished(table, group.setting, one.name)]
            if missing and deadline.reason() is None:
                found = blocks.measure(bench, group, with_base(missing, group.methods))
                named = {(group.setting, one.name): values for one, values in found.items() if one in missing}
                add(settings, journal, failed, blocks.KIND, group.shape.name, named)
            step(f"{group.shape.name}, {group.setting}")


def with_base(missing: Sequence[Method], all_of_them: Sequence[Method]) -> list[Method]:
    """bfloat16 first, then what is missing."""
    return [one for one in all_of_them if one in missing or one.name == BASELINE]


def faults_part(settings: Settings, journal: Journal, failed: list[Row], deadline: Deadline) -> None:
    """Trainings with planted faults."""
    planted.run(settings, journal, PLANS[settings.scale], deadline)


def trained_part(*kinds: str) -> Callable[[Settings, Journal, list[Row], Deadline], None]:
    """Trainings of some kinds."""

    def part(settings: Settings, journal: Journal, failed: list[Row], deadline: Deadline) -> None:
        convergence.run(settings, journal, PLANS[settings.scale], kinds, deadline)

    return part


def add(
    settings: Settings, journal: Journal, failed: list[Row], kind: str, data: str,
    found: dict[tuple[str, str], Values],
) -> None:  # fmt: skip
    """Rows of (setting, method) with their values: of what went well into the journal."""
    for (setting, method), values in found.items():
        where = (EXPERIMENT, kind, data, setting, method)
        rows = [settings.row(*where, metric, value, unit) for metric, (value, unit) in values.items()]
        keep(journal, failed, rows)


#: By the names that `--only` takes, in the order in which they are measured.
PARTS: dict[str, Callable[[Settings, Journal, list[Row], Deadline], None]] = {
    linear.KIND: linear_part,
    blocks.KIND: blocks_part,
    grid.KIND: grid_part,
    planted.KIND: faults_part,
    SWEEP: trained_part(SWEEP),
    PAIRED: trained_part(PAIRED),
    LONG: trained_part(LONG),
}


def check_parts(names: Sequence[str]) -> None:
    """ValueError for a name that is no part."""
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise ValueError(f"unknown part {unknown[0]!r} of {EXPERIMENT}; the parts are {', '.join(PARTS)}")


__all__ = ["EXPERIMENT", "PARTS", "TITLE", "about", "check_parts", "run", "sources", "subject"]
