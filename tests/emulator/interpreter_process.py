"""Programs that compare kernels in Triton's interpreter, each in a process of its own: the interpreter is chosen at import.

    TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process PROGRAM [ARGUMENT ...]

PROGRAM is a module of `tests.emulator.programs`, whose `main` takes the arguments, prints what agreed, and raises at the first
difference.
"""

import importlib
import sys

import numpy as np
import triton

from tests.support.runs import forks

#: Seconds after which a program is ended; the longest of the night takes some minutes.
TIMEOUT = 3600


def lines_of(*command):
    """What a program prints before all agreed."""
    done = forks.python("-m", __name__, *command, server="interpreter", timeout=TIMEOUT)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, "\n".join([str(done.returncode), *lines[-1:], done.stderr[-3000:]])
    assert lines[-1] == "agreed"
    return lines[:-1]


def main(name, *arguments):
    """Run a program."""
    assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 is missing"
    with np.errstate(all="ignore"):
        importlib.import_module(f"tests.emulator.programs.{name}").main(*arguments)
    print("agreed", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
