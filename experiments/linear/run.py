"""Experiment `linear`: layers of Llama-3.1-8B's shapes over rows of inputs, each as `ao_lab.quantize_` makes it.

Parts, each a kind of table: "weights" (weights alone are quantized), "activations" (inputs too, in every call), "experts"
(weights of experts, rows sorted by expert, two a token) and "torchao" (its layers and ours of the same weights and inputs). A
table has one shape and one number of rows; bfloat16 stands in each.
Outputs are checked against the product of what is stored before anything is timed. Layers follow their rules: nothing is tuned.

At quick scale, and without a GPU: errors of outputs and what computes them, of small shapes. A run that has a limit of seconds
starts no table after it and publishes what it has; the same call goes on from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from experiments.fp8_training.deadline import Deadline
from experiments.fp8_training.speed.floor import measure_rates
from experiments.harness.libraries import seed_and_libraries
from experiments.harness.outcome import Values
from experiments.harness.rows import NOT_RUN, Journal, Row
from experiments.harness.timing import CudaWatch
from experiments.linear import outputs
from experiments.linear.methods import PARTS
from experiments.linear.tables import EXPERIMENT, Table, run_tables, stand_ins, tables_of
from experiments.linear.times import Bench
from experiments.runs.settings import Settings, published_shapes

TITLE = "Quantized linear layers over rows of inputs"


def subject(settings: Settings) -> str:
    """What a journal can be resumed for: the seed, and the libraries that compile or are compared."""
    return seed_and_libraries(settings.seed)


def measured_whole(row: Row) -> tuple[str, str]:
    """What a row is measured together with: a part at one shape and number of rows."""
    return row.table, row.setting


def run(settings: Settings, journal: Journal | None = None) -> list[Row]:
    """Rows of all parts, or of those that `settings.only` names; rows in the journal are not measured again."""
    journal = journal if journal is not None else Journal()
    deadline, failed = Deadline(settings.seconds), list[Row]()
    timed, bench, parts = published_shapes(settings), cache(bench_here), settings.only or tuple(PARTS)

    def measure(table: Table) -> dict[str, Values]:
        return bench().measure(table) if timed else outputs.measure(table)

    tables = (tables_of if timed else stand_ins)(parts, settings.device, settings.seed)
    run_tables(tables, measure, settings, journal, failed, deadline)
    if settings.seconds is not None:
        # What another run measured stays as it is where this one did not come to it.
        failed = [row for row in failed if not row.metric.startswith(NOT_RUN)]
    return journal.rows + failed


def bench_here() -> Bench:
    """This GPU and its rates."""
    watch = CudaWatch()
    return Bench(watch, measure_rates(watch))


def check_parts(names: Sequence[str]) -> None:
    """ValueError for a name that is no part."""
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise ValueError(f"unknown part {unknown[0]!r} of {EXPERIMENT}; the parts are {', '.join(PARTS)}")


__all__ = ["EXPERIMENT", "TITLE", "check_parts", "measured_whole", "run", "subject"]
