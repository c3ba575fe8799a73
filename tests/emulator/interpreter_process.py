"""Programs that compare kernels in Triton's interpreter, each in a process of its own: the interpreter is chosen at import."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def lines_of(*command):
    """What a program prints before it says that all agreed."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, "\n".join([*lines[-1:], done.stderr[-3000:]])
    assert lines[-1] == "agreed"
    return lines[:-1]
