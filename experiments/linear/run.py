"""Experiment `linear`: layers of Llama-3.1-8B's shapes over rows of inputs, each as `ao_lab.quantize_` makes it.

Parts, each a kind of table: "weights" (weights alone are quantized), "activations" (inputs too, in every call), "experts"
(weights of experts, rows sorted by expert, two a token) and "torchao" (its layers and ours of the same weights and inputs). A
table has one shape and one number of rows; bfloat16 stands in each.
Outputs are checked against the product of what is stored before anything is timed. Layers follow their rules: nothing is tuned.

At quick scale, and without a GPU: errors of outputs and what computes them, of small shapes. A run that has a limit of seconds
starts no table after it and publishes what it has; the same call goes on from there.

Times of a table's layers on a GPU: CUDA graphs in turn, over layers and inputs that exceed the L2 cache, and the host's.

bfloat16 comes first in every round and once more last. Many rows keep a GPU near its power limit: there every method is timed
after calls of its own (`experiments.harness.bench`). torchao's are compiled with torch.compile's defaults and
static shapes, each anew, as one function whose argument is the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.nn import functional

from ao_lab.measure.turns import Call, CudaWatch, Plan, Span, Watch, interleaved, prepare, summary
from experiments.harness.bench import Rates, host_times, measure_rates, repeated, steady
from experiments.harness.cuda_graph import launched
from experiments.harness.measuring import Deadline, Values, attempt, free, kernel
from experiments.harness.registry import check_known
from experiments.harness.revision import seed_and_libraries
from experiments.harness.rows import Journal, Row
from experiments.linear.tables import (
    BASE,
    EXPERIMENT,
    PARTS,
    TORCHAO,
    Layers,
    Method,
    Table,
    checked,
    kernel_of,
    run_tables,
    stand_ins,
    stored_bytes,
    tables_of,
)
from experiments.runs.run import all_rows, published_shapes
from experiments.runs.settings import Settings


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
        return bench().measure(table) if timed else measure_outputs(table)

    tables = (tables_of if timed else stand_ins)(parts, settings.device, settings.seed)
    run_tables(tables, measure, settings, journal, failed, deadline)
    return all_rows(settings, journal, failed)


def bench_here() -> Bench:
    """This GPU and its rates."""
    watch = CudaWatch()
    return Bench(watch, measure_rates(watch))


check_parts = partial(check_known, EXPERIMENT, PARTS)


TIME, SPEED, FLOOR, HOST = "time", "speed over bfloat16", "fraction of the floor", "host time"
PLAN = Plan(rounds=20, warmup=1, seconds=0.8, fewest=5, span=300e-6)
#: From so many rows on a method is timed after so many seconds of its own calls.
MANY, SETTLE = 1024, 0.02
SETTLED = Plan(rounds=5, warmup=0, seconds=4.0, fewest=3, span=2e-3)
#: Rows at which the host's time for a call is measured, without graphs; batches, and calls in each.
HOST_ROWS, BATCHES, BATCH = (1, 16), 8, 50
#: Elements of inputs and weights that Hopper multiplies at the rate of 8 bits, where their scales are float32.
FAST = ("int8", "int4", "float8_e4m3fn")
US = 1e6


@dataclass(frozen=True)
class Bench:
    """What times, and the rates of this device, which floors are made of; None: no floors."""

    watch: Watch
    rates: Rates | None = None

    @torch.no_grad()
    def measure(self, table: Table) -> dict[str, Values]:
        """Values of each method; one that fails has a status instead."""
        found, spans, hosts = dict[str, Values](), dict[str, Span](), dict[str, Call]()
        for method in table.methods:
            found[method.name] = attempt(partial(self.prepared, table, method, spans, hosts))
        if spans:
            self.add_times(table, self.in_turn(table, spans), found)
            self.add_host_times(table, {name: call for name, call in hosts.items() if name in spans}, found)
        spans.clear()
        hosts.clear()
        free()
        return found

    def prepared(
        self, table: Table, method: Method, spans: dict[str, Span], hosts: dict[str, Call]
    ) -> Values:
        """Check the first layer's outputs, then capture calls of all."""
        layers = table.layers.of(method, table.rows)
        inputs = table.layers.inputs(table.rows, len(layers))
        run = runner(method)
        calls = [partial(run, layer, x) for layer, x in zip(layers, inputs, strict=True)]
        dense = table.layers.of(BASE, table.rows)[0].weight
        values: Values = {ERROR: (checked(method, layers[0], calls[0](), inputs[0], dense), "ratio")}
        spans[method.name] = prepare(self.watch, calls, SETTLED if table.rows >= MANY else PLAN)
        names = [kernel_of(method, layers[0], table.rows), launched(calls[0])]
        values |= kernel(": ".join(filter(None, names)))
        if method.library != TORCHAO:
            hosts[method.name] = calls[0]
        return values

    def in_turn(self, table: Table, spans: dict[str, Span]) -> dict[str, list[float]]:
        """Seconds a call of each, and of the first once more."""
        if table.rows < MANY:
            return interleaved(self.watch, spans, PLAN)
        return steady(self.watch, spans, SETTLED, SETTLE)

    def add_times(self, table: Table, times: dict[str, list[float]], found: dict[str, Values]) -> None:
        """Median, quantiles, speed over bfloat16, fraction of the floor."""
        base = summary(times[BASE.name]).median if BASE.name in times else None
        for method in table.methods:
            if method.name not in times:
                continue
            timing, values = summary(times[method.name]), found[method.name]
            values |= timing.values("us")
            if base is not None:
                values[SPEED] = (base / timing.median, "ratio")
            if self.rates is not None and method.library != TORCHAO:
                least = floor_seconds(table.layers, method, table.rows, self.rates)
                values[FLOOR] = (least / timing.median, "ratio")
        if base is not None:
            found[BASE.name] |= repeated(times, BASE.name)

    def add_host_times(self, table: Table, hosts: dict[str, Call], found: dict[str, Values]) -> None:
        """What the host spends on a call in eager mode, of few rows."""
        if table.rows in HOST_ROWS:
            times = host_times(hosts, self.watch.sync, batches=BATCHES, batch=BATCH)
            for name, seconds in times.items():
                found[name][HOST] = (seconds * US, "us")


