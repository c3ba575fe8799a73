"""Starts ranks as processes of this host, and starts them again behind a case that ended them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from experiments.distributed.ranks import FAILED, GRACE, PATIENCE, STARTED, Plan, failed, take_over
from experiments.harness.rows import ROOT

#: How often ranks are started at most.
STARTS = 30


def launch(plan: Plan, ranks: int, arguments: Sequence[str], look: Callable[[], None] = lambda: None) -> int:
    """Run `python -m experiments.distributed ARGUMENTS` on so many ranks until every case has rows; the exit code.

    look is called about twice a second. RuntimeError where ranks end before any case begins.
    """
    plan.begin()
    take_over(plan, ranks)  # folders of a run that was killed
    for _ in range(STARTS):
        before = len(plan.left(ranks))
        codes = watch(started(ranks, arguments), look)
        take_over(plan, ranks, codes)
        look()
        left = plan.left(ranks)
        if not left:
            return FAILED if failed(plan) else 0  # gloo aborts now and then when all is done
        if len(left) == before:
            raise RuntimeError(
                f"{ranks} ranks ended with exit codes {codes} before a case began; their errors stand above"
            )
    raise RuntimeError(f"ranks were started {STARTS} times, and {len(plan.left(ranks))} cases are left")


def started(ranks: int, arguments: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    """The processes of the cases."""
    package = __name__.rpartition(".")[0]
    return processes(ranks, [sys.executable, "-m", package, *arguments], {STARTED: "1"})


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
) -> list[int]:
    """Wait for their ends; where one failed, others have `grace` seconds, all have `limit`, and are then killed. Exit codes."""
    until = time.monotonic() + limit
    try:
        while any(process.poll() is None for process in group):
            look()
            if any(process.poll() for process in group):
                until = min(until, time.monotonic() + grace)
            if time.monotonic() > until:
                break
            time.sleep(0.4)
    finally:
        for process in group:
            if process.poll() is None:
                process.kill()
    return [process.wait() for process in group]
