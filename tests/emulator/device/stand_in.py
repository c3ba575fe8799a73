"""A device for launches of kernels in CUDA C++ (`fast.launch.cuda`): the emulator runs their PTX on CPU tensors, outputs are
poisoned and lie between guards."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

from fast.launch import cuda, driver, launcher, nvrtc
from fast.launch.launcher import Call
from tests.emulator.device.machine import Machine
from tests.emulator.device.memory import POISON, Memory, TensorMap
from tests.emulator.device.program import parsed
from tests.emulator.faults import unchanged

GUARD, MAP = 64, driver.MAP_BYTES
#: What a kernel says of the programs of a cluster.
CLUSTER = re.compile(r"^\.reqnctapercluster (\d+)", re.MULTILINE)
INCLUDE = re.compile(r'^#include "([\w.]+)".*$', re.MULTILINE)


class Handle(NamedTuple):
    """In place of what the driver loads. sizes: of arguments, in bytes; cluster: programs of one."""

    ptx: str
    sizes: tuple[int, ...]
    cluster: int


class StandIn:
    """Its memory is that of the tensors that it was given, and of outputs.

    early: when copies arrive; see `machine`. late: a launch is done when the next one waits for it, where that may begin before
    it has ended, so that what is read without waiting is poison. at_once: clusters that it runs at once, so that persistent
    programs have several tiles. change: what is done with the kernel's source, to plant faults.
    """

    def __init__(
        self, *, early: bool = False, seed: int = 0, at_once: int = 1, change: Callable[[str], str] = unchanged,
        late: bool = False,
    ) -> None:  # fmt: skip
        self.memory, self.early, self.seed, self.at_once, self.change = Memory(), early, seed, at_once, change
        self.late, self.front = late, list[Callable[[], None]]()
        self.outputs: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Let kernels see a tensor."""
        self.memory.regions[tensor.data_ptr()] = bytes_at(tensor.data_ptr(), tensor.nbytes)
        return tensor

    def empty(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        """An output."""
        size = int(np.prod(shape)) * dtype.itemsize
        whole = torch.empty(size + 2 * GUARD, dtype=torch.uint8).fill_(POISON)
        self.outputs.append(whole)
        return self.add(whole[GUARD : GUARD + size].view(dtype).view(shape))

    def made(self, function: Callable[[], Any], *operands: torch.Tensor | None) -> Any:
        """What a function makes, whose kernels see these operands. ValueError where one wrote outside of its output."""
        for one in operands:
            if one is not None and one.numel():
                self.add(one)
        with self.installed():
            made = function()
            self._done()
        for whole in self.outputs:
            if not bool((whole[:GUARD] == POISON).all() and (whole[-GUARD:] == POISON).all()):
                raise ValueError("the kernel wrote outside of its output")
        return made

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take the place of the GPU."""
        library = SimpleNamespace(cuLaunchKernelEx=self._launch, cuTensorMapEncodeTiled=_describe)
        allocate, run = Call.allocate, cuda.CudaLaunch.run
        empty = lambda shape, strides, dtype: self.empty(shape, dtype)  # noqa: E731

        def allocated(call: Call, name: str, shape: Any, dtype: Any, fill: Any = ()) -> torch.Tensor:
            allocate(call, name, shape, dtype, fill)
            call.tensors[name] = self.empty(shape, call.tensors[name].dtype)
            return call.tensors[name]

        def anew(one: Any, pointers: Any, device: int) -> Any:
            one.compiled.clear()  # of another stand-in's source
            if one.maps is not None:
                one.maps.clear()
            return run(one, pointers, device)

        with (
            mock.patch.object(driver, "driver", return_value=library),
            mock.patch.object(cuda, "clusters_at_once", return_value=self.at_once),
            mock.patch.object(cuda, "is_loadable", return_value=True),
            mock.patch.object(cuda, "loaded", self._loaded),
            mock.patch.object(cuda, "current_stream", return_value=0),
            mock.patch.object(launcher, "current_stream", return_value=0),
            mock.patch.object(launcher, "current_device", return_value=-1),
            mock.patch.object(launcher, "allocator", return_value=empty),
            mock.patch.object(cuda.CudaLaunch, "run", anew),
            mock.patch.object(Call, "allocate", allocated),
        ):
            yield

    def _loaded(self, kernel: cuda.Kernel, variant: Any, problem: Any, device: int) -> Handle:
        ptx = compiled(*kernel.sources(variant, problem), self.change)
        found = CLUSTER.search(ptx)
        cluster = int(found[1]) if found else getattr(variant, "cluster", getattr(variant, "splits", 1))
        return Handle(ptx, tuple(parsed(ptx).parameters.values()), cluster)

    def _launch(self, place: Any, function: Handle, arguments: Any, nothing: None) -> int:
        """As the driver's."""
        config = place._obj
        given = [
            np.frombuffer(ctypes.string_at(at, size), np.uint8).copy()
            for at, size in zip(arguments, function.sizes, strict=True)
        ]
        found = {}
        if len(given) > 1:
            texts = {at: given[0][at : at + MAP].tobytes() for at in range(0, cuda.MAPS, MAP)}
            found = {(0, at): described(text) for at, text in texts.items() if any(text)}
        machine = Machine(
            function.ptx, self.memory, given, found, threads=config.block[0], shared=config.shared, early=self.early,
            seed=self.seed,
        )  # fmt: skip
        if (
            config.count and self.front
        ):  # of attributes there is one: it may begin before the launch in front has ended
            machine.front = self.front.pop()
        self._done()
        self.front.append(lambda: machine.run(config.grid[0], function.cluster, self.at_once))
        if not self.late:
            self._done()
        return 0

    def _done(self) -> None:
        """Do the launch in front."""
        while self.front:
            self.front.pop()()


def compiled(
    source: str, headers: Mapping[str, str], options: Sequence[str], change: Callable[[str], str] = unchanged
) -> str:
    """The PTX of a source, changed with all that it includes."""
    return ptx_of(change(INCLUDE.sub(lambda found: headers[found[1]], source)), tuple(options))


@lru_cache(maxsize=16)
def ptx_of(source: str, options: tuple[str, ...]) -> str:
    """The PTX of a whole source: a kernel is run in several ways, and with other inputs."""
    return nvrtc.compile_source(source, {}, options, ptx=True)[0].decode().rstrip("\0")


def bytes_at(address: int, size: int) -> Any:
    """Memory as an array."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def _describe(
    made: Any, kind: int, rank: int, address: Any, sizes: Any, strides: Any, box: Any, *rest: Any
) -> int:
    """As the driver's `cuTensorMapEncodeTiled`, for `described`."""
    length, rows = sizes
    made[:] = struct.pack("<5q", address.value, rows, length, box[1], box[0]).ljust(MAP, b"\0")
    return 0


def described(text: bytes) -> TensorMap:
    """What `_describe` wrote."""
    address, rows, length, high, wide = struct.unpack("<5q", text[:40])
    return TensorMap(bytes_at(address, rows * length).reshape(rows, length), (high, wide))


__all__ = ["MAP", "StandIn", "bytes_at", "compiled"]
