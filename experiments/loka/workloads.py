"""What `loka` measures of workloads, line by line: kind and data of a table, setting, method, and what finds the values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from experiments.harness.measuring import Values
from experiments.loka import dense_speed, policies, trajectory
from experiments.runs.run import Settings

#: Kind, data, setting, method, work.
Told = tuple[str, str, str, str, Callable[[], Values]]
RANDOM = "random-embeddings"
#: Batches of mods.
BATCHES = (1024, 6144)


def slug(data: str) -> str:
    """Data as tables name them."""
    return data.lower().replace(" ", "-")


def trajectory_lines(settings: Settings) -> Iterator[Told]:
    """Part "trajectory"."""
    plan, place = (
        trajectory.PLANS[settings.scale],
        (settings.scale, settings.seed, settings.device, settings.cache),
    )
    for data in plan.data:
        for model in plan.models:
            for change in plan.changes:
                work = partial(trajectory.trajectory_values, data, model, change, *place)
                yield trajectory.TRAJECTORY, slug(data), model, change, work


def policy_lines(settings: Settings) -> Iterator[Told]:
    """Part "policies"."""
    plan, place = (
        trajectory.PLANS[settings.scale],
        (settings.scale, settings.seed, settings.device, settings.cache),
    )
    for model in plan.models:
        for name in policies.names():
            work = partial(policies.policy_values, plan.data[0], model, name, *place)
            yield policies.POLICIES, slug(plan.data[0]), model, name, work


def speed_lines(settings: Settings) -> Iterator[Told]:
    """Parts "speed" and "mod speed": nothing without a GPU."""
    if settings.device != "cuda":
        return
    for name in dense_speed.WORKLOADS:
        for method in dense_speed.METHODS:
            work = partial(dense_speed.speed_values, name, method, settings.device)
            yield dense_speed.SPEED, RANDOM, name, method, work
    for batch in BATCHES:
        for mods in dense_speed.MODS:
            work = partial(dense_speed.mod_values, mods, batch, settings.device)
            yield dense_speed.MOD_SPEED, RANDOM, f"batch {batch}", mods, work


__all__ = ["policy_lines", "speed_lines", "trajectory_lines"]
