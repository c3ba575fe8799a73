"""Programs that compare kernels in Triton's interpreter, each in a process of its own: the interpreter is chosen at import."""

import atexit
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]


@cache
def server():
    """The process whose forks run the programs that this one asks for."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.emulator.fork_server"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.communicate)
    return process


def printed_by(*command):
    """What a program prints, which has to end well."""
    with TemporaryDirectory() as folder:
        printed, wrong = Path(folder, "printed"), Path(folder, "wrong")
        print(json.dumps([str(printed), str(wrong), *command]), file=server().stdin, flush=True)
        status = server().stdout.readline()
        lines = printed.read_text().splitlines()
        assert status == "0\n", "\n".join([status, *lines[-1:], wrong.read_text()[-3000:]])
    return lines


def lines_of(*command):
    """What a program prints before it says that all agreed."""
    lines = printed_by(*command)
    assert lines[-1] == "agreed"
    return lines[:-1]
