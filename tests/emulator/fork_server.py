"""Runs programs in forks of one process that has imported what they share: that takes longer than most of them.

    TRITON_INTERPRET=1 python -m tests.emulator.fork_server

Reads one JSON list a line, a file for what is printed, one for what goes wrong, and the program with its arguments; writes the
program's exit status. A fork starts from nothing but imports: no program sees what another has changed.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
import traceback

# What the programs import; nothing of it computes, and no thread is started.
import ao_lab.testing.strategies  # noqa: F401
import tests.emulator.ptx_interpreter
import tests.emulator.quick_interpreter
import tests.gpu.kernels.formats
import tests.gpu.kernels.provided_scales  # noqa: F401

#: Allocations between two looks at the youngest objects, of which a kernel's operations make many.
ALLOCATIONS = 20_000


def run(printed: str, wrong: str, command: list[str]) -> None:
    """The program, in this process, which ends with it."""
    status = 1
    try:
        for target, name in enumerate((os.devnull, printed, wrong)):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), target)
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")
        status = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """Run what is asked for until nobody asks any more."""
    # What was imported lives as long as the process: no fork looks for garbage in it.
    gc.freeze()
    gc.set_threshold(ALLOCATIONS, *gc.get_threshold()[1:])
    for line in sys.stdin:
        printed, wrong, *command = json.loads(line)
        process = os.fork()
        if not process:
            run(printed, wrong, command)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
