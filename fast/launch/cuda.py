"""Kernels in CUDA C++ for Hopper: a record says what a source is made of; from it come its cubin, what is loaded, its launches.

A `CudaLaunch` stands where `launcher.CompiledLaunch` stands for kernels of Triton: `run` on tensors, then by addresses alone
(`launcher.Call`, `fast.prepared`). Listeners to Triton's launches do not hear of it. First stands what sizes and choices go by:
the device that these kernels are for, GPUs of compute capability 9.0.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fast.launch import driver
from fast.launch.launcher import ALIGNMENT, Signature, current_stream, interpreted
from fast.launch.nvrtc import cached_cubin, compile_source, missing_compiler

#: Compute capability.
HOPPER = (9, 0)
#: Multiprocessors of the GPU that times were measured on.
MULTIPROCESSORS = 132
#: Clusters that it runs at once, by their programs, one to a multiprocessor. A cluster lies in one of the GPU's groups of at
#: most 18 multiprocessors, and two of these have fewer than 16 (waves that say so: reports/LOG.md).
AT_ONCE = {1: 132, 2: 66, 4: 30, 8: 14}
#: Bytes of shared memory of a multiprocessor.
SHARED = 233472
#: Bytes of it that each program takes besides its own.
SYSTEM = 1024
#: Bytes of it that a program has at most.
MOST_SHARED = 232448
#: Registers of a multiprocessor.
REGISTERS = 1 << 16
#: Tiles of rows that share their weights' values in the L2 cache.
GROUP = 8
#: Names of dtypes by the numbers that the sources give them.
KINDS = ("float32", "bfloat16", "float16", "int32")


def at_once(cluster: int, multiprocessors: int = MULTIPROCESSORS) -> int:
    """Clusters of so many programs that a device of as many multiprocessors runs at once."""
    return max(1, AT_ONCE[cluster] * multiprocessors // MULTIPROCESSORS)


@lru_cache(maxsize=64)
def capability(index: int) -> tuple[int, int]:
    """Of a CUDA device."""
    return torch.cuda.get_device_capability(index)


@lru_cache(maxsize=64)
def processors_of(index: int) -> int:
    """Multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(index).multi_processor_count


