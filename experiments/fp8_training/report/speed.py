"""Sections about time and memory: single layers, decoder layers, the grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from experiments.fp8_training.report.lines import Columns, failures, table
from experiments.fp8_training.report.published_tables import SPEED, model_table, of_grid
from experiments.fp8_training.report.targets import (
    SPEED_RATIO,
    of_blocks,
    of_fsdp,
    of_linear,
    ours,
    target_table,
    verdict,
)
from experiments.fp8_training.speed import blocks, fsdp, grid, grid_eager, linear
from experiments.fp8_training.speed.blocks import LLAMA_3_2_3B_FOUR_LAYERS
from experiments.fp8_training.speed.steady import IDLE, SETTLE, SINGLE
from experiments.harness.libraries import TORCHAO
from experiments.harness.rows import Row
from experiments.models.llama_shapes import LLAMA_3_8B_TWO_LAYERS
from experiments.report.content import Drawing, Headline, Section, headlines_of
from experiments.report.plots import heatmap
from experiments.report.results import Results, Where, best_run, by_run
from experiments.report.targets import Target

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LINEAR: Columns = {
    "time": ("ms", 3, 1.0),
    "time, 20%": ("20%", 3, 1.0),
    "time, 80%": ("80%", 3, 1.0),
    "time over bfloat16": ("over bfloat16", 3, 1.0),
    "time after a pause": ("after a pause (ms)", 3, 1.0),
    "fraction of the floor": ("of the floor", 3, 1.0),
    "host time": ("host (us)", 0, 1.0),
    "error of the output": ("error, output", 4, 1.0),
    "error of the input gradient": ("error, dx", 4, 1.0),
    "error of the weight gradient": ("error, dw", 4, 1.0),
}
BLOCKS: Columns = {
    "time": ("ms", 2, 1.0),
    "time, 20%": ("20%", 2, 1.0),
    "time, 80%": ("80%", 2, 1.0),
    "tokens/s": ("tokens/s", 0, 1.0),
    "speed over bfloat16": ("speed over bfloat16", 3, 1.0),
    "peak memory": ("peak (GB)", 3, 1.0),
    "peak memory over bfloat16": ("over bfloat16", 3, 1.0),
    "kept for backward": ("saved for backward (MB)", 1, 1.0),
}
FSDP: Columns = {
    "time": ("ms", 2, 1.0),
    "time, 20%": ("20%", 2, 1.0),
    "time, 80%": ("80%", 2, 1.0),
    "tokens/s": ("tokens/s of a rank", 0, 1.0),
    "speed over bfloat16": ("speed over bfloat16", 3, 1.0),
    "speed over bfloat16 all-gather": ("over bfloat16 all-gather", 3, 1.0),
    "all-gather": ("gathered (MB)", 3, 1.0),
    "reduce-scatter": ("gradients (MB)", 3, 1.0),
    "peak memory": ("peak of a step (GB)", 3, 1.0),
}
SUMS = (
    "**How sums are accumulated**: by default as the recipes say, which is as torchao does it: fast (the tensor core's own "
    "accumulator) in the output, precise (partial sums added in float32) in both gradients; blockwise is precise in all three. "
    "Methods named 'fast sums' are fast in all three products. On a CPU all sums are of float32."
)
LAYER = (
    "One linear layer of M rows, K inputs and N outputs, forward and backward, bfloat16, random normal operands. All methods "
    "of a shape run in turn in one process, bfloat16 first and last. Time is the median over rounds with the 20% and 80% "
    "quantiles, by events; launched one by one (eager), or replayed from a CUDA graph. Errors are norms of differences from "
    "float32 over norms. The floor is the operations at the rate of an 8192-cubed product measured in the same process (FP8 "
    "with fast sums, or bfloat16 where a recipe's operands have no units), and the fewest bytes of the casts at the measured "
    "copy rate.",
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
    "Decoder layers under FSDP2 on two GPUs: forward, backward and AdamW, all sides in turn in the same two processes. Weights "
    "travel in bfloat16, or as float8 codes and scales, which hold half the bytes; bytes are counted where a rank calls "
    "collectives, and gradients are reduced in bfloat16 either way. On a CPU two processes train a tiny model: bytes mean what "
    "they say.",
)
STAND_IN = "**A stand-in**: on a CPU recipes are emulated by the specification; errors mean what they say, times mean nothing."
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


def headlines(rows: Sequence[Row]) -> list[Headline]:
    """Two compiled blocks by `rowwise`, beside torchao's."""
    runs = {
        where: one
        for where, one in by_run(rows, blocks.KIND).items()
        if where.data == LLAMA_3_8B_TWO_LAYERS.name
    }
    run = best_run({where: one for where, one in runs.items() if where.device != "cpu"})
    if run is None:
        return []
    setting, theirs = blocks.blocks(2, compiled=True).setting, f"{TORCHAO}, rowwise"
    text = (
        "Two compiled layers of Llama-3-8B train {ours:.2f} times as fast as in bfloat16 by the recipe rowwise, {fast:.2f} "
        "with fast sums; torchao's rowwise {theirs:.2f}"
    )
    names = {"ours": ours("rowwise"), "fast": ours("rowwise", fast_sums=True), "theirs": theirs}
    return headlines_of(text, **{name: run[1].row(setting, one, SPEED_RATIO) for name, one in names.items()})


