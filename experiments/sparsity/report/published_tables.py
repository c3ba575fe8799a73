"""What others published about 2:4 sparsity, as tables, and as comparisons with measured rows of the same shape and method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from experiments.harness.rows import Row
from experiments.models.sam_encoder import VIT_H, VIT_L
from experiments.report.content import Comparison, Table
from experiments.report.published import FOLDER, Published, read
from experiments.report.results import Results, Where, best_run, by_run, number
from experiments.sparsity.speed import encoders, linear
from experiments.sparsity.speed.sides import DENSE

PUBLISHED = FOLDER / "sparsity.csv"


@dataclass(frozen=True)
class Place:
    """Where our row of a published value is: kind and data of its table, method, metric, settings, the first that is there."""

    kind: str
    data: str
    method: str
    metric: str
    settings: tuple[str, ...] = ()


#: Published methods by ours; SAM's mixture of INT8 and 2:4 is not measured here.
LINEAR = {"dense": DENSE, "semi-sparse 2:4": linear.OWN, "prune + compress only": linear.PRUNING}
#: Single layers were published as CUDA graphs; where those were not measured, the same one by one.
LAUNCHED = {linear.GRAPH: "CUDA graph", linear.EAGER: "eager"}
TRAINED = {"dense": DENSE, "MLP 2:4": encoders.OWN}
ENCODED = {
    "baseline": DENSE,
    "int8 dynamic quant (attn+mlp)": encoders.INT8,
    "2:4 (mlp only)": encoders.MLP,
    "2:4 (attn+mlp)": encoders.ALL,
}
#: Published metrics by ours. Memory of SAM is in MiB and of the whole model, mIoU is of its trained weights: not compared.
METRICS = {
    ("time", "ms"): "time",
    ("speedup", "x"): "speed over dense",
    ("throughput", "img/s"): "images/s",
    ("memory", "GB"): "peak memory",
}


@lru_cache(maxsize=1)
def values() -> tuple[Published, ...]:
    """All rows."""
    return read(PUBLISHED)


def place_of(one: Published) -> Place | None:
    """Where ours is; None for what is not measured here."""
    metric = METRICS.get((one.metric, one.unit))
    if metric is None:
        return None
    if one.model == "single linear":
        shape = one.setting.partition("(m,k,n) = (")[2].rstrip(")").split(",")
        return Place(linear.KIND, "x".join(shape), LINEAR[one.method], metric, tuple(LAUNCHED))
    if one.model == "ViT-L":
        settings = (encoders.training_setting(),)
        return Place(encoders.TRAINING, VIT_L.name, TRAINED[one.method], metric, settings)
    if one.model == "SAM ViT-h" and one.method in ENCODED:
        return Place(encoders.INFERENCE, VIT_H.name, ENCODED[one.method], metric)
    return None


def comparisons(rows: Sequence[Row]) -> list[Comparison]:
    """Every published value; ours beside it where a GPU measured the same shape by the same method at full scale."""
    return [compared(one, measured(rows, place_of(one))) for one in values()]


def measured(rows: Sequence[Row], place: Place | None) -> tuple[Where, Results, float] | None:
    """The value of a place, of the best run."""
    if place is None:
        return None
    runs = {
        where: found
        for where, found in by_run(rows, place.kind).items()
        if where.scale == "full" and where.device != "cpu" and where.data == place.data
    }
    best = best_run(runs)
    if best is None:
        return None
    where, results = best
    for setting in place.settings or results.settings:
        value = results.value(setting, place.method, place.metric)
        if value is not None:
            return where, results.with_setting(setting).of_method(place.method), value
    return None


def compared(one: Published, ours: tuple[Where, Results, float] | None) -> Comparison:
    """A published value with ours, or alone."""
    return Comparison(
        model=f"{one.model}, {one.setting}",
        method=one.method,
        metric=one.metric.replace("_", " "),
        unit=one.unit,
        published=one.value,
        published_on=one.hardware,
        source=f"{one.paper}, {one.source}",
        measured=None if ours is None else ours[2],
        measured_on="" if ours is None else measured_on(*ours[:2]),
    )


def measured_on(where: Where, results: Results) -> str:
    """The device, of layers with how they were launched and whose kernels multiplied."""
    row = results.rows[0]
    words = [
        where.device,
        LAUNCHED.get(row.setting, ""),
        "own kernels" if row.method in (linear.OWN, encoders.OWN) else "",
    ]
    return ", ".join(filter(None, words))


def published_table(model: str, setting: str = "") -> Table:
    """Published values of a model, those whose setting contains a text."""
    found = [one for one in values() if one.model == model and setting in one.setting]
    cells = [
        [one.method, one.hardware, one.setting, one.metric.replace("_", " "), number(one.value, 3), one.unit]
        for one in found
    ]
    return Table(f"Published: {model}", ["method", "on", "setting", "metric", "value", "unit"], cells)


__all__ = ["comparisons", "published_table", "values"]
