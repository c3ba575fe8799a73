"""The page of experiment `fp8_training`: gaps to bfloat16 first, then speed, with published tables beside ours.

Published models are whole and run on many GPUs with an optimizer; ours are a few layers on one. So of their tables nothing but
the grid of small modules, whose shapes are ours, has a measured value beside it; for the others pages show both tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from experiments.fp8_training import blocks, convergence_page, linear
from experiments.fp8_training.blocks import LLAMA_3_2_3B_FOUR_LAYERS
from experiments.fp8_training.convergence_findings import (
    beside_card,
    converged,
    loss_headlines,
    of_trainings,
    speeds_found,
)
from experiments.fp8_training.convergence_findings import longest_training as longest_training
from experiments.fp8_training.convergence_findings import rare_bytes as rare_bytes
from experiments.fp8_training.convergence_page import (
    FASTEST,
    SPEED_RATIO,
    of_blocks,
    of_fsdp,
    of_linear,
    ours,
    target_table,
    verdict,
)
from experiments.fp8_training.convergence_page import targets_by_run as targets_by_run
from experiments.fp8_training.methods import MARGIN
from experiments.fp8_training.real_page import real_sections
from experiments.harness.bench import IDLE, SETTLE, SINGLE
from experiments.harness.revision import TORCHAO
from experiments.harness.rows import Row, table_parts
from experiments.models.causal_lm import REAL
from experiments.models.llama import LLAMA_3_8B_TWO_LAYERS
from experiments.report.accuracies import how
from experiments.report.content import (
    PEER,
    Card,
    Comparison,
    Drawing,
    Headline,
    Section,
    Table,
    headlines_of,
)
from experiments.report.plots import heatmap
from experiments.report.results import (
    FOLDER,
    Columns,
    Published,
    Results,
    Where,
    best_run,
    by_run,
    failures,
    number,
    read,
    table,
)
from experiments.report.targets import Target, verdict_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Metrics of the models' tables that are counted in tokens or gigabytes.
TABLED = ("throughput", "throughput_per_gpu", "peak_memory", "peak_reserved_memory")
SPEED = "speed over bfloat16, kernels"


@lru_cache(maxsize=1)
def of_models() -> tuple[Published, ...]:
    """Rows of whole models."""
    return read(FOLDER / "fp8_training.csv")


@lru_cache(maxsize=1)
def of_grid() -> dict[str, Published]:
    """Speeds over bfloat16 of the grid, by cell."""
    return {one.setting: one for one in read(FOLDER / "fp8_rowwise_grid.csv")}


def model_table(model: str) -> Table:
    """Published throughput, memory and speed over bfloat16 of a model; "" is all of them."""
    lines: dict[tuple[str, str, str], dict[str, float]] = {}
    for one in of_models():
        if one.model == model:
            lines.setdefault((one.method, one.hardware, one.setting), {})[one.metric] = one.value
    cells = []
    for (method, hardware, setting), values in lines.items():
        base = next((found for key, found in lines.items() if key[1:] == (hardware, setting)), {})
        speed = next((values[name] for name in TABLED[:2] if name in values), None)
        first = next((base[name] for name in TABLED[:2] if name in base), None)
        peak = next((values[name] for name in TABLED[2:] if name in values), None)
        if speed is not None and first:
            cells.append(
                [method, hardware, setting, number(speed, 0), number(speed / first, 3), number(peak, 2)]
            )
    columns = ["training", "on", "setting", "tokens/s a GPU", "over bfloat16", "peak (GB)"]
    return Table(f"Published: {model}", columns, cells)


def comparisons(rows: Sequence[Row]) -> list[Comparison]:
    """Every published value; ours beside it in the grid alone, by the sum of kernel times as there."""
    runs = {
        where: found
        for where, found in by_run(rows, linear.GRID_KIND).items()
        if where.scale == "full" and where.device != "cpu"
    }
    found = best_run(runs)
    real_rows = [row for row in rows if table_parts(row.table)[0].startswith(REAL)]
    others = [
        Comparison(
            model=one.model,
            method=one.method,
            metric=one.metric.replace("_", " "),
            unit=one.unit,
            published=one.value,
            published_on=one.hardware,
            source=source_of(one),
            **how(one, real_rows),
        )
        for one in of_models()
    ]
    return others + [compared(one, found) for one in of_grid().values()]


def compared(one: Published, found: tuple[Where, Results] | None) -> Comparison:
    """A cell of the grid beside ours with the recipe forced."""
    forced = linear.FORCED.name
    measured = found[1].value(one.setting, forced, SPEED) if found else None
    return Comparison(
        f"{one.model} {one.setting}",
        one.method,
        "speed over bfloat16",
        "ratio",
        one.value,
        one.hardware,
        source_of(one),
        measured,
        f"{found[0].device}, eager" if found and measured is not None else "",
    )


def source_of(one: Published) -> str:
    """Paper and place."""
    return f"{one.paper}, {one.source}"


# Sections about time and memory: single layers, decoder layers, the grid.

LINEAR: Columns = {
    "time": ("ms", 3, 1.0),
    "time, 20%": ("20% (ms)", 3, 1.0),
    "time, 80%": ("80% (ms)", 3, 1.0),
    "time over bfloat16": ("over bfloat16", 3, 1.0),
    "time after a pause": ("after a pause (ms)", 3, 1.0),
    "fraction of the floor": ("share of the roofline bound", 3, 1.0),
    "host time": ("host (us)", 0, 1.0),
    "error of the output": ("error, output", 4, 1.0),
    "error of the input gradient": ("error, dx", 4, 1.0),
    "error of the weight gradient": ("error, dw", 4, 1.0),
}
BLOCKS: Columns = {
    "time": ("ms", 2, 1.0),
    "time, 20%": ("20% (ms)", 2, 1.0),
    "time, 80%": ("80% (ms)", 2, 1.0),
    "tokens/s": ("tokens/s", 0, 1.0),
    "speed over bfloat16": ("speed over bfloat16", 3, 1.0),
    "peak memory": ("peak (GB)", 3, 1.0),
    "peak memory over bfloat16": ("over bfloat16", 3, 1.0),
    "kept for backward": ("saved for backward (MB)", 1, 1.0),
}
FSDP: Columns = {
    "time": ("ms", 2, 1.0),
    "time, 20%": ("20% (ms)", 2, 1.0),
    "time, 80%": ("80% (ms)", 2, 1.0),
    "tokens/s": ("tokens/s of a rank", 0, 1.0),
    "speed over bfloat16": ("speed over bfloat16", 3, 1.0),
    "speed over bfloat16 all-gather": ("over bfloat16 all-gather", 3, 1.0),
    "all-gather": ("gathered (MB)", 3, 1.0),
    "reduce-scatter": ("gradients (MB)", 3, 1.0),
    "peak memory": ("peak of a step (GB)", 3, 1.0),
}
SUMS = (
    "**How sums are accumulated**: by default as the recipes say, as torchao does: fast (the tensor core's own "
    "accumulator) in the output, precise (partial sums added in float32) in both gradients; blockwise is precise in"
    " all three. Methods named 'fast sums' are fast in all three matmuls. On a CPU all sums are in float32."
)
LAYER = (
    (
        "One linear layer of M tokens, K inputs and N outputs, forward and backward, bfloat16, random normal operands. "
        "All methods of a shape take turns in one process, bfloat16 first and last. Time is the median over rounds with"
        " the 20% and 80% quantiles, by CUDA events; eager, or replayed from a CUDA graph. Errors are norms of "
        "differences from float32 over norms. The roofline bound is the operations at the rate of an 8192-cubed matmul "
        "measured in the same process (FP8 with fast sums, or bfloat16 where the GPU has no units for a recipe's "
        "operands), plus the fewest bytes of the casts at the measured memory bandwidth."
    ),
    f"**Times, ratios and targets are of the steady state**: on a GPU a method is timed after at least {SETTLE * 1e3:.0f} ms "
    f"of its own calls, as in training, when the clock is what these calls make of it near the power limit. At large shapes "
    f"ratios depend on that. 'After a pause' is the other state: the median of {SINGLE} single calls, each after "
    f"{IDLE * 1e3:.0f} ms without work and with nothing in the L2 cache; eager calls wait for their launches there.",
    SUMS,
)
STEP = (
    "Decoder layers with random weights on one GPU; a step is forward and backward in bfloat16 without optimizer. The "
    "published tables are of whole models on several GPUs, sharded, with an optimizer: their ratios are what can be compared, "
    "their tokens a second cannot, and no value of ours stands for one of theirs.",
    SUMS,
)
TWO_RANKS = (
    (
        "Decoder layers under FSDP2 on two GPUs: forward, backward and AdamW, all methods in turn in the same two "
        "processes. Weights are gathered in bfloat16, or as quantized float8 values and scales, which are half the "
        "bytes; bytes are counted where a rank calls collectives, and gradients are reduced in bfloat16 either way. On "
        "a CPU two processes train a tiny model, where only the bytes mean something."
    ),
)
STAND_IN = "**Emulated on a CPU**: errors are those of the recipe, times mean nothing."
CELLS = (
    "LayerNorm without parameters, linear layer without bias, sigmoid; forward and backward in bfloat16, both sides eager "
    "(published: both compiled). The published measure is the sum of the GPU's kernel times from the profiler, which does not "
    "see launches. Ours is forced to the recipe, or was tuned for CUDA graphs before.",
)
EAGER = (
    "The same modules in eager mode, tuned for it: what a step takes is the larger of the GPU's time and the host's. Cells "
    "that the GPU needs longer for than any host are left out."
)
#: Of cells: what a step takes in eager mode over bfloat16's, and the least of it, and of kernels, that counts as no loss.
WALL, AS_FAST = "speed over bfloat16", 0.98


def two_layers(rows: Sequence[Row]) -> Results | None:
    """Two layers of Llama-3-8B on the last GPU."""
    runs = {
        where: one
        for where, one in by_run(rows, blocks.KIND).items()
        if where.data == LLAMA_3_8B_TWO_LAYERS.name
    }
    run = best_run({where: one for where, one in runs.items() if where.device != "cpu"})
    return run[1] if run else None


def cards(rows: Sequence[Row]) -> list[Card]:
    """The speed of a training step by `rowwise`, beside torchao's."""
    results, setting = two_layers(rows), blocks.blocks(2, compiled=True).setting
    row = results.row(setting, ours("rowwise"), SPEED_RATIO) if results else None
    if results is None or row is None:
        return []
    theirs = results.value(setting, f"{TORCHAO}, rowwise", SPEED_RATIO)
    bars = {"step of two Llama-3-8B layers, FP8 training": {"ao_lab": row.value, PEER: theirs}}
    other = "" if theirs is None else f"torchao {theirs:.2f}x"
    beside = "; ".join(filter(None, ("bfloat16", other, beside_card(rows, "rowwise"))))
    what = "speed of a compiled training step of two Llama-3-8B layers in FP8 (rowwise)"
    target = verdict_of(targets_by_run(rows), row, f"{ours('rowwise')}: {FASTEST}")
    return [Card(row, f"{row.value:.2f}x", what, beside, bars, target, results.rows)]