def sections(rows: Sequence[Row]) -> list[Section]:
    """Of all runs."""
    found = [linear_section(where, results) for where, results in by_run(rows, linear.KIND).items()]
    found += [blocks_section(where, results) for where, results in by_run(rows, blocks.KIND).items()]
    found += [fsdp_section(where, results) for where, results in by_run(rows, fsdp.KIND).items()]
    found += [grid_section(where, results) for where, results in by_run(rows, grid.KIND).items()]
    return found + [eager_section(where, results) for where, results in by_run(rows, grid_eager.KIND).items()]


def stand_in(where: Where) -> list[str]:
    """What a section of a CPU or of quick scale says first."""
    return [STAND_IN] if where.device == "cpu" else []


def linear_section(where: Where, results: Results) -> Section:
    """One shape."""
    targets = of_linear(where, results)
    text = [*verdict(targets), *stand_in(where), *failures(results), *LAYER]
    tables = [*target_table(targets, results.rows), table("Forward and backward", results, LINEAR)]
    return Section(f"Linear layer {where.data} ({where})", text, (), tables)


def blocks_section(where: Where, results: Results) -> Section:
    """One model."""
    targets = of_blocks(where, results)
    text = [*verdict(targets), *stand_in(where), *failures(results), *STEP]
    tables = [*target_table(targets, results.rows), table("A training step", results, BLOCKS)]
    if where.device != "cpu":
        published = {LLAMA_3_8B_TWO_LAYERS.name: "Llama-3-8B", LLAMA_3_2_3B_FOUR_LAYERS.name: "Llama-3.2-3B"}
        tables += [model_table(published[where.data])] if where.data in published else []
        tables += [model_table("not stated")] if where.data == LLAMA_3_8B_TWO_LAYERS.name else []
    return Section(f"Decoder layers: {where.data} ({where})", text, (), tables)


def fsdp_section(where: Where, results: Results) -> Section:
    """One model on two ranks."""
    targets = of_fsdp(where, results)
    text = [*verdict(targets), *stand_in(where), *failures(results), *TWO_RANKS]
    tables = [*target_table(targets, results.rows), table("A training step", results, FSDP)]
    return Section(f"Two ranks: {where.data} ({where})", text, (), tables)


def grid_section(where: Where, results: Results) -> Section:
    """The grid as heat maps, or as a table of its stand-ins."""
    if where.scale != "full" or where.device == "cpu":
        columns: Columns = {
            "time": ("ms", 3, 1.0),
            "speed over bfloat16": ("speed over bfloat16", 3, 1.0),
        }
        text = [*stand_in(where), *failures(results), *CELLS]
        return Section(f"LayerNorm, linear, sigmoid ({where})", text, (), [table("Cells", results, columns)])
    drawings = [
        drawing(where, results, f"{name}-kernels", method, SPEED)
        for name, method in (("forced", grid.FORCED.name), ("tuned", grid.TUNED.name))
    ]
    drawings.append(published_drawing(where))
    text = [*verdict(of_cells(results, SPEED)), *failures(results), *CELLS]
    return Section(f"LayerNorm, linear, sigmoid ({where})", text, drawings)


def eager_section(where: Where, results: Results) -> Section:
    """Eager steps of the cells where the host is slower than the GPU, as heat maps."""
    drawings = [
        drawing(where, results, f"{name}-eager", method, WALL)
        for name, method in (("forced", grid.FORCED.name), ("tuned", grid.TUNED.name))
    ]
    text = [*verdict(of_cells(results, WALL)), *failures(results), EAGER]
    return Section(f"LayerNorm, linear, sigmoid: eager steps ({where})", text, drawings)


def of_cells(results: Results, metric: str) -> list[Target]:
    """Every cell, tuned, at bfloat16's speed."""
    return [
        Target(
            name=f"{setting}, tuned", value=results.value(setting, grid.TUNED.name, metric), limit=AS_FAST,
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
    pairs = [(m, k) for m in grid.SIZES for k in grid.SIZES]
    lines = [[values.get(grid.setting_of((m, k, n))) for n in grid.SIZES] for m, k in pairs]
    return heatmap([f"M={m} K={k}" for m, k in pairs], [f"N={n}" for n in grid.SIZES], lines, label)


__all__ = ["sections"]
