"""The page of experiment `qat_overhead`: time and memory of training over plain training, beside bars and published ones."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.harness.rows import Row
from experiments.models.llama_shapes import (
    LLAMA_3_2_3B,
    LLAMA_3_8B_TWO_LAYERS,
    TINY_ONE_LAYER,
    TINY_TWO_LAYERS,
)
from experiments.qat_overhead.run import KIND, TITLE
from experiments.qat_overhead.targets import MEMORY, TARGETS, TIME, missed, overheads
from experiments.qat_overhead.variants import OURS
from experiments.report.pages import Drawing, Section, Table
from experiments.report.plots import dots
from experiments.report.results import Results, Where, by_run, number

__all__ = ["TITLE", "sections"]

#: What runs are called, by their data.
NAMES = {
    LLAMA_3_8B_TWO_LAYERS.name: "Two blocks of Llama-3-8B",
    LLAMA_3_2_3B.name: "Llama-3.2-3B",
    TINY_TWO_LAYERS.name: "Two tiny blocks, a stand-in",
    TINY_ONE_LAYER.name: "A tiny model, a stand-in",
}
STEP = (
    "A step is forward and backward in bfloat16, without optimizer, without recomputation of activations. Random weights, two "
    "texts of 4096 tokens. All arms run in turn in one process, plain training first and last in each round; each takes two "
    "steps before the one that is timed, since a GPU at its power limit runs faster after a step that was easy on it. Time is "
    "the median over rounds with the 20% and 80% quantiles, and 'again' is what the two timings of plain training differ by. "
    "Compiled models are compiled block by block.",
    "Peak memory is the most that was allocated in a step, weights, gradients and batch of the model included, those of other "
    "arms not. Kept for backward are all tensors that autograd holds between forward and backward, each once, without weights "
    "and batch.",
    "Rounding operands is work that plain training does not have. 'At the copy rate' is what its bytes take at 4.2 TB/s if "
    "nothing is kept for backward that plain training does not keep: each operand of each linear layer is read and written "
    "in forward and again in backward. No training that rounds the operands of each layer on its own, and keeps nothing, "
    "costs less.",
)
BLOCKS = (
    f"**Bars of ours**: {TARGETS[TIME]:.0f}% time and {TARGETS[MEMORY]:.0f}% peak memory over plain training, both recipes, "
    "eager and compiled; with adapters beside frozen quantized weights (rank 16, nothing else trained) neither more time nor "
    "more memory than plain training of everything.",
)
WHOLE = (
    "28 layers, a vocabulary of 128256 tied to the output layer, loss of the next token. The linear layers of the blocks are "
    "quantized; embedding and output layer are not.",
)
STAND_IN = (
    "**A stand-in**: sizes too small for times to mean anything, on a processor where rounding runs the reference. It went the "
    "way that the real shapes go on a GPU, with all checks, so these rows say what works here. Bytes kept for backward are "
    "exact, and mean something: ours keeps what plain training keeps.",
)
BESIDE = (
    "Published costs of quantization-aware training are of whole runs of fine-tuning, optimizer, data and (where stated) "
    "recomputation of activations included, on other hardware, at other batches; the share of the optimizer makes their "
    "percents smaller than those of a step alone. Time is what follows from published tokens a second.",
)
METRICS = (
    ("time", 2),
    ("time, 20%", 2),
    ("time, 80%", 2),
    ("tokens/s", 0),
    (TIME, 1),
    ("time to round at the copy rate", 2),
    ("peak memory", 3),
    (MEMORY, 1),
    ("kept for backward", 1),
    ("kept for backward over plain", 1),
    ("change of the result", 4),
    ("first step", 1),
)
COLUMNS = (
    "training",
    "as",
    "ms",
    "20%",
    "80%",
    "tokens/s",
    "time over plain (%)",
    "rounding at the copy rate (ms)",
    "peak (GB)",
    "over plain (%)",
    "kept (MB)",
    "over plain (%)",
    "change of the result",
    "first step (s)",
    "state",
)
STATUS = "status: "


def sections(rows: Sequence[Row]) -> list[Section]:
    """One section per run."""
    return [section(where, results) for where, results in by_run(rows, KIND).items()]


def section(where: Where, results: Results) -> Section:
    """One model."""
    exact = where.data in (LLAMA_3_8B_TWO_LAYERS.name, LLAMA_3_2_3B.name)
    own = {LLAMA_3_8B_TWO_LAYERS.name: BLOCKS, LLAMA_3_2_3B.name: WHOLE}.get(where.data, STAND_IN)
    paragraphs = [*failures(results), *own, *(STEP if exact else ()), *again(results)]
    tables = [table(results)]
    drawings = []
    if exact:
        drawings.append(plot(where, results))
    if where.data == LLAMA_3_8B_TWO_LAYERS.name:
        paragraphs = [*verdict(results), *paragraphs]
    if where.data == LLAMA_3_2_3B.name:
        paragraphs += BESIDE
        tables.append(published_table())
    return Section(f"{NAMES.get(where.data, where.data)} ({where})", paragraphs, drawings, tables)


def lines_of(results: Results) -> list[tuple[str, str]]:
    """(setting, method) in the order in which they were measured."""
    return list(dict.fromkeys((row.setting, row.method) for row in results.rows))


def state(results: Results, setting: str, method: str) -> str:
    """ok, or what went wrong."""
    found = (row.metric for row in results.rows if (row.setting, row.method) == (setting, method))
    return next((metric.removeprefix(STATUS) for metric in found if metric.startswith(STATUS)), "")


def failures(results: Results) -> list[str]:
    """What gave no numbers, and why."""
    states = {one: state(results, *one) for one in lines_of(results)}
    failed = [f"{method}, {setting} ({word})" for (setting, method), word in states.items() if word != "ok"]
    return [f"**Without numbers: {len(failed)}.** " + "; ".join(failed) + "."] if failed else []


def verdict(results: Results) -> list[str]:
    """Which bars are missed, or that none is among those that were measured."""
    late = missed(results)
    if late:
        return [f"**Missed bars: {len(late)}.** " + "; ".join(late) + "."]
    measured = [row for row in results.rows if row.method.startswith(OURS) and row.metric in TARGETS]
    return [f"All {len(measured)} figures that have a bar keep it."] if measured else []


def again(results: Results) -> list[str]:
    """What two timings of plain training differ by."""
    found = [row for row in results.rows if row.metric == "time again over plain"]
    words = ", ".join(f"{row.setting} {row.value:+.2f}%" for row in found)
    return [f"Plain training again, over itself: {words}."] if words else []


def table(results: Results) -> Table:
    """A line per arm."""
    made = []
    for setting, method in lines_of(results):
        cells = [number(results.value(setting, method, metric), digits) for metric, digits in METRICS]
        made.append([method, setting, *cells, state(results, setting, method)])
    return Table("Time and memory of a step", COLUMNS, made, results.stale_methods)


def published_table() -> Table:
    """Published overheads, on whatever they were measured."""
    lines = [
        [method, model, hardware, number(time, 1), number(memory, 1), source]
        for model, hardware, source, method, time, memory in overheads()
    ]
    columns = ["training", "model", "on", "time over plain (%)", "memory over plain (%)", "source"]
    return Table("Published, for comparison", columns, lines)


def plot(where: Where, results: Results) -> Drawing:
    """Overheads of every arm."""
    lines = [one for one in lines_of(results) if results.value(*one, "bytes to round") is not None]
    series = {
        name: [results.value(setting, method, metric) for setting, method in lines]
        for name, metric in (("time", TIME), ("peak memory", MEMORY))
    }
    figure = dots(
        [f"{method}, {setting}" for setting, method in lines], series, "percent over plain training"
    )
    return Drawing(f"qat-overhead-{where.data}", "Time and peak memory over plain training.", figure)
