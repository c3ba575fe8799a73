"""Runs Python programs in forks of one process that has imported a library, which takes longer than most of them.

    python -m tests.support.runs.fork_server ao_lab SOCKET
    python -m tests.support.runs.fork_server transformers SOCKET
    TRITON_INTERPRET=1 python -m tests.support.runs.fork_server interpreter SOCKET

Listens at a socket, in the background, and ends with the last connection. A connection reads one JSON object a line: files for
what is printed and what goes wrong, the folder, variables of the environment, seconds and the arguments of `python`; writes the
program's exit status. A fork starts from imports and nothing else: no program sees what another has changed.
`tests.support.runs.forks` asks; programs whose imports are the subject start an interpreter instead.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import traceback
import types
from collections.abc import Iterator
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
#: Seconds without a connection, or between two looks at whether one is left.
PATIENCE = 1.0
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


def serve(connection: socket.socket) -> None:
    """Run what is asked for until nobody asks any more."""
    with connection.makefile("rw") as lines:
        for line in lines:
            process = os.fork()
            if not process:
                run(**json.loads(line))
            print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), file=lines, flush=True)


def connections(listener: socket.socket) -> Iterator[socket.socket]:
    """Those that come, until the last of the processes that serve them has ended; nobody may come later than `PATIENCE`."""
    listener.settimeout(PATIENCE)
    came = False
    while True:
        try:
            yield listener.accept()[0]
            came = True
        except TimeoutError:
            if not came or not is_serving():
                return


def is_serving() -> bool:
    """Whether a process of this one is left; those that ended are let go of."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def in_background() -> bool:
    """Whether this is the process that goes on, of which nobody waits for the end and nobody reads what it prints."""
    if os.fork():
        return False
    os.setsid()
    for stream in range(2):
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    return True


def main(server: str, address: str) -> None:
    """Listen, so that whoever asks may wait, and import what programs need."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    if not in_background():
        return
    import_all(MODULES[server])
    prepare_numba()
    gc.freeze()  # what was imported lives as long as the process
    gc.set_threshold(ALLOCATIONS, *gc.get_threshold()[1:])
    for connection in connections(listener):
        with connection:
            if not os.fork():
                listener.close()
                serve(connection)
                os._exit(0)
    for name in (address, f"{address}.lock"):
        os.unlink(name)


if __name__ == "__main__":
    main(*sys.argv[1:])
