"""Which kernels a call launches on a GPU: what the column `kernel` of its rows says.

The call is captured into a CUDA graph and the driver names its kernel nodes. No profiler: once one has run in a process, every
later launch costs the host twice as much (measured: 2.3 times, until the process ends).
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.autograd.profiler_legacy import profile

from ao_lab.cli.terminal import say
from ao_lab.measure.turns import recorded
from experiments.harness.measuring import Wrong

#: Distinct kernels that are named; of more, the first, and how many others there are.
NAMED = 3
#: Characters of a name: libraries write whole types into theirs.
LENGTH = 60
#: CU_GRAPH_NODE_TYPE_KERNEL.
KERNEL_NODE = 0


class Parameters(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS, version 2, of the CUDA driver API."""

    _fields_ = (
        ("func", ctypes.c_void_p),
        ("sizes", ctypes.c_uint * 7),
        ("arguments", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


def launched(call: Callable[[], object]) -> str:
    """Names of the kernels of a call in the order of their first launch, joined by " + "; nothing without a GPU, where the call
    cannot be captured, and by a driver that does not name kernels (before CUDA 12.3).

    The call runs once before, so that nothing is compiled in the capture.
    """
    if not torch.cuda.is_available():
        return ""
    try:
        return captured(call)
    except (AttributeError, OSError, RuntimeError) as error:
        # A time without the name of its kernel is worth more than none.
        say(f"the kernels of a call are not named: {type(error).__name__}: {error}")
        return ""


def captured(call: Callable[[], object]) -> str:
    """The same of a call that can be captured."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with recorded(graph, torch.cuda.Stream()):
        kept = call()
    names = list(dict.fromkeys(short(name) for name in kernel_names(graph.raw_cuda_graph())))
    del kept
    return joined(names)


def kernel_names(graph: int) -> Iterator[str]:
    """The names of a graph's kernel nodes, in the order in which they were captured."""
    driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_size_t()
    check(driver.cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count)))
    nodes = (ctypes.c_void_p * count.value)()
    check(driver.cuGraphGetNodes(ctypes.c_void_p(graph), nodes, ctypes.byref(count)))
    for node in nodes:
        kind, found, name = ctypes.c_int(), Parameters(), ctypes.c_char_p()
        check(driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)))
        if kind.value != KERNEL_NODE:
            continue
        check(driver.cuGraphKernelNodeGetParams_v2(ctypes.c_void_p(node), ctypes.byref(found)))
        ask, handle = (
            (driver.cuFuncGetName, found.func) if found.func else (driver.cuKernelGetName, found.kern)
        )
        check(ask(ctypes.byref(name), ctypes.c_void_p(handle)))
        yield (name.value or b"").decode()


def check(status: int) -> None:
    """RuntimeError for a status of the driver that is not success."""
    if status:
        raise RuntimeError(f"the CUDA driver cannot name the kernels of a graph: CUresult {status}")


def joined(names: list[str]) -> str:
    """As one cell."""
    more = [f"{len(names) - NAMED} more"] if len(names) > NAMED else []
    return " + ".join([*names[:NAMED], *more])


def short(name: str) -> str:
    """A kernel's name as C++ has it, without return type, arguments and the arguments of templates."""
    name = re.sub(r"\(anonymous namespace\)::|^void ", "", demangled(name)).partition("(")[0]
    while re.search(r"<[^<>]*>", name):
        name = re.sub(r"<[^<>]*>", "", name)
    return name.strip()[:LENGTH]


def demangled(name: str) -> str:
    """A name of C++ as it was written; any other as it is."""
    if not name.startswith("_Z"):
        return name
    demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    demangle.restype, status = ctypes.c_void_p, ctypes.c_int()
    found = demangle(name.encode(), None, None, ctypes.byref(status))
    text = ctypes.cast(found, ctypes.c_char_p).value if found else None
    ctypes.CDLL(None).free(ctypes.c_void_p(found))
    return name if text is None else text.decode()


# Whether what is measured as compiled runs compiled: torch.compile runs what it does not follow without a word.

#: What torch's profiler calls a run of a compiled program, with the program's number behind it.
REGION = "Torch-Compiled Region"


@contextmanager
def compiled_runs(wanted: bool = True) -> Iterator[None]:
    """Wrong where no compiled program runs inside and one is wanted: its rows would call compiled what ran operation by
    operation. What runs inside has been compiled before; the program may be one that another model has left.

    By torch's older profiler: after the newer one, on a GPU, every launch of the process takes the host longer.
    """
    if not wanted:
        yield
        return
    with profile() as seen:
        yield
    if not any(event.name.startswith(REGION) for event in seen.function_events or ()):
        raise Wrong("nothing was compiled: it ran operation by operation, and is no row of what is compiled")
