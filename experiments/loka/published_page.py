"""What LoKA publishes, by public reading notes: beside it ours, where it is the same model and method, or why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from experiments.harness.rows import Row
from experiments.loka.dense_speed import BOTH, SPEED
from experiments.loka.speed_page import BASE, OURS, ratio
from experiments.report.content import Comparison, Headline, Section, Table
from experiments.report.results import Published, best_run, by_run, number, read
from experiments.report.scoreboard import measured_of
from experiments.report.targets import RunTargets

PUBLISHED_FILE = Path(__file__).resolve().parents[1] / "published" / "loka.csv"
#: Wukong's size in ours, and published methods by ours.
WUKONG, LARGE = "Wukong, 24 GFLOP", "Wukong 22.2 GFLOP"
METHODS = {
    "TorchAO TW": "tensorwise", "TorchAO RW": "rowwise", "TorchAO RW_GW_HP": "rowwise_with_gw_hp", "DeepGEMM BW": "blockwise",
    "LoKA Dispatch": OURS,
}  # fmt: skip
COMMAND = "ao-lab reproduce loka --scale full --device cuda --only speed"
#: Why the rest has no value of ours, by words of the metric.
REASONS = {
    "speedup of compute": "FBGEMM's kernel is none of ours, and not installed",
    "speedup of training": "of a cluster, with its collectives; part speed is of one GPU",
    "speedup of inference": "of a cluster and of models that are not public; part speed is of one GPU",
    "speedup, above": "the model is not named; part speed has them on DLRMv2-DCN with norms",
    "speedup with casts": "25 of the 27 shapes are not public",
    "log loss": "the data are not public; part trajectory is on public data",
    "standard normal": "layers of production models; MERE has no finite expectation, see above",
    "learned inputs": "layers of production models; MERE has no finite expectation, see above",
    "random inputs": "the faulty kernel is not described; a bank of 19 is above",
    "inputs of the probe": "the faulty kernel is not described; a bank of 19 is above",
    "overhead": "the model is not named; ours on DCN and Wukong is above",
}
TEXT = (
    "The paper's tables, as public reading notes give them; none is confirmed by its authors. Ours stands beside a value "
    "where model and method are the same: LoKA's Wukong of 24 GFLOP is taken for the 22.2 GFLOP one of its paper. Ours is of "
    "one GPU.",
)


@lru_cache(maxsize=1)
def values() -> tuple[Published, ...]:
    """All of them."""
    return read(PUBLISHED_FILE)


def comparisons(rows: Sequence[Row]) -> list[Comparison]:
    """Every published value; ours beside it where a GPU measured it at full scale."""
    return [_compared(one, rows) for one in values()]


def _compared(one: Published, rows: Sequence[Row]) -> Comparison:
    ours = METHODS.get(one.method) if one.model == WUKONG else None
    found = None if ours is None else _measured(rows, ours)
    reason = next(words for part, words in REASONS.items() if part in one.metric)
    return Comparison(
        model=f"{one.model}, {one.setting}" if one.setting else one.model,
        method=one.method,
        metric=one.metric,
        unit=one.unit,
        published=one.value,
        published_on=one.hardware or "not stated",
        source=f"{one.paper}, {one.source}",
        measured=None if found is None else found[1],
        measured_on="" if found is None else found[0],
        command=COMMAND if ours else "",
        reason="" if ours else reason,
    )


def _measured(rows: Sequence[Row], method: str) -> tuple[str, float] | None:
    """The device, and how many times quicker a step of the large Wukong is than in bfloat16."""
    best = best_run({where: one for where, one in by_run(rows, SPEED).items() if where.device != "cpu"})
    gain = None if best is None else ratio(best[1], LARGE, BASE, method, BOTH)
    return None if best is None or gain is None else (best[0].device, gain)


def findings(rows: Sequence[Row]) -> list[str]:
    """How many have one of ours; nothing without rows."""
    if not rows:
        return []
    found = comparisons(rows)
    return [
        f"{measured_of(found)} of {len(found)} values that LoKA publishes (by reading notes) have one of ours beside them, and "
        f"each of the others the reason why not."
    ]


def sections(rows: Sequence[Row]) -> list[Section]:
    """One, of all values; none without rows."""
    if not rows:
        return []
    found = comparisons(rows)
    body = [
        [one.model, one.method, one.metric, number(one.published, 2), one.unit, number(one.measured, 2),
         one.measured_on or one.command or one.reason]
        for one in found
    ]  # fmt: skip
    columns = ["model", "method", "metric", "published", "unit", "ours", "ours on, measured by, or why not"]
    title = f"Published values, {measured_of(found)} of {len(found)} with one of ours"
    return [Section("What LoKA publishes", TEXT, [], [Table(title, columns, body)])]


def headlines(rows: Sequence[Row]) -> list[Headline]:
    """None."""
    return []


def targets_by_run(rows: Sequence[Row]) -> list[RunTargets]:
    """None: they are those of the parts."""
    return []


__all__ = ["comparisons", "findings", "headlines", "sections", "targets_by_run"]
