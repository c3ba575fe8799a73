"""`fast.kernels.sm90_sparse24_gemm.host` on CPU tensors: its launches run in the emulator, outputs are poisoned and lie between
guards."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from unittest import mock

import numpy as np
import torch

from fast.kernels.sm90_sparse24_gemm import host
from fast.kernels.sm90_sparse24_gemm.arrange import arrange
from fast.kernels.sm90_sparse24_gemm.variants import ELEMENTS, Variant, sources
from fast.launch import nvrtc
from tests.emulator.device.machine import Machine
from tests.emulator.device.memory import POISON, Memory, TensorMap

GUARD, MAP = 64, 128
INCLUDE = re.compile(r'^#include "([\w.]+)".*$', re.MULTILINE)


class StandIn:
    """A device: its memory is that of the tensors that it was given, and of outputs.

    early: when copies arrive; see `machine`. at_once: clusters that it runs at once, so that persistent programs have several
    tiles. change: what is done with the kernel's source, to plant faults.
    """

    def __init__(
        self,
        *,
        early: bool,
        seed: int = 0,
        at_once: int = 1,
        change: Callable[[str], str] = lambda text: text,
    ) -> None:
        self.memory, self.early, self.seed, self.at_once, self.change = Memory(), early, seed, at_once, change
        self.outputs: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Let kernels see a tensor."""
        self.memory.regions[tensor.data_ptr()] = _bytes(tensor.data_ptr(), tensor.nbytes)
        return tensor

    def empty(self, shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        """An output, as `direct.allocator` makes it."""
        size = int(np.prod(shape)) * dtype.itemsize
        whole = torch.empty(size + 2 * GUARD, dtype=torch.uint8).fill_(POISON)
        self.outputs.append(whole)
        return self.add(whole[GUARD : GUARD + size].view(dtype).view(shape))

    def tensor_map(self, address: int, rows: int, length: int, box: tuple[int, int]) -> bytes:
        """What the driver would be told."""
        return struct.pack("<5q", address, rows, length, *box).ljust(MAP, b"\0")

    def launches(self, variant: Variant, values: str, x: str, bits: int, name: str, device: int) -> Any:
        """As `host._launch`."""
        elements = next(one for one in ELEMENTS.values() if (one.values, one.x) == (values, x))
        source, headers, options = sources(variant, elements, name)
        ptx = self.compiled(source, headers, options)

        def launch(programs: int, stream: Any, *values: Any) -> None:
            packed = host.ARGUMENTS.pack(*values)
            found = {
                (0, at): described(packed[at : at + MAP]) for at in range(0, (2 + variant.stored) * MAP, MAP)
            }
            parts = packed[: host.MAPS], packed[host.MAPS :]
            arguments = [np.frombuffer(part, np.uint8).copy() for part in parts]
            machine = Machine(
                ptx, self.memory, arguments, found, threads=variant.threads, shared=variant.shared(bits),
                early=self.early, seed=self.seed,
            )  # fmt: skip
            machine.run(programs, variant.cluster)

        return launch, self.at_once

    def compiled(self, source: str, headers: Mapping[str, str], options: Sequence[str]) -> str:
        """The PTX of a kernel, its source changed with all that it includes."""
        return compiled(source, headers, options, self.change)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take the place of the GPU."""
        replaced = {
            "_launch": self.launches, "tensor_map": self.tensor_map, "current_device": lambda: -1, "current_stream": lambda
            index: 0, "arrange": lambda metadata, bits: self.add(arrange(metadata, bits)),
        }  # fmt: skip
        with mock.patch.multiple(host, allocator=lambda device: self.empty, **replaced):
            yield

    def product(self, variant: Variant, name: str, *operands: Any) -> torch.Tensor:
        """`fast.linear_sparse` of CPU tensors by a variant; name: of the output's dtype."""
        for one in operands:
            if one is not None:
                self.add(one)
        with self.installed():
            made = host.product(name, True, operands, variant)(*operands)
        assert made is not None
        self.check_guards()
        return made

    def check_guards(self) -> None:
        """ValueError where a kernel wrote outside of its output."""
        for whole in self.outputs:
            if not bool((whole[:GUARD] == POISON).all() and (whole[-GUARD:] == POISON).all()):
                raise ValueError("the kernel wrote outside of its output")


def compiled(
    source: str, headers: Mapping[str, str], options: Sequence[str], change: Callable[[str], str]
) -> str:
    """The PTX of a source, changed with all that it includes."""
    whole = change(INCLUDE.sub(lambda found: headers[found[1]], source))
    return ptx_of(whole, tuple(options))


@lru_cache(maxsize=16)
def ptx_of(source: str, options: tuple[str, ...]) -> str:
    """The PTX of a whole source: a kernel is run in several ways, and with other inputs."""
    return nvrtc.compile_source(source, {}, options, ptx=True)[0].decode().rstrip("\0")


def _bytes(address: int, size: int) -> Any:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def described(text: bytes) -> TensorMap:
    """What `StandIn.tensor_map` made."""
    address, rows, length, high, wide = struct.unpack("<5q", text[:40])
    return TensorMap(_bytes(address, rows * length).reshape(rows, length), (high, wide))


__all__ = ["MAP", "StandIn", "compiled", "described"]