def speed_headlines(rows: Sequence[Row]) -> list[Headline]:
    """Two compiled blocks by `rowwise`, beside torchao's."""
    results = two_layers(rows)
    if results is None:
        return []
    setting, theirs = blocks.blocks(2, compiled=True).setting, f"{TORCHAO}, rowwise"
    text = (
        "Two compiled layers of Llama-3-8B train {ours:.2f} times as fast as in bfloat16 by the recipe rowwise, {fast:.2f} "
        "with fast sums; torchao's rowwise {theirs:.2f}"
    )
    names = {"ours": ours("rowwise"), "fast": ours("rowwise", fast_sums=True), "theirs": theirs}
    return headlines_of(text, **{name: results.row(setting, one, SPEED_RATIO) for name, one in names.items()})


def speed_sections(rows: Sequence[Row]) -> list[Section]:
    """Of all runs."""
    found = [linear_section(where, results) for where, results in by_run(rows, linear.KIND).items()]
    found += [blocks_section(where, results) for where, results in by_run(rows, blocks.KIND).items()]
    found += [fsdp_section(where, results) for where, results in by_run(rows, blocks.FSDP_KIND).items()]
    found += [grid_section(where, results) for where, results in by_run(rows, linear.GRID_KIND).items()]
    return found + [
        eager_section(where, results) for where, results in by_run(rows, linear.EAGER_KIND).items()
    ]


