"""Python programs in processes of their own that need not import torch again: `python(...)` is `subprocess.run` for them.

Programs of `server="ao_lab"` have imported it and torch's distributed modules, those of `server="transformers"` a model of
transformers and nothing of ours, those of `server="interpreter"` have Triton's interpreter, which is chosen at import. Where an
import is the subject, a test starts an interpreter of Python instead.
"""

import atexit
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[3]
#: Variables that a server has from its start.
VARIABLES = {"interpreter": {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}}


@cache
def started(server: str) -> subprocess.Popen[str]:
    """The process whose forks run the programs that this one asks for."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.support.runs.fork_server", server],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **VARIABLES.get(server, {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.communicate)
    return process


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
        print(json.dumps(asked), file=started(server).stdin, flush=True)
        status = int(started(server).stdout.readline())
        printed, wrong = (Path(name).read_text() for name in files.values())
    return subprocess.CompletedProcess(typed, status, printed, wrong)
