"""Python programs in processes of their own that need not import torch again: `python(...)` is `subprocess.run` for them."""

import atexit
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[3]


@cache
def server() -> subprocess.Popen[str]:
    """The process whose forks run the programs that this one asks for."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.support.runs.fork_server"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.communicate)
    return process


def python(
    *arguments: object, cwd: Path = ROOT, env: dict[str, str] | None = None, timeout: int = 300
) -> subprocess.CompletedProcess[str]:
    """What `python *arguments` leaves, run in a fork with these variables besides those of this process."""
    typed = [str(argument) for argument in arguments]
    with TemporaryDirectory() as folder:
        files = {"printed": f"{folder}/printed", "wrong": f"{folder}/wrong"}
        asked = {**files, "folder": str(cwd), "env": env or {}, "seconds": timeout, "arguments": typed}
        print(json.dumps(asked), file=server().stdin, flush=True)
        status = int(server().stdout.readline())
        printed, wrong = (Path(name).read_text() for name in files.values())
    return subprocess.CompletedProcess(typed, status, printed, wrong)
