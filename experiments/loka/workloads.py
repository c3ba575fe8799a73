"""What `loka` measures of workloads, line by line: kind and data of a table, setting, method, and what finds the values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from experiments.harness.measuring import Deadline, Values
from experiments.loka import dense_speed, fused_speed, policies, shape_speed, table_speed, trajectory
from experiments.runs.settings import Settings


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


@dataclass(frozen=True)
class Turns:
    """What is timed in turn: kind and data of its table, setting, methods, and what finds the values of each until a deadline,
    statuses among them. needs: seconds of its first two methods on an H200, below which it is not begun."""

    kind: str
    data: str
    setting: str
    methods: tuple[str, ...]
    work: Callable[[Deadline], Mapping[str, Values]]
    needs: float = 0.0


RANDOM = "random-embeddings"
OPERANDS = "normal"
#: Kinds of tables whose methods are timed in turn.
IN_TURN = (
    dense_speed.SPEED, dense_speed.MOD_SPEED, fused_speed.NORM, fused_speed.EPILOGUE, shape_speed.SHAPES, table_speed.TABLES,
)  # fmt: skip
#: The workload that compiles longest.
LARGEST = "Wukong 22.2 GFLOP"
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


def speed_lines(settings: Settings) -> Iterator[Turns]:
    """Part "speed", nothing without a GPU: first tables, whose kernel is new, and the cases that a deadline left without rows,
    those that compile for minutes behind the brief ones."""
    if settings.device != "cuda":
        return
    norms, epilogues = (
        _fused(kind, fused_speed.CASES[kind], settings.device)
        for kind in (fused_speed.NORM, fused_speed.EPILOGUE)
    )
    dense = {
        name: _dense(dense_speed.SPEED, name, workload, dense_speed.methods_of(name), settings.device)
        for name, workload in dense_speed.WORKLOADS.items()
    }
    for drawn in (table_speed.UNIFORM, table_speed.ZIPF):
        work = partial(table_speed.measure, drawn, settings.device)
        yield Turns(table_speed.TABLES, RANDOM, drawn, table_speed.METHODS, work)
    yield from (*norms[2:], *epilogues[1:], dense.pop(LARGEST))
    for batch in BATCHES:
        workload = dense_speed.dcn(dense_speed.NORMS, batch)
        yield _dense(
            dense_speed.MOD_SPEED, f"batch {batch}", workload, tuple(dense_speed.MODS), settings.device
        )
    yield from (*norms[:2], epilogues[0])
    yield from dense.values()


def shape_lines(settings: Settings) -> Iterator[Turns]:
    """Part "shapes": nothing without a GPU."""
    if settings.device == "cuda":
        yield from _fused(shape_speed.SHAPES, shape_speed.CASES, settings.device)


def _fused(kind: str, cases: Iterable[fused_speed.Case], device: str) -> list[Turns]:
    """Cases of a kind."""
    return [
        Turns(kind, OPERANDS, case.name, tuple(case.methods), partial(fused_speed.measure, case, device))
        for case in cases
    ]


def _dense(
    kind: str, name: str, workload: dense_speed.Workload, methods: tuple[str, ...], device: str
) -> Turns:
    work = partial(dense_speed.measure, workload, methods, device)
    return Turns(kind, RANDOM, name, methods, work, needs=15.0 if workload.graph else 40.0)


__all__ = [
    "IN_TURN",
    "RANDOM",
    "Line",
    "Turns",
    "policy_lines",
    "shape_lines",
    "speed_lines",
    "trajectory_lines",
]
