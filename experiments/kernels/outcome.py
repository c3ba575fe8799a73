"""What a run uses, and how a measurement becomes rows: its values with the status ``ok``, or a status that says why not."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from experiments.harness.rows import Journal, Row
from experiments.harness.settings import Settings
from experiments.harness.timing import Plan, Watch
from experiments.kernels.baselines.baseline import PEERS, Peer
from experiments.kernels.gate import Wrong

EXPERIMENT = "kernels"
KERNELS, PEER_TABLE, DATA = "kernels", "peers", "random-normal"
#: Seconds after which no further peer is begun.
PEER_SECONDS = 200.0
Values = dict[str, tuple[float, str]]


PLAN = Plan()
PEER_PLAN = Plan(rounds=15, warmup=2)


@dataclass(frozen=True)
class Bench:
    """What a run uses: settings of its rows, the kernels, a watch, how long to look, which peers and for how long, and the time
    for all."""

    settings: Settings
    fast: Any
    watch: Watch
    plan: Plan = PLAN
    peer_plan: Plan = PEER_PLAN
    peers: Sequence[Peer] = PEERS
    peer_seconds: float = PEER_SECONDS
    #: Seconds after which no further case, and no peer, is begun.
    seconds: float = math.inf
    clock: Callable[[], float] = time.perf_counter


def table(bench: Bench, kind: str) -> str:
    """The table of this run's rows."""
    return f"{kind}/{bench.settings.scale}/{DATA}"


def keep(journal: Journal, failed: list[Row], rows: list[Row]) -> None:
    """Rows of what went well into the journal, others beside it."""
    if any(row.metric == "status: ok" for row in rows):
        journal.add(rows)
    else:
        failed += rows


def rows_of(bench: Bench, kind: str, setting: str, method: str, values: Values) -> list[Row]:
    """Tidy rows."""
    return [
        bench.settings.row(EXPERIMENT, kind, DATA, setting, method, metric, value, unit)
        for metric, (value, unit) in values.items()
    ]


def status(word: str) -> Values:
    """The row that says how it went; what it says is in its name, as rows hold numbers."""
    return {f"status: {' '.join(word.split())[:200]}": (float(word == "ok"), "")}


def attempt(work: Callable[[], Values]) -> Values:
    """What work finds, with a status; of a failure only that."""
    try:
        return {**work(), **status("ok")}
    except Wrong as error:
        return status(f"wrong: {error}")
    except Exception as error:  # noqa: BLE001
        return status(f"error: {type(error).__name__}: {error}")
    finally:
        free()


def free() -> None:
    """Give memory back, so that the next case has all of it."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