def runner(method: Method) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """How a layer is called; what is compiled is compiled anew: programs of all methods are kept by the same code."""
    if not method.compiled:
        return lambda layer, x: layer(x)
    torch.compiler.reset()
    compiled = torch.compile(functional.linear, fullgraph=True, dynamic=False)
    return lambda layer, x: compiled(x, layer.weight)


def floor_seconds(layers: Layers, method: Method, rows: int, rates: Rates) -> float:
    """The least time: what rows need of the weight, inputs and outputs once at the copy rate, or all operations at the rate of
    the units that these elements need, whichever is more."""
    layer, (n, k) = layers.of(method, rows)[0], layers.shape
    moved = layers.share_read(rows) * stored_bytes(layer) + 2.0 * rows * (n + k)
    return max(moved / rates.copy, 2.0 * rows * n * k / rate_of(layer.weight, rates))


def rate_of(weight: Any, rates: Rates) -> float:
    """Operations a second: of 8-bit units where inputs and weights have integers or float8 with float32 scales."""
    recipe = getattr(weight, "recipe", None)
    schemes: Sequence[Any] = () if recipe is None else (recipe.activation, recipe.weight)
    is_fast = bool(schemes) and all(
        one is not None and one.element in FAST and one.scale.storage == "float32" for one in schemes
    )
    return rates.float8 if is_fast else rates.bfloat16


# Outputs of layers on any device: their errors, and what computes them. No times: a CPU's are in experiment `speed`.

#: The metric of the error.
ERROR = "relative error"


def measure_outputs(table: Table) -> dict[str, Values]:
    """Values of each method; one that fails has a status instead."""
    return {method.name: attempt(partial(outputs, table, method)) for method in table.methods}


def outputs(table: Table, method: Method) -> Values:
    """Of the first layer and input; `Wrong` for an output that is not the product of what is stored."""
    (layer, *_), (x, *_) = table.layers.of(method, table.rows), table.layers.inputs(table.rows, 1)
    dense = table.layers.of(BASE, table.rows)[0].weight
    error = checked(method, layer, layer(x), x, dense)
    return {ERROR: (error, "ratio"), **kernel(kernel_of(method, layer, table.rows))}
