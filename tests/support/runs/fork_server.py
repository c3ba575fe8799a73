"""Runs Python programs in forks of one process that has imported a library, which takes longer than most of them.

    python -m tests.support.runs.fork_server ao_lab
    python -m tests.support.runs.fork_server transformers
    TRITON_INTERPRET=1 python -m tests.support.runs.fork_server interpreter

Reads one JSON object a line: files for what is printed and what goes wrong, the folder, variables of the environment, seconds
and the arguments of `python`; writes the program's exit status. A fork starts from imports and nothing else: no program sees
what another has changed. `tests.support.runs.forks` asks; programs whose imports are the subject start an interpreter instead.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import sys
import traceback
import types
from typing import Any

#: What programs import, by the name of a server; nothing of it computes, and no thread is started. Of transformers' programs
#: some are those of a user who has nothing of ours.
MODULES = {
    "ao_lab": [
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "ao_lab",
        "fast",
        "fast.cpu.dequantize",  # these with Numba half a second of each rank
        "fast.cpu.linear",
        "fast.cpu.loops.gemv",
        "fast.cpu.loops.rounding",
        "fast.cpu.quantize",
        "tests.support.distributed.ranks",
    ],
    "transformers": ["torch", "compressed_tensors", "transformers.models.llama.modeling_llama"],
    "interpreter": [
        "torch._dynamo",  # with Numba a second of most programs
        "numba",
        "ao_lab.testing.strategies",
        "tests.emulator.ptx_interpreter",
        "tests.emulator.quick_interpreter",
        "tests.gpu.kernels.schemes",
        "tests.gpu.kernels.scales",
    ],
}
LAZY = ("ao_lab",)
#: Allocations between two looks at the youngest objects, of which a kernel's operations in the interpreter make many.
ALLOCATIONS = 20_000


def run(
    printed: str, wrong: str, folder: str, env: dict[str, str], seconds: int, arguments: list[str]
) -> None:
    """The program, in this process, which ends with it."""
    status = 1
    try:
        for target, name in enumerate((os.devnull, printed, wrong)):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), target)
        os.environ.update(env)
        os.chdir(folder)
        signal.alarm(seconds)
        start(arguments)
        status = 0
    except SystemExit as end:
        status = status_of(end.code)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def start(arguments: list[str]) -> None:
    """As `python` does with -c, -m or the name of a file."""
    kind, *rest = arguments
    if kind == "-c":
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(kind, run_name="__main__")


def status_of(code: Any) -> int:
    """The exit status of `sys.exit(code)`."""
    if isinstance(code, str):
        print(code, file=sys.stderr)
    return code if isinstance(code, int) else int(code is not None)


def import_all(names: list[str]) -> None:
    """Modules; of those that import a name where it is first used, all public names."""
    for name in names:
        module = importlib.import_module(name)
        for public in module.__all__ if name in LAZY else ():
            getattr(module, public)


def prepare_numba() -> None:
    """What Numba imports at its first compilation, a second of each program that has one, where it is imported already."""
    if "numba" in sys.modules:
        target = importlib.import_module("numba.core.registry").cpu_target
        target.typing_context.refresh()
        target.target_context.refresh()


def main() -> None:
    """Run what is asked for until nobody asks any more."""
    import_all(MODULES[sys.argv[1]])
    prepare_numba()
    gc.freeze()  # what was imported lives as long as the process
    gc.set_threshold(ALLOCATIONS, *gc.get_threshold()[1:])
    for line in sys.stdin:
        process = os.fork()
        if not process:
            run(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