def stand_in(where: Where) -> list[str]:
    """What a section of a CPU or of quick scale says first."""
    return [STAND_IN] if where.device == "cpu" else []


def linear_section(where: Where, results: Results) -> Section:
    """One shape."""
    targets = of_linear(where, results)
    text = [*verdict(targets), *stand_in(where), *failures(results), *LAYER]
    tables = [*target_table(targets, results.rows), table("Forward and backward", results, LINEAR)]
    return Section(f"Linear layer ({where})", text, (), tables)


def blocks_section(where: Where, results: Results) -> Section:
    """One model."""
    targets = of_blocks(where, results)
    text = [*verdict(targets), *stand_in(where), *failures(results), *STEP]
    tables = [*target_table(targets, results.rows), table("A training step", results, BLOCKS)]
    if where.device != "cpu":
        published = {LLAMA_3_8B_TWO_LAYERS.name: "Llama-3-8B", LLAMA_3_2_3B_FOUR_LAYERS.name: "Llama-3.2-3B"}
        tables += [model_table(published[where.data])] if where.data in published else []
        tables += [model_table("not stated")] if where.data == LLAMA_3_8B_TWO_LAYERS.name else []
    return Section(f"Decoder layers ({where})", text, (), tables)


def fsdp_section(where: Where, results: Results) -> Section:
    """One model on two ranks."""
    targets = of_fsdp(where, results)
    text = [*verdict(targets), *stand_in(where), *failures(results), *TWO_RANKS]
    tables = [*target_table(targets, results.rows), table("A training step", results, FSDP)]
    return Section(f"Two ranks ({where})", text, (), tables)


