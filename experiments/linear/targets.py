"""Targets of quantized layers over rows of inputs, as data.

They are of one shape. Times are what other projects' kernels take on an H200 and hold there; ratios hold on any GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from experiments.harness.rows import Row
from experiments.linear.methods import BASE, EXPERTS, PARTS, PEERS, TORCHAO
from experiments.linear.tables import COMPILED_ROWS, EXPERT_ROWS, ROWS, SHAPES, data_of, setting_of
from experiments.linear.times import SPEED, TIME
from experiments.report.limits import RunTargets
from experiments.report.results import Results, Where, by_run
from experiments.report.targets import Target

SHAPE = data_of(SHAPES[0])
#: The device whose times are targets.
DEVICE = "H200"
#: The kernels of others have groups of 128.
INT4, INT4_G32 = ("int4 g128", "int4 g128, zero points"), "int4 g32"
BITS8 = ("int8", "int8 g128", "fp8")
BITS4 = ("mxfp4", "nvfp4", "nf4")
FLOAT8 = ("fp8 dynamic, tensor", "fp8 dynamic, rows")
#: Of torchao's, compiled, our speed over it is a target for these rows.
OVER_TORCHAO, FEW = "speed over torchao", tuple(rows for rows in COMPILED_ROWS if rows <= 64)


@dataclass(frozen=True)
class Limit:
    """A limit of some methods over a range of rows, ends included. metric: TIME (at most, us), SPEED or OVER_TORCHAO."""

    methods: tuple[str, ...]
    first: int
    last: int
    metric: str
    limit: float

    @property
    def rows(self) -> tuple[int, ...]:
        """Those of the range that are measured."""
        measured = FEW if self.metric == OVER_TORCHAO else ROWS
        return tuple(rows for rows in measured if self.first <= rows <= self.last)


LIMITS = (
    Limit(INT4, 1, 4, TIME, 10.4),
    Limit(INT4, 8, 16, TIME, 12.5),
    Limit(INT4, 32, 32, TIME, 15.0),
    Limit(INT4, 64, 64, TIME, 19.0),
    Limit((*INT4, INT4_G32), 128, 8192, SPEED, 0.98),
    Limit(BITS8, 1, 1, TIME, 15.3),
    Limit(BITS8, 2, 16, TIME, 16.5),
    Limit(BITS8, 32, 8192, SPEED, 1.0),
    Limit(("int8 dynamic",), 1024, 1024, SPEED, 1.3),
    Limit(("int8 dynamic",), 8192, 8192, SPEED, 1.5),
    Limit(FLOAT8, 256, 8192, SPEED, 1.0),
    Limit(("fp8 dynamic, rows",), 1, 64, OVER_TORCHAO, 1.1),
    Limit(BITS4, 1, 16, SPEED, 2.0),
    Limit(("mxfp8",), 1, 16, SPEED, 1.7),
    Limit((*BITS4, "mxfp8"), 1024, 8192, SPEED, 0.95),
)
#: Of experts, 64 tokens.
LIMITS_OF_EXPERTS = (Limit(("int4 g128", "fp8"), 128, 128, SPEED, 1.8),)


def targets_of(part: str, where: Where, results: Results) -> list[Target]:
    """The targets of a part at a shape; none of other shapes and of stand-ins."""
    if not where.data.endswith(SHAPE) or where.scale != "full" or where.device == "cpu":
        return []
    limits = LIMITS_OF_EXPERTS if part == EXPERTS else LIMITS
    methods, held = (
        set(results.methods),
        [one for one in limits if one.metric != TIME or DEVICE in where.device],
    )
    return [
        target(one, results, method, rows)
        for one in held
        if (one.metric == OVER_TORCHAO) == (part == TORCHAO)
        for method in one.methods
        if method in methods
        for rows in one.rows
    ]


def targets_by_run(rows: Sequence[Row]) -> list[RunTargets]:
    """Of all parts on all GPUs."""
    return [
        RunTargets(where, targets_of(part, where, results), part, "times bfloat16")
        for part in PARTS
        for where, results in by_run(rows, part).items()
    ]


def target(limit: Limit, results: Results, method: str, rows: int) -> Target:
    """One of them."""
    setting, is_time = setting_of(rows), limit.metric == TIME
    value = (
        over_torchao(results, setting, method)
        if limit.metric == OVER_TORCHAO
        else results.value(setting, method, limit.metric)
    )
    unit = "us" if is_time else "" if limit.metric == SPEED else "times torchao"
    name = f"{method}, {rows} row{'s' * (rows > 1)}"
    digits, day = ".1f" if is_time else ".2f", results.day(setting, method)
    return Target(name, value, limit.limit, not is_time, unit, digits, day=day)


def peer_of(method: str) -> list[str]:
    """torchao's of the same weights and inputs; none where it has none."""
    return [peer.name for peer, ours in PEERS.items() if ours == method]


def over_torchao(results: Results, setting: str, method: str) -> float | None:
    """torchao's time over ours of the same table; None where one is missing."""
    ours, theirs = (results.value(setting, name, TIME) for name in (method, peer_of(method)[0]))
    return None if ours is None or theirs is None else theirs / ours


def slow_rows(results: Results) -> Iterator[tuple[str, list[int]]]:
    """Of each method that is slower than bfloat16 somewhere, the numbers of rows where."""
    for method in dict.fromkeys(row.method for row in results.rows if row.method != BASE.name):
        speeds = {
            rows: results.value(setting_of(rows), method, SPEED) for rows in sorted({*ROWS, *EXPERT_ROWS})
        }
        slow = [rows for rows, speed in speeds.items() if speed is not None and speed < 1]
        if slow:
            yield method, slow


__all__ = ["LIMITS", "Limit", "over_torchao", "slow_rows", "targets_by_run", "targets_of"]
