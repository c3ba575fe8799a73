"""Experiment `generate`: transformers' `generate()` on shapes of Llama-3.1-8B, as users call it.

Random weights; 8 layers, and all 32 where it says most. Parts, by the names of `--only`: "eager" (a token's time at batch 1,
16 and 64, not compiled), "prefill" (a prompt of 2048 tokens) and "decode" (a token's time, compiled as transformers does by
itself). At quick scale, and without a GPU: a tiny stand-in. A run that has a limit of seconds starts no table after it and
publishes what it has; the same call goes on from there.
"""

from __future__ import annotations

from collections.abc import Mapping

from experiments.fp8_training.deadline import Deadline
from experiments.generate.methods import TORCHAO, TRANSFORMERS
from experiments.generate.tables import DECODE, EAGER_DECODE, KIND, PREFILL, Table, stand_ins, tables_of
from experiments.generate.times import Bench
from experiments.harness.libraries import seed_and_libraries, version_of
from experiments.harness.outcome import Values, keep, status
from experiments.harness.progress import bar
from experiments.harness.rows import NOT_RUN, Journal, Row, table_name
from experiments.runs.settings import Settings, published_shapes

EXPERIMENT = "generate"
TITLE = "transformers' generate() with quantized weights"
PARTS = (EAGER_DECODE, PREFILL, DECODE)
OK = "status: ok"


def subject(settings: Settings) -> str:
    """What a journal can be resumed for: the seed, and the libraries that compile, generate or are compared."""
    return f"{seed_and_libraries(settings.seed)}-{TRANSFORMERS}{version_of(TRANSFORMERS)}"


def measured_whole(row: Row) -> tuple[str, str]:
    """What a row is measured together with."""
    return row.table, row.setting


def run(settings: Settings, journal: Journal | None = None) -> list[Row]:
    """Rows of all parts, or of those that `settings.only` names; rows in the journal are not measured again."""
    journal = journal if journal is not None else Journal()
    deadline, failed, bench = Deadline(settings.seconds), list[Row](), Bench(settings.seed)
    tables = (tables_of if published_shapes(settings) else stand_ins)(settings.only or PARTS, settings.device)
    todo = [table for table in tables if not is_whole(settings, journal, table)]
    with bar("generate()", len(todo)) as step:
        for table in todo:
            add(settings, journal, failed, table, values_of(table, bench, deadline))
            step(f"{table.stage.data}, {table.setting}")
    if settings.seconds is not None:
        # What another run measured stays as it is where this one did not come to it.
        failed = [row for row in failed if not row.metric.startswith(NOT_RUN)]
    return journal.rows + failed


def values_of(table: Table, bench: Bench, deadline: Deadline) -> dict[str, Values]:
    """Values of each method, or the reason why there are none."""
    reasons = {one.name: deadline.reason(table.needed) or one.missing for one in table.methods}
    here = [one for one in table.methods if reasons[one.name] is None]
    found = bench.measure(Table(**{**vars(table), "methods": tuple(here)})) if here else {}
    return {name: status(reason) if reason else found[name] for name, reason in reasons.items()}


def is_whole(settings: Settings, journal: Journal, table: Table) -> bool:
    """Whether nothing is missing that can be measured here; what torchao refused is not asked for again."""
    own = [one for one in table.methods if one.library != TORCHAO and one.missing is None]
    where = table_name(KIND, settings.scale, table.stage.data), table.setting
    return bool(own) and all(journal.finished(*where, one.name) for one in own)


def add(
    settings: Settings, journal: Journal, failed: list[Row], table: Table, found: Mapping[str, Values]
) -> None:
    """Rows of a table in the place of older ones, where something was measured."""
    where = (EXPERIMENT, KIND, table.stage.data, table.setting)
    if any(OK in values for values in found.values()):
        name = table_name(KIND, settings.scale, table.stage.data)
        journal.drop([row for row in journal.rows if (row.table, row.setting) == (name, table.setting)])
    for method, values in found.items():
        keep(journal, failed, settings.rows(*where, method, values))


def check_parts(names: tuple[str, ...]) -> None:
    """ValueError for a name that is no part."""
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise ValueError(f"unknown part {unknown[0]!r} of {EXPERIMENT}; the parts are {', '.join(PARTS)}")


__all__ = ["EXPERIMENT", "PARTS", "TITLE", "check_parts", "measured_whole", "run", "subject"]