def grid_section(where: Where, results: Results) -> Section:
    """The grid as heat maps, or as a table of its stand-ins."""
    if where.scale != "full" or where.device == "cpu":
        columns: Columns = {"time": ("ms", 3, 1.0), "speed over bfloat16": ("speed over bfloat16", 3, 1.0)}
        text = [*stand_in(where), *failures(results), *CELLS]
        return Section(f"LayerNorm, linear, sigmoid ({where})", text, (), [table("Cells", results, columns)])
    drawings = [
        drawing(where, results, f"{name}-kernels", method, SPEED)
        for name, method in (("forced", linear.FORCED.name), ("tuned", linear.TUNED.name))
    ]
    drawings.append(published_drawing(where))
    text = [*verdict(of_cells(results, SPEED)), *failures(results), *CELLS]
    return Section(f"LayerNorm, linear, sigmoid ({where})", text, drawings, drawn=results.rows)


def eager_section(where: Where, results: Results) -> Section:
    """Eager steps of the cells where the host is slower than the GPU, as heat maps."""
    drawings = [
        drawing(where, results, f"{name}-eager", method, WALL)
        for name, method in (("forced", linear.FORCED.name), ("tuned", linear.TUNED.name))
    ]
    text = [*verdict(of_cells(results, WALL)), *failures(results), EAGER]
    return Section(f"LayerNorm, linear, sigmoid: eager steps ({where})", text, drawings, drawn=results.rows)


