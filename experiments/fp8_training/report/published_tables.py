"""What others published about FP8 training, as tables, and as comparisons with measured rows of the same shapes and recipe.

Their models are whole and run on many GPUs with an optimizer; ours are a few layers on one. So of their tables nothing but the
grid of small modules, whose shapes are ours, has a measured value beside it; for the others pages show both tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from experiments.fp8_training.speed import grid
from experiments.harness.rows import Row
from experiments.report.content import Comparison, Table
from experiments.report.published import FOLDER, Published, read
from experiments.report.results import Results, Where, best_run, by_run, number

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
        for where, found in by_run(rows, grid.KIND).items()
        if where.scale == "full" and where.device != "cpu"
    }
    found = best_run(runs)
    others = [
        Comparison(
            model=one.model,
            method=one.method,
            metric=one.metric.replace("_", " "),
            unit=one.unit,
            published=one.value,
            published_on=one.hardware,
            source=source_of(one),
        )
        for one in of_models()
    ]
    return others + [compared(one, found) for one in of_grid().values()]


def compared(one: Published, found: tuple[Where, Results] | None) -> Comparison:
    """A cell of the grid beside ours with the recipe forced."""
    forced = grid.FORCED.name
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


__all__ = ["comparisons", "model_table", "of_grid", "of_models"]
