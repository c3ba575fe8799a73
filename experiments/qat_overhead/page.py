"""The page of experiment `qat_overhead`: time and memory of training over plain training, with targets and published values.

Published numbers are of whole fine-tuning runs, optimizer included, on other hardware: only their ratios stand beside ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from experiments.harness.rows import Row
from experiments.models.llama import LLAMA_3_2_3B, LLAMA_3_8B_TWO_LAYERS, TINY_ONE_LAYER, TINY_TWO_LAYERS
from experiments.qat_overhead.run import EXPERIMENT, KIND
from experiments.qat_overhead.step import COPY_RATE, INT8_INT4, OURS
from experiments.report import targets
from experiments.report.content import Comparison, Drawing, Headline, Section, Table
from experiments.report.phones import dots_twice
from experiments.report.results import (
    FOLDER,
    Published,
    Results,
    Where,
    best_run,
    by_run,
    failures,
    lines_of,
    number,
    read,
    state,
)
from experiments.report.targets import RunTargets, Target, known, limit_of, percent_over, rest

PUBLISHED = FOLDER / "qat_overhead.csv"
TIME, MEMORY = "time over plain", "peak memory over plain"
#: Names in published tables: training without QAT, and the metrics that ratios are taken of; less throughput is more time.
WITHOUT_QAT, THROUGHPUT = "fine-tuning without QAT", "training_throughput"
PEAKS = ("training_peak_memory", "training_peak_reserved_memory")


def targets_of(results: Results) -> list[Target]:
    """The targets of all our variants that have rows."""
    found = dict.fromkeys((row.setting, row.method) for row in results.rows if row.method.startswith(OURS))
    return [
        limit_of(EXPERIMENT, method, metric).target(
            f"{method}, {setting}: {metric}",
            results.value(setting, method, metric),
            unit="%",
            value_format=".1f",
            limit_format=".0f",
            day=results.day(setting, method),
        )
        for setting, method in found
        for metric in (TIME, MEMORY)
    ]


def missed(results: Results) -> list[str]:
    """The targets that ours misses, each with value and limit."""
    return [str(target) for target in targets.missed(targets_of(results))]


@lru_cache(maxsize=1)
def published() -> tuple[Published, ...]:
    """Every published row about the cost of quantization-aware training."""
    return read(PUBLISHED)


def overheads() -> list[tuple[str, str, str, str, float | None, float | None]]:
    """(model, hardware, source, method, time over plain, memory over plain) in percent, of every published comparison."""
    values = {(one.model, one.hardware, one.source, one.method): {} for one in published()}
    for one in published():
        values[one.model, one.hardware, one.source, one.method][one.metric] = one.value
    found = []
    for (*run, method), metrics in values.items():
        if method == WITHOUT_QAT:
            continue
        plain = values[*run, WITHOUT_QAT]
        memory = next((percent_over(metrics[peak], plain[peak]) for peak in PEAKS if peak in metrics), None)
        found.append((*run, method, percent_over(plain[THROUGHPUT], metrics[THROUGHPUT]), memory))
    return found


TITLE = "Time and memory of quantization-aware training"
QUESTION = "How much time and memory does quantization-aware training add to training?"
ABOUT = (
    (
        "Time and peak memory of one training step (forward and backward in bfloat16, no optimizer) with fake "
        "quantization, over the same step without it in the same process: two blocks of Llama-3-8B, and the whole of "
        "Llama-3.2-3B, random weights."
    ),
    "torchao's QAT takes turns with ours. On a CPU tiny proxy models run the same code as a check.",
)
#: Figures that the top of the page shows: the first that there is.
FEATURED = (f"qat-overhead-{LLAMA_3_8B_TWO_LAYERS.name}",)
#: Published percentages over plain training that ours has too: (metric of the page, name).
RATIOS = {
    "training_throughput_change": (TIME, "throughput over plain training"),
    "training_peak_memory_change": (MEMORY, "peak memory over plain training"),
}
#: The published recipe that is ours of this name.
SAME_RECIPE = ("QAT 8da4w", f"{OURS}, {INT8_INT4}")

#: What runs are called, by their data.
NAMES = {
    LLAMA_3_8B_TWO_LAYERS.name: "Two blocks of Llama-3-8B",
    LLAMA_3_2_3B.name: "Llama-3.2-3B",
    TINY_TWO_LAYERS.name: "Two tiny blocks, a proxy model",
    TINY_ONE_LAYER.name: "A tiny proxy model",
}
STEP = (
    (
        "A step is forward and backward in bfloat16, without optimizer, without recomputation of activations. Random "
        "weights, two texts of 4096 tokens. All variants take turns in one process, bfloat16 without quantization first"
        " and last in each round; each takes two steps before the timed one, since a GPU at its power limit runs faster"
        " after an easy step. Time is the median over rounds with the 20% and 80% quantiles, and 'again' is the "
        "difference of the two timings of bfloat16. Compiled models are compiled block by block."
    ),
    "Peak memory is the most that was allocated in a step, weights, gradients and batch of the model included, those of other "
    "variants not. Saved for backward are all tensors that autograd holds between forward and backward, each once, without "
    "weights and batch.",
    "Rounding operands is work that training without quantization does not have. 'Bytes to round' is what it moves if nothing "
    "more is saved for backward: each operand of each linear layer is read and written in forward and again in backward. "
    f"A GB takes {1e12 / COPY_RATE:.2f} ms at the memory bandwidth of an H200, {COPY_RATE / 1e12:g} TB/s, which is assumed and "
    "not measured in these runs. No training that rounds the operands of each layer on its own, and saves nothing more, "
    "costs less, as long as it multiplies what it has rounded in bfloat16.",
    (
        "'Products of codes': the forward multiplies the quantized integers or 8-bit floats themselves, with the kernel"
        " of the converted layer and bitwise equal to it; gradients are those of QAT, with bfloat16 matmuls. 'Products "
        "by rowwise': operands are rounded as served, then cast as the recipe `rowwise` trains, all three matmuls in "
        "8-bit floats; output and gradients carry that cast too. Integers in groups of 32 have no such forward: a scale"
        " for each 32 addends costs more than a bfloat16 matmul."
    ),
)
BLOCKS = (
    f"**Targets of ours**: {limit_of(EXPERIMENT, OURS, TIME).bound:.0f}% time and "
    f"{limit_of(EXPERIMENT, OURS, MEMORY).bound:.0f}% peak memory over bfloat16 training, all recipes, "
    "eager and compiled; no more time where matmuls are faster than those of bfloat16; with LoRA adapters beside frozen "
    "quantized weights (rank 16, nothing else trained) neither more time nor more memory than training all "
    "weights in bfloat16.",
)
WHOLE = (
    "28 layers, a vocabulary of 128256 tied to the output layer, loss of the next token. The linear layers of the blocks are "
    "quantized; embedding and output layer are not.",
)
STAND_IN = (
    (
        "**A proxy model**: too small for times to mean anything, on a CPU where rounding uses the reference. It runs "
        "the same code as the real shapes on a GPU, with all checks. Bytes saved for backward are exact: ours saves "
        "what training without quantization saves."
    ),
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
    ("bytes to round", 2),
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
    "20% (ms)",
    "80% (ms)",
    "tokens/s",
    "time over bfloat16 training (%)",
    "bytes to round (GB)",
    "peak (GB)",
    "over bfloat16 training (%)",
    "saved for backward (MB)",
    "over bfloat16 training (%)",
    "change of the result",
    "first step (s)",
    "state",
)
STATUS = "status: "


def findings(rows: Sequence[Row]) -> list[str]:
    """Overheads of ours and of torchao, eager and compiled, by model."""
    sentences = []
    for where, results in by_run(rows, KIND).items():
        if where.data in (LLAMA_3_8B_TWO_LAYERS.name, LLAMA_3_2_3B.name):
            sentences += [cost_sentence(where, results, setting) for setting in results.settings]
            sentences += verdict(results) if where.data == LLAMA_3_8B_TWO_LAYERS.name else []
    return [sentence for sentence in sentences if sentence]


def headlines(rows: Sequence[Row]) -> list[Headline]:
    """None: the first page has ten."""
    return []


def main_finding(rows: Sequence[Row]) -> str:
    """What it adds to a compiled step of two layers, of ours and of torchao."""
    runs = by_run(rows, KIND)
    run = best_run({where: one for where, one in runs.items() if where.data == LLAMA_3_8B_TWO_LAYERS.name})
    return cost_sentence(*run, "compiled").rstrip(".") if run else ""


def targets_by_run(rows: Sequence[Row]) -> list[RunTargets]:
    """Of the two blocks, which are what has targets."""
    runs = by_run(rows, KIND)
    return [
        RunTargets(where, targets_of(results))
        for where, results in runs.items()
        if where.data == LLAMA_3_8B_TWO_LAYERS.name
    ]


def cost_sentence(where: Where, results: Results, setting: str) -> str:
    """Time and memory over plain training of each variant of one setting."""
    words = []
    for found, method in lines_of(results):
        time, memory = (results.value(setting, method, metric) for metric in (TIME, MEMORY))
        if found == setting and None not in (time, memory) and "," in method:
            words.append(f"{method} {time:+.1f}% time and {memory:+.1f}% memory")
    return f"{NAMES[where.data]}, {setting}, {where.device}: {'; '.join(words)}." if words else ""


def comparisons(rows: Sequence[Row]) -> list[Comparison]:
    """Every published value; ours beside it where model and recipe are the same."""
    runs = {where: found for where, found in by_run(rows, KIND).items() if where.data == LLAMA_3_2_3B.name}
    found = best_run(runs)
    return [comparison(one, found) for one in published()]


def comparison(one: Published, found: tuple[Where, Results] | None) -> Comparison:
    """A published value; changes in percent as ratios, beside ours for Llama-3.2-3B (eager, forward and backward alone)."""
    metric, name = RATIOS.get(one.metric, ("", one.metric.replace("_", " ")))
    same = bool(metric) and one.model == NAMES[LLAMA_3_2_3B.name] and one.method == SAME_RECIPE[0]
    percent = found[1].value("eager", SAME_RECIPE[1], metric) if found and same else None
    measured = None
    if percent is not None:
        measured = 1 / (1 + percent / 100) if metric == TIME else 1 + percent / 100
    return Comparison(
        one.model,
        one.method,
        name,
        "ratio" if metric else "tokens/s" if one.unit == "tok/s" else one.unit,
        1 + one.value / 100 if metric else one.value,
        one.hardware,
        f"{one.paper}, {one.source}",
        measured,
        found[0].device if found and measured is not None else "",
        part="" if measured is None else "forward and backward alone",
    )


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
    return Section(f"{NAMES.get(where.data, where.data)} ({where.run})", paragraphs, drawings, tables)


def verdict(results: Results) -> list[str]:
    """Which targets are missed, or that none is among those that were measured."""
    late = missed(results)
    if late:
        return [f"**Missed targets: {len(late)}.** " + "; ".join(late) + "."]
    measured = known(asked := targets_of(results))
    return [f"All {len(measured)} values that have a target meet it{rest(asked)}."] if measured else []


def again(results: Results) -> list[str]:
    """What two timings of plain training differ by."""
    found = [row for row in results.rows if row.metric == "time again over plain"]
    words = ", ".join(f"{row.setting} {row.value:+.2f}%" for row in found)
    return [f"bfloat16 timed again, over itself: {words}."] if words else []


def table(results: Results) -> Table:
    """A line per variant."""
    lines = []
    for setting, method in lines_of(results):
        cells = [number(results.value(setting, method, metric), digits) for metric, digits in METRICS]
        lines.append([method, setting, *cells, state(results, setting, method)])
    return Table("Time and memory of a step", COLUMNS, lines, results.rows)


def published_table() -> Table:
    """Published overheads, on whatever they were measured."""
    lines = [
        [method, model, hardware, number(time, 1), number(memory, 1), source]
        for model, hardware, source, method, time, memory in overheads()
    ]
    columns = [
        "training",
        "model",
        "on",
        "time over bfloat16 training (%)",
        "memory over bfloat16 training (%)",
        "source",
    ]
    return Table("Published, for comparison", columns, lines)


def plot(where: Where, results: Results) -> Drawing:
    """Overheads of every variant."""
    lines = [one for one in lines_of(results) if results.value(*one, "bytes to round") is not None]
    series = {
        name: [results.value(setting, method, metric) for setting, method in lines]
        for name, metric in (("time", TIME), ("peak memory", MEMORY))
    }
    figures = dots_twice(
        [f"{method}, {setting}" for setting, method in lines],
        series,
        "percent over bfloat16 training",
        base=0.0,
    )
    return Drawing(
        f"qat-overhead-{where.data}{where.device_ending}",
        "Time and peak memory over bfloat16 training without fake quantization.",
        *figures,
    )
