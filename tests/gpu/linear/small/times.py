"""Times of `linear_small`: every candidate beside bfloat16 and `fast.linear`, as CUDA graphs, in turn.

A graph calls a function once with each of so many weights that together they exceed the second-level cache several times.
Rounds of all functions follow each other, so that a slow spell of the clock hits all; a time is the median of rounds over the
calls of a graph. The floor is every byte once at the rate of a copy: 4.2 TB/s on an H200, 3.0 on an H100.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch

import fast
from ao_lab.config.recipe import named
from fast.kernels.linear_small import host
from reference import Quantized
from tests.gpu.harness.graph_times import Call, captured, in_turn
from tests.gpu.linear.small import weights

SHAPES = ((14336, 4096), (4096, 14336), (4096, 4096), (1024, 4096))
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
#: Bytes that weights in turn have together at least, the most of them, and rounds.
COLD, MOST, ROUNDS = 200e6, 64, 9


def rate() -> float:
    """Bytes a microsecond that a copy reaches."""
    return 4.2e6 if "H200" in torch.cuda.get_device_name() else 3.0e6


def several(make: Callable[[], Any], size: float) -> list[Any]:
    """Weights in turn; size: bytes of one."""
    return [make() for _ in range(min(MOST, int(COLD / size) + 2))]


def stored_weight(name: str, shape: tuple[int, int]) -> Quantized:
    """A weight of `fast.linear`."""
    w, _ = weights.drawn(name, shape)
    return w


class Peers:
    """Weights of a shape for other kernels, made once."""

    def __init__(self, name: str, shape: tuple[int, int]) -> None:
        size, bits = shape[0] * shape[1], named(name).format.bits
        first = stored_weight(name, shape)
        self.stored = several(lambda: copied(first), size * bits / 8)
        self.dense = several(
            lambda: torch.randn(shape, device=weights.DEVICE, dtype=torch.bfloat16), 2.0 * size
        )

    def calls(self, x: torch.Tensor) -> dict[str, list[Call]]:
        """Each with all of its weights."""
        return {
            "bf16": [lambda w=w: torch.nn.functional.linear(x, w) for w in self.dense],
            "today": [lambda w=w: fast.linear(x, w) for w in self.stored],
        }


def copied(w: Quantized) -> Quantized:
    """In memory of its own."""
    from dataclasses import replace

    parts = {part: getattr(w, part) for part in ("codes", "scale", "zero", "outer")}
    return replace(w, **{name: None if part is None else part.clone() for name, part in parts.items()})


def named_tiling(tiling: host.Tiling) -> str:
    """Its numbers."""
    return ",".join(str(int(number)) for number in astuple(tiling))


def timed(
    name: str,
    shape: tuple[int, int],
    count: int,
    arranged: list[host.ArrangedWeight],
    peers: Peers,
    most: int,
) -> dict[str, Any]:
    """A row: microseconds by candidate and peer, the rule's, the best, the floor."""
    x = torch.randn(count, shape[1], device=weights.DEVICE, dtype=torch.bfloat16)
    graphs, failed = {}, {}
    chosen = weights.tilings(name, shape, count, most)
    calls = {
        named_tiling(tiling): [lambda w=w, t=tiling: host.linear_small(x, w, tiling=t) for w in arranged]
        for tiling in chosen
    }
    for label, each in {**peers.calls(x), **calls}.items():
        try:
            graphs[label] = captured(each)
        except Exception as error:  # noqa: BLE001  others go on
            failed[label] = f"{type(error).__name__}: {str(error)[-200:]}"
    times = in_turn(graphs, ROUNDS)
    own = {label: us for label, us in times.items() if label in calls}
    best = min(own, key=own.__getitem__) if own else ""
    floor = (arranged[0].nbytes + x.nbytes + 2 * count * shape[0]) / rate()
    return {
        "scheme": name, "shape": shape, "rows": count, "floor": floor, "times": times, "failed": failed, "best": best,
        "best_us": own.get(best), "rule": named_tiling(chosen[0]), "rule_us": own.get(named_tiling(chosen[0])),
    }  # fmt: skip


def told(row: dict[str, Any]) -> str:
    """A row as a line."""
    times, best, rule = row["times"], row["best_us"] or float("nan"), row["rule_us"] or float("nan")
    bf16, today = (times.get(peer, float("nan")) for peer in ("bf16", "today"))
    return (
        f"{row['scheme']} {row['shape']} {row['rows']:3} rows: best {best:6.2f} ({row['best']}) rule {rule:6.2f} "
        f"({row['rule']}) floor {row['floor']:5.2f} x{best / row['floor']:.2f}  bf16 {bf16:6.2f} x{bf16 / best:.2f}  "
        f"today {today:6.2f} x{today / best:.2f}" + (f"  FAILED {row['failed']}" if row["failed"] else "")
    )
