"""Starts ranks as processes of this host, and starts them again behind a case that ended them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from experiments.distributed.ranks import (
    AGAIN,
    FAILED,
    GRACE,
    PATIENCE,
    POLL,
    STARTED,
    Plan,
    failed,
    take_over,
)
from experiments.harness.rows import ROOT

#: The name of the file that tells ranks which wait that it is their turn, before the id of the process that started them.
TURN = ".turn-"


def launch(
    plan: Plan,
    ranks: int,
    arguments: Sequence[str],
    look: Callable[[], None] = lambda: None,
    ahead: bool | None = None,
) -> int:
    """Run `python -m experiments.distributed ARGUMENTS` on so many ranks until every case has rows; the exit code.

    look is called about twice a second. ahead: whether the next ranks are started while the first run (on GPUs), so that behind
    a case that ends its ranks the others go on at once. RuntimeError where ranks end before any case begins.
    """
    plan.begin()
    take_over(plan, ranks)  # folders of a run that was killed
    if not plan.left(ranks):
        return 0
    groups = Groups(plan, ranks, arguments, plan.settings.device == "cuda" if ahead is None else ahead)
    try:
        while True:
            before = len(plan.left(ranks))
            codes = watch(groups.next(), partial(both, groups.begin_ahead, look), after_signal=GRACE)
            take_over(plan, ranks, codes)
            look()
            left = plan.left(ranks)
            if not left:
                return FAILED if failed(plan) else 0  # gloo aborts now and then when all is done
            if len(left) == before:
                raise RuntimeError(
                    f"{ranks} ranks ended with exit codes {codes} before a case began; their errors stand above"
                )
    finally:
        groups.end()


def both(first: Callable[[], None], second: Callable[[], None]) -> None:
    """One after the other."""
    first()
    second()


@dataclass
class Groups:
    """Ranks one after another; the next ones wait, where they are started ahead, with all that takes no GPU behind them."""

    plan: Plan
    ranks: int
    arguments: Sequence[str]
    ahead: bool
    waiting: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def turn(self) -> Path:
        """The file for which they wait."""
        return self.plan.out / f"{TURN}{os.getpid()}"

    def next(self) -> list[subprocess.Popen[bytes]]:
        """The ranks whose turn it is."""
        if not self.waiting:
            return started(self.ranks, self.arguments)
        group, self.waiting = self.waiting, []
        self.turn.touch()
        return group

    def begin_ahead(self) -> None:
        """Start the next ones, once the ranks of now have begun a case and are past imports of their own."""
        if self.ahead and not self.waiting and self.plan.begun.exists():
            self.turn.unlink(missing_ok=True)
            self.waiting = started(self.ranks, self.arguments, str(self.turn))

    def end(self) -> None:
        """Of those that nobody needed."""
        for process in self.waiting:
            process.kill()
            process.wait()
        self.turn.unlink(missing_ok=True)


def stand_by(turn: str) -> None:
    """In a rank that is started ahead: import, and wait for its turn; it ends where the process that started it has ended.

    turn: the file of that process; an empty one is of ranks that begin at once.
    """
    if not turn:
        return
    import ao_lab  # noqa: F401

    while not Path(turn).exists():
        if os.getppid() != int(turn.rpartition("-")[2]):
            os._exit(AGAIN)
        time.sleep(POLL)


def started(ranks: int, arguments: Sequence[str], turn: str = "") -> list[subprocess.Popen[bytes]]:
    """The processes of the cases; turn: for which they wait."""
    package = __name__.rpartition(".")[0]
    return processes(ranks, [sys.executable, "-m", package, *arguments], {STARTED: turn})


def processes(
    ranks: int, command: Sequence[str], variables: Mapping[str, str], errors: IO[bytes] | None = None
) -> list[subprocess.Popen[bytes]]:
    """A process a rank, with the variables that torchrun sets and these. errors: where stderr goes, by default with ours."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), **variables}
    # The store of torchrun's own agent is that of another group.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    return [
        subprocess.Popen(
            list(command),
            env={
                **kept,
                **shared,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(ranks),
            },
            cwd=ROOT,
            stderr=errors,
        )
        for rank in range(ranks)
    ]


def watch(
    group: Sequence[subprocess.Popen[bytes]],
    look: Callable[[], None] = lambda: None,
    limit: float = float("inf"),
    grace: float = GRACE + PATIENCE,
    after_signal: float | None = None,
) -> list[int]:
    """Wait for their ends; where one failed, others have `grace` seconds, all have `limit`, and are then killed. Exit codes.

    after_signal: seconds that others have where one was ended by a signal: they may wait for it in a collective. None: `grace`.
    """
    until = time.monotonic() + limit
    try:
        while any(process.poll() is None for process in group):
            look()
            if ended := [code for process in group if (code := process.poll())]:
                given = grace if after_signal is None or min(ended) >= 0 else after_signal
                until = min(until, time.monotonic() + given)
            if time.monotonic() > until:
                break
            time.sleep(0.4)
    finally:
        for process in group:
            if process.poll() is None:
                process.kill()
    return [process.wait() for process in group]
