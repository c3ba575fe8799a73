"""Targets of 2:4 sparsity: published speeds over dense, memory of a training step, and the margins of fine-tuned models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from experiments.fp8_training.training.gaps import UNDECIDED
from experiments.harness.rows import Row
from experiments.models.sam_encoder import VIT_L
from experiments.report.limits import RunTargets
from experiments.report.published import Published
from experiments.report.results import Results, best_run, by_run
from experiments.report.targets import Target
from experiments.sparsity.accuracy import pairs
from experiments.sparsity.methods import METHODS, STORAGES, stored_as
from experiments.sparsity.report.accuracy import TASKS, gap_of
from experiments.sparsity.report.published_tables import Place, place_of, values
from experiments.sparsity.speed import encoders
from experiments.sparsity.speed.sides import DENSE

SPEED, MEMORY = "speed over dense", "peak memory"
#: Largest peak of memory of a sparse training step over the dense one's.
OF_DENSE = 1.0
#: Methods that train on are held to the margin; pruning at once is what they are compared with.
TRAINED_ON = tuple(method for method in METHODS if method.startswith("fine-tuned"))


def targets_by_run(rows: Sequence[Row]) -> list[RunTargets]:
    """Of speed and memory on every GPU, then of accuracy in the largest run."""
    return [*speed_targets(rows), *gap_targets(rows)]


def speed_targets(rows: Sequence[Row]) -> Iterator[RunTargets]:
    """The published speed over dense of each place that was measured; a sparse training step takes no more memory."""
    for place, limit in limits():
        for where, results in by_run(rows, place.kind).items():
            if where.scale == "full" and where.device != "cpu" and where.data == place.data:
                targets = [speed_target(results, place, limit)]
                targets += [memory_target(results, place)] if place.kind == encoders.TRAINING else []
                yield RunTargets(where, targets, place.kind)


def limits() -> list[tuple[Place, float]]:
    """Where our row of each published speed over dense is, and that speed."""
    found = [(place_of(one), one.value) for one in values() if (one.metric, one.unit) == ("speedup", "x")]
    step = Place(encoders.TRAINING, VIT_L.name, encoders.OWN, SPEED, (encoders.training_setting(),))
    found += [(step, 1 + one.value / 100) for one in values() if is_step(one)]
    return [(place, limit) for place, limit in found if place is not None]


def is_step(one: Published) -> bool:
    """Whether a value is the speed of a training step, which was published in percent more than the dense one's."""
    return (one.model, one.metric, one.unit) == ("ViT-L", "speedup", "%")


def speed_target(results: Results, place: Place, limit: float) -> Target:
    """The published speed, at the first of the place's settings that was measured."""
    setting = setting_of(results, place)
    value = results.value(setting, place.method, place.metric)
    name = f"{place.method}, {setting}: {SPEED}"
    return Target(name, value, limit, value_format=".3f", day=results.day(setting, place.method))


def memory_target(results: Results, place: Place) -> Target:
    """The peak over the dense one's."""
    setting = setting_of(results, place)
    own, dense = (results.value(setting, method, MEMORY) for method in (place.method, DENSE))
    value = own / dense if own is not None and dense else None
    name, day = f"{place.method}, {setting}: {MEMORY} over dense", results.day(setting, place.method)
    return Target(name, value, OF_DENSE, at_least=False, value_format=".4f", day=day)


def setting_of(results: Results, place: Place) -> str:
    """The first of a place's settings that was measured."""
    settings = place.settings or results.settings
    return next(
        (one for one in settings if results.value(one, place.method, place.metric) is not None), settings[0]
    )


def gap_targets(rows: Sequence[Row]) -> Iterator[RunTargets]:
    """The mean gap to dense of what was trained on, in each storage: at most the margin, where that is decided."""
    for kind, (title, _, margin, unit, _) in TASKS.items():
        run = best_run(by_run(rows, pairs.gaps_kind(kind)))
        if run is not None and run[0].scale == "full":
            where, gaps = run
            yield RunTargets(where, list(gaps_of(gaps, margin, unit)), title)


def gaps_of(gaps: Results, margin: float, unit: str) -> Iterator[Target]:
    """Of one subject, with the interval in the name."""
    for method in (stored_as(one, storage) for one in TRAINED_ON for storage in STORAGES):
        gap = gap_of(gaps, method)
        if gap is not None and gap.verdict(margin) != UNDECIDED:
            day = max((gaps.day(setting, method) for setting in gaps.settings), default="")
            name = f"{method}: gap to dense (95% interval ± {gap.half:.2f})"
            yield Target(name, gap.mean, margin, False, unit, ".2f", day=day)


__all__ = ["targets_by_run"]