def of_cells(results: Results, metric: str) -> list[Target]:
    """Every cell, tuned, at bfloat16's speed."""
    return [
        Target(
            name=f"{setting}, tuned", value=results.value(setting, linear.TUNED.name, metric), limit=AS_FAST,
        )
        for setting in results.settings
    ]  # fmt: skip


def drawing(where: Where, results: Results, name: str, method: str, metric: str) -> Drawing:
    """A heat map of one method."""
    values = {setting: results.value(setting, method, metric) for setting in results.settings}
    return Drawing(
        f"fp8-grid-{name}-{where.ending}", f"{method}: {metric}.", grid_figure(values, "speed over bfloat16")
    )


def published_drawing(where: Where) -> Drawing:
    """The published grid."""
    values = {setting: one.value for setting, one in of_grid().items()}
    return Drawing(
        f"fp8-grid-published-{where.ending}",
        "Published (torchao, rowwise, H100, sums of kernel times).",
        grid_figure(values, "speed over bfloat16"),
    )


def grid_figure(values: dict[str, float | None], label: str) -> Figure:
    """36 lines (M, K) by 6 columns (N)."""
    pairs = [(m, k) for m in linear.SIZES for k in linear.SIZES]
    lines = [[values.get(linear.setting_of((m, k, n))) for n in linear.SIZES] for m, k in pairs]
    return heatmap([f"M={m} K={k}" for m, k in pairs], [f"N={n}" for n in linear.SIZES], lines, label)


TITLE = "Low-precision training: speed and convergence"
QUESTION = "Is training in 8, 6 and 4 bits faster than in bfloat16, and does it converge as well?"
ABOUT = (
    (
        "Linear layers whose three matmuls (output and both gradients) run in low precision: time and memory beside "
        "bfloat16 and torchao, and whether models converge as they do in bfloat16."
    ),
    f"Convergence is of byte-level language models from random weights over paired seeds; the margin was named beforehand: "
    f"{MARGIN}% of the loss. On a CPU recipes are emulated and sizes are tiny.",
)
FEATURED = ("fp8-gaps-full", "fp8-gaps-full-prose", "fp8-gaps-quick")


def findings(rows: Sequence[Row]) -> list[str]:
    """Losses on every text in short, trainings of the largest runs, and how many targets are reached."""
    first = [f"{one.text}." for one in loss_headlines(rows)]
    return [*first, *blocks_found(rows), *of_trainings(rows), *convergence_page.finding(rows)]


def blocks_found(rows: Sequence[Row]) -> list[str]:
    """The speed of two blocks of Llama-3-8B by every recipe of ours, compiled, on each GPU."""
    setting, found = blocks.blocks(2, compiled=True).setting, []
    for where, results in by_run(rows, blocks.KIND).items():
        speeds = {
            one: results.value(setting, one, SPEED_RATIO)
            for one in results.methods
            if one.startswith("ours, ")
        }
        told = [
            f"{name.removeprefix('ours, ')} {speed:.2f}"
            for name, speed in speeds.items()
            if speed is not None
        ]
        if told and where.device != "cpu":
            found.append(f"Speed of a compiled step over bfloat16's, {where}: {'; '.join(told)}.")
    return found


def headlines(rows: Sequence[Row]) -> list[Headline]:
    """Speed of two blocks, and gaps of paired trainings."""
    return [*speed_headlines(rows), *loss_headlines(rows)]


def main_finding(rows: Sequence[Row]) -> str:
    """How fast blocks and whole models train, and whether their loss is that of bfloat16, on each text."""
    words = [f"{', '.join(one.runs)}: {one.text[:1].lower()}{one.text[1:]}" for one in speed_headlines(rows)]
    return ". ".join([*words, *speeds_found(rows), *converged(rows)])


def sections(rows: Sequence[Row]) -> list[Section]:
    """Real models, convergence, faults, then speed."""
    return [*real_sections(rows), *convergence_page.sections(rows), *speed_sections(rows)]