def is_served(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies on such a GPU, and NVRTC is here, which comes with torch's wheels for CUDA."""
    return (
        tensor.is_cuda
        and not interpreted()
        and capability(tensor.get_device()) == HOPPER
        and missing_compiler() is None
    )


OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17")
#: Headers that sources have in common, in the order in which a source includes them.
SHARED_HEADERS = ("words.cuh", "copies.cuh", "output.cuh", "tiles.cuh", "store.cuh", "scaled.cuh")
SHARED_FOLDER = Path(__file__).parent.parent / "kernels" / "hopper"
#: Bytes of the tensor maps that are a kernel's first argument, where it has some: three.
MAPS = 3 * driver.MAP_BYTES
#: Addresses of operands whose tensor maps a launch keeps.
MOST_MAPS = 1024
#: Among the numbers of a launch: that of the bias's dtype in KINDS, 0 where there is no bias.
BIAS = None

#: What launches on a stream: of addresses in the order of the pointers, None for what is not there.
Function = Callable[[int, Sequence[int | None]], Any]
#: Numbers among the arguments of a kernel: how they lie, as `struct` has it, and what they are.
Numbers = tuple[str, tuple[int | None, ...]]


@dataclass(frozen=True, eq=False)
class Kernel:
    """A source in CUDA C++ and how it is launched.

    name: of the family, the file and the entry point; a variant may say another file by `source`. folder: where it is. defines:
    of a variant and a problem, whose fields are plain. own, shared: headers beside it, and of SHARED_HEADERS; generated:
    others, by name. programmatic: whether it may begin while the kernel in front ends, whose results it waits for. instead:
    what happens where it does not compile or load. fails_whole: whether no other variant of a problem is tried after one that
    failed.
    """

    name: str
    folder: Path
    defines: Callable[[Any, Any], Mapping[str, Any]]
    own: tuple[str, ...] = ()
    shared: tuple[str, ...] = SHARED_HEADERS
    generated: Callable[[Any, Any], dict[str, str]] = lambda variant, problem: {}
    programmatic: bool = False
    instead: str = "another kernel multiplies"
    fails_whole: bool = False

    def sources(self, variant: Any, problem: Any) -> tuple[str, dict[str, str], tuple[str, ...]]:
        """Source, headers and options for NVRTC."""
        headers = self.generated(variant, problem)
        headers |= {name: _text(self.folder / name) for name in self.own}
        headers |= {name: _text(SHARED_FOLDER / name) for name in self.shared}
        defined = (f"-D{name}={value}" for name, value in self.defines(variant, problem).items())
        return (
            _text(self.folder / getattr(variant, "source", f"{self.name}.cu")),
            headers,
            (*OPTIONS, *defined),
        )

    def cubin(self, variant: Any, problem: Any) -> bytes:
        """Compiled, or from disk."""
        return cached_cubin(*self.sources(variant, problem), name=self.name)

    def compiled(self, variant: Any, problem: Any, *, ptx: bool = False) -> tuple[bytes, str]:
        """Compiled anew: the cubin or the PTX, and what the compiler says."""
        return compile_source(*self.sources(variant, problem), ptx=ptx, name=self.name)


#: Why a variant (None: each one) of a kernel for a problem did not compile or load on a device, in this process.
FAILURES: dict[tuple[Kernel, Any, Any, int], str] = {}


@lru_cache(maxsize=64)
def _text(path: Path) -> str:
    return path.read_text()


@lru_cache(maxsize=1024)
def loaded(kernel: Kernel, variant: Any, problem: Any, device: int) -> ctypes.c_void_p:
    """The kernel of a variant on a device, compiled at first use."""
    return driver.function_of(kernel.cubin(variant, problem), kernel.name, MOST_SHARED, device)


@lru_cache(maxsize=1024)
def is_loadable(kernel: Kernel, variant: Any, problem: Any, device: int, shared: int = 0) -> bool:
    """Whether a variant compiles and loads; where one does not, a warning says why. shared: bytes of its
    shared memory, where the driver has to say how many of its clusters run at once, too."""
    if failure(kernel, variant, problem, device) is not None:
        return False
    try:
        if shared:
            clusters_at_once(kernel, variant, problem, shared, device)
        return bool(loaded(kernel, variant, problem, device))
    except (RuntimeError, OSError) as error:
        FAILURES[_failing(kernel, variant, problem, device)] = str(error)
        warnings.warn(f"{kernel.name} is left out, {kernel.instead}: {error}", stacklevel=3)
        return False


def failure(kernel: Kernel, variant: Any, problem: Any, device: int) -> str | None:
    """Why a variant did not compile or load, as `is_loadable` found; None where it did, or was not tried yet."""
    return FAILURES.get(_failing(kernel, variant, problem, device)) if FAILURES else None


def _failing(kernel: Kernel, variant: Any, problem: Any, device: int) -> tuple[Kernel, Any, Any, int]:
    """The key of FAILURES."""
    return kernel, None if kernel.fails_whole else variant, problem, device


@lru_cache(maxsize=1024)
def clusters_at_once(kernel: Kernel, variant: Any, problem: Any, shared: int, device: int) -> int:
    """How many clusters of a variant the device runs at once, at least one."""
    function = loaded(kernel, variant, problem, device)
    return max(1, driver.clusters_at_once(function, variant.cluster, variant.threads, shared, device))


class Maps(dict[tuple[int, ...], bytes]):
    """Tensor maps by the addresses that `describe` makes them of; the oldest of more than MOST_MAPS are forgotten.

    count: pointers that kernels read through them alone, the first ones. at: places of the pointers whose addresses are asked
    for.
    """

    def __init__(self, describe: Callable[..., bytes], count: int, at: tuple[int, ...]) -> None:
        super().__init__()
        self.describe, self.count, self.at = describe, count, at

    def __missing__(self, at: tuple[int, ...]) -> bytes:
        result = self.describe(*at)
        while len(self) >= MOST_MAPS:
            self.pop(self._oldest(), None)
        self[at] = result
        return result

    def _oldest(self) -> tuple[int, ...]:
        """The addresses that came first; none where another thread is changing this."""
        try:
            return next(iter(self), ())
        except RuntimeError:
            return ()


class Compiled(NamedTuple):
    """What was compiled for a signature: `function(stream, addresses)` launches."""

    function: Function


class CudaLaunch:
    """A variant of a kernel with its sizes, in place of a `launcher.CompiledLaunch`.

    names: of its pointers. Its arguments are tensor maps, where it has some, then the addresses that these do not stand for,
    then `numbers`, of which BIAS is filled in; where `behind` is not None, the address of the last pointer and further numbers.
    """

    def __init__(
        self, kernel: Kernel, variant: Any, problem: Any, names: tuple[str, ...], programs: int, shared: int,
        numbers: Numbers, *, behind: Numbers | None = None, maps: Maps | None = None,
    ) -> None:  # fmt: skip
        self.kernel, self.variant, self.problem, self.names = kernel, variant, problem, names
        self.programs, self.shared, self.numbers, self.behind, self.maps = (
            programs,
            shared,
            numbers,
            behind,
            maps,
        )
        self.compiled: dict[Signature, Compiled] = {}

    def run(self, pointers: Sequence[torch.Tensor | None], device: int) -> Signature:
        """Run on contiguous tensors of one device, on its current stream; what it was compiled for."""
        tensors = [one if one is None or one.data_ptr() % ALIGNMENT == 0 else one.clone() for one in pointers]
        signature = (device, *(None if one is None else one.dtype for one in tensors))
        known = self.compiled.get(signature)
        if known is None:
            bias = tensors[self.names.index("bias")] if "bias" in self.names else None
            kind = 0 if bias is None else KINDS.index(str(bias.dtype).removeprefix("torch."))
            known = self.compiled[signature] = Compiled(self.function(kind, device))
        with torch.cuda.device(device):
            addresses = [None if one is None else one.data_ptr() for one in tensors]
            known.function(current_stream(device), addresses)  # type: ignore[misc]
        return signature

    def function(self, bias_kind: int, device: int) -> Function:
        """What launches with a bias of a dtype, by its number in KINDS."""
        image, last = self.arguments(bias_kind)
        attributes = (driver.PROGRAMMATIC,) if self.kernel.programmatic else ()
        start = Start(
            image,
            MAPS if self.maps is not None else 0,
            self.programs,
            self.variant.threads,
            self.shared,
            attributes,
        )
        function = loaded(self.kernel, self.variant, self.problem, device)
        if self.maps is None:
            return launcher(function, start, len(self.names), self.kernel.name)
        return mapped_launcher(function, start, self.maps, len(self.names), last, self.kernel.name)

    def arguments(self, bias_kind: int) -> tuple[bytes, int | None]:
        """The arguments, addresses and tensor maps left out; and where the last address stands, if that is behind numbers."""
        maps, count = (f"{MAPS}s", self.maps.count) if self.maps is not None else ("", 0)
        front = len(self.names) - count - (self.behind is not None)
        layout = f"={maps}{front}Q{self.numbers[0]}"
        values: list[Any] = [b""] * bool(maps) + [0] * front
        values += [bias_kind if one is BIAS else one for one in self.numbers[1]]
        if self.behind is None:
            return struct.pack(layout, *values), None
        return struct.pack(f"{layout}Q{self.behind[0]}", *values, 0, *self.behind[1]), struct.calcsize(layout)


class Start(NamedTuple):
    """How a launch begins: its arguments, of which the first has so many bytes (0: there is one), and its configuration."""

    arguments: bytes
    first: int
    programs: int
    threads: int
    shared: int
    attributes: tuple[int, ...] = ()


class _Ready(threading.local):
    """The arguments and the configuration of a launch, which each thread has for itself: others may launch meanwhile.

    Made once, as making them takes a thread longer than filling in what differs (times: reports/LOG.md).
    """

    def __init__(self, start: Start) -> None:
        memory = ctypes.create_string_buffer(start.arguments, len(start.arguments))
        address = ctypes.addressof(memory)
        places = (address, address + start.first) if start.first else (address,)
        self.attributes = (driver.LaunchAttribute * max(1, len(start.attributes)))(
            *(driver.LaunchAttribute(one, 0, (ctypes.c_uint * 16)(1)) for one in start.attributes)
        )
        first = ctypes.addressof(self.attributes) if start.attributes else None
        config = driver.LaunchConfig(
            (start.programs, 1, 1), (start.threads, 1, 1), start.shared, None, first, len(start.attributes)
        )
        self.parts = memory, (ctypes.c_void_p * len(places))(*places), config, ctypes.byref(config)


def launcher(function: ctypes.c_void_p, start: Start, count: int, name: str) -> Function:
    """A launch on a stream, of so many addresses, which stand in front of the other arguments.

    By `cuLaunchKernelEx`, whose four arguments take ctypes less time than eleven.
    """
    launch, ready = driver.driver().cuLaunchKernelEx, _Ready(start)
    pack = struct.Struct(f"={count}Q").pack_into

    def run(stream: int, addresses: Sequence[int | None]) -> None:
        memory, arguments, config, place = ready.parts
        pack(memory, 0, *[address or 0 for address in addresses])
        config.stream = stream
        status = launch(place, function, arguments, None)
        if status:
            _again(status, launch, (place, function, arguments), name)

    return run


def mapped_launcher(
    function: ctypes.c_void_p, start: Start, maps: Maps, count: int, last: int | None, name: str
) -> Function:
    """The same of a kernel with tensor maps, of `count` addresses. last: where the last one stands, if behind numbers."""
    launch, ready, at, first = (
        driver.driver().cuLaunchKernelEx,
        _Ready(start),
        itemgetter(*maps.at),
        maps.count,
    )
    end = count if last is None else count - 1
    pack, pack_last = struct.Struct(f"={MAPS}s{end - first}Q").pack_into, struct.Struct("=Q").pack_into

    def run(stream: int, addresses: Sequence[int | None]) -> None:
        memory, arguments, config, place = ready.parts
        pack(memory, 0, maps[at(addresses)], *[address or 0 for address in addresses[first:end]])
        if last is not None:
            pack_last(memory, last, addresses[end])
        config.stream = stream
        status = launch(place, function, arguments, None)
        if status:
            _again(status, launch, (place, function, arguments), name)

    return run


def _again(status: int, launch: Any, given: tuple[Any, Any, Any], name: str) -> None:
    """Repeat a launch of a thread that had no context, which is made; RuntimeError for other failures."""
    if status == driver.NO_CONTEXT:
        driver.ensure_context(torch.cuda.current_device())
        status = launch(*given, None)
    driver.check(status, f"launching {name}")


__all__ = [
    "AT_ONCE",
    "BIAS",
    "GROUP",
    "HOPPER",
    "KINDS",
    "MAPS",
    "MOST_SHARED",
    "MULTIPROCESSORS",
    "REGISTERS",
    "SHARED",
    "SYSTEM",
    "Compiled",
    "CudaLaunch",
    "Kernel",
    "Maps",
    "Start",
    "at_once",
    "capability",
    "clusters_at_once",
    "failure",
    "is_loadable",
    "is_served",
    "launcher",
    "loaded",
    "mapped_launcher",
    "processors_of",
]
