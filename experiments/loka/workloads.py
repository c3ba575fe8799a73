"""What `loka` measures of workloads, line by line: kind and data of a table, setting, method, and what finds the values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from experiments.harness.measuring import Values
from experiments.loka import dense_speed, policies, trajectory
from experiments.runs.run import Settings


@dataclass(frozen=True)
class Line:
    """What is measured at once: kind and data of its table, setting, method, what finds its values, and its seed (None: the
    run's)."""

    kind: str
    data: str
    setting: str
    method: str
    work: Callable[[], Values]
    on_cpu: bool = False
    seed: int | None = None


RANDOM = "random-embeddings"
#: Batches of mods.
BATCHES = (1024, 6144)


def slug(data: str) -> str:
    """Data as tables name them."""
    return data.lower().replace(",", "").replace(" ", "-")


def trajectory_lines(settings: Settings) -> Iterator[Line]:
    """Part "trajectory": a line a training."""
    for data, model, change, at in trajectory.pairs(settings.scale):
        seed = settings.seed + at
        place = settings.scale, seed, settings.device, settings.cache
        work = partial(trajectory.trajectory_values, data, model, change, *place)
        yield Line(trajectory.TRAJECTORY, slug(data), model, change, work, seed=seed)


def policy_lines(settings: Settings) -> Iterator[Line]:
    """Part "policies"."""
    plan, place = (
        trajectory.PLANS[settings.scale],
        (settings.scale, settings.seed, settings.device, settings.cache),
    )
    data = next(iter(plan.data))
    for model in plan.models:
        for name in policies.names():
            work = partial(policies.policy_values, data, model, name, *place)
            yield Line(policies.POLICIES, slug(data), model, name, work)


def speed_lines(settings: Settings) -> Iterator[Line]:
    """Parts "speed" and "mod speed": nothing without a GPU."""
    if settings.device != "cuda":
        return
    for name in dense_speed.WORKLOADS:
        for method in dense_speed.METHODS:
            work = partial(dense_speed.speed_values, name, method, settings.device)
            yield Line(dense_speed.SPEED, RANDOM, name, method, work)
    for batch in BATCHES:
        for mods in dense_speed.MODS:
            work = partial(dense_speed.mod_values, mods, batch, settings.device)
            yield Line(dense_speed.MOD_SPEED, RANDOM, f"batch {batch}", mods, work)


__all__ = ["Line", "policy_lines", "speed_lines", "trajectory_lines"]
