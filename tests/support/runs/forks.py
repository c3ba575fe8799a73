"""Python programs in processes of their own that need not import torch again: `python(...)` is `subprocess.run` for them.

Programs of `server="ao_lab"` have imported it and torch's distributed modules, those of `server="transformers"` a model of
transformers and nothing of ours, those of `server="interpreter"` have Triton's interpreter, which is chosen at import. All
workers of a run share the processes that have imported these. Where an import is the subject, a test starts an interpreter of
Python instead.
"""

import fcntl
import json
import os
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import TextIO
from zlib import crc32

ROOT = Path(__file__).resolve().parents[3]
#: Variables that a server has from its start.
VARIABLES = {"interpreter": {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}}


@cache
def connected(server: str) -> TextIO:
    """A connection to the process whose forks run the programs; the first worker that asks starts it."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    address = Path(gettempdir()) / f"ao_lab-{crc32(f'{ROOT} {run}'.encode()):08x}-{server}"
    with address.with_suffix(".lock").open("w") as lock, socket.socket(socket.AF_UNIX) as connection:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            connection.connect(str(address))
        except OSError:  # none yet, or one that ended with the last connection
            address.unlink(missing_ok=True)
            start(server, address)
            connection.connect(str(address))
        return connection.makefile("rw")


def start(server: str, address: Path) -> None:
    """The process, in the background: it listens when this returns."""
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.runs.fork_server", server, str(address)],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **VARIABLES.get(server, {})},
        check=True,
    )


def python(
    *arguments: object,
    server: str = "ao_lab",
    cwd: Path = ROOT,
    env: dict[str, str] | None = None,
    timeout: int = 300,
) -> subprocess.CompletedProcess[str]:
    """What `python *arguments` leaves, run in a fork with these variables besides those of this process."""
    typed = [str(argument) for argument in arguments]
    with TemporaryDirectory() as folder:
        files = {"printed": f"{folder}/printed", "wrong": f"{folder}/wrong"}
        asked = {**files, "folder": str(cwd), "env": env or {}, "seconds": timeout, "arguments": typed}
        print(json.dumps(asked), file=connected(server), flush=True)
        status = int(connected(server).readline())
        printed, wrong = (Path(name).read_text() for name in files.values())
    return subprocess.CompletedProcess(typed, status, printed, wrong)
