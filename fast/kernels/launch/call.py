"""A call of a function: its inputs, the buffers that it allocates, its launches in order, and what makes its result.

The first time a call runs while it is described. After that it answers calls with the same key (`cache`): only addresses
change, so what is left is to allocate the buffers and to launch. All that is checked is what no key has: where tensors lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch

from fast.device import PLAIN
from fast.kernels.launch import cache, direct
from fast.kernels.launch.buffer import Buffer
from fast.kernels.launch.launcher import (
    ALIGNMENT,
    CompiledLaunch,
    Signature,
    interpreted,
    signature_of,
)

DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "bfloat16", "float16", "uint8", "int8", "uint16", "int32", "uint32")
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: Names of the dtypes that are quantized.
FLOATS = {DTYPES[name]: name for name in ("float32", "bfloat16", "float16")}
# Bytes that kernels read at once of packed codes, and of the values that become some.
WORD = 4
# Given the names of all tensors, what makes a call's result of them.
Finishing = Callable[[list[str]], Callable[[list[Any]], Any]]


class Call:
    """See the module text. Buffers are allocated each time: a CUDA graph owns what its capture made, streams share none."""

    def __init__(
        self, inputs: Mapping[str, torch.Tensor | None], *, strided: bool = False, words: tuple[str, ...] = ()
    ) -> None:
        """inputs: in the order of the key. strided: the key has their strides, and kernels read by them; otherwise kernels get
        them contiguous. words: inputs that kernels read in words of 4 bytes."""
        given = {name: tensor for name, tensor in inputs.items() if tensor is not None}
        self.device = next(iter(given.values())).device
        self.index = index_of(self.device)
        # An input that is not there has no name: a buffer may be made in its place.
        self.names = ["" if tensor is None else name for name, tensor in inputs.items()]
        self.strided, self.words = strided, words
        self.buffers: dict[str, Buffer] = {}
        self.steps: list[tuple[CompiledLaunch, list[str | None], Signature]] = []
        #: Whether the launches serve other tensors: not where one begins within a tensor, or an input is no plain tensor.
        self.repeatable = all(type(tensor) in PLAIN for tensor in given.values())
        self.given = list(inputs.values())
        #: What kernels are given, by name, while the call is described.
        self.tensors = {name: self._usable(name, tensor) for name, tensor in given.items()}

    def _usable(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """An input as kernels read it."""
        tensor = tensor.resolve_neg()
        tensor = tensor if self.strided else tensor.contiguous()
        return tensor.clone() if name in self.words and tensor.data_ptr() % WORD else tensor

    # Describing and running for the first time

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A fresh tensor of which the launches write every element."""
        return self.allocate(name, Buffer(tuple(shape), NAMES[dtype]))

    def allocate(self, name: str, buffer: Buffer) -> torch.Tensor:
        """A fresh tensor, filled as its buffer says."""
        made = torch.empty(buffer.shape, dtype=DTYPES[buffer.dtype], device=self.device)
        self.buffers[name], self.tensors[name] = buffer, filled(made, buffer)
        return made

    def take(self, tensors: Mapping[str, torch.Tensor], fill: tuple[int, ...] = ()) -> None:
        """Tensors that were made for this call, of which the launches write every element that is not in the fill."""
        self.tensors.update(tensors)
        self.buffers.update(
            (name, Buffer(tuple(t.shape), NAMES[t.dtype], fill)) for name, t in tensors.items()
        )

    def launch(
        self, kernel: CompiledLaunch, pointers: Sequence[str | None], views: Mapping[str, torch.Tensor] | None = None
    ) -> None:  # fmt: skip
        """Run on the tensors of these names; a name that there is no tensor of stands for None.

        views: parts of the tensors in their places. A call whose launches begin within a tensor is not remembered.
        """
        tensors = {**self.tensors, **(views or {})}
        given = [None if name is None else tensors.get(name) for name in pointers]
        kernel.run(given, self.index)
        names = [name if name in tensors else None for name in pointers]
        self.steps.append((kernel, names, signature_of(given, self.index)))
        for name, view in (views or {}).items():
            self.repeatable &= view.data_ptr() == self.tensors[name].data_ptr()

    def result(self, finishing: Finishing, key: Any = None, record: Any = None) -> Any:
        """What the launches made. With a key this answers the next call like it. record: whose id the key may have."""
        self.finish = finishing([*self.names, *self.buffers])
        made = self.finish([*self.given, *(self.tensors[name] for name in self.buffers)])
        if key is not None and self.repeatable and not interpreted():
            self._prepare()
            cache.remember(key, self, record)
        return made

    # Repeating

    def _prepare(self) -> None:
        """Forget the tensors, and keep what every call needs."""
        self.given, self.tensors = [], {}
        buffers = self.buffers.values()
        self._allocate = direct.allocator(self.device)
        self._sizes = [(b.shape, row_major(b.shape), DTYPES[b.dtype]) for b in buffers]
        self._fills = [(len(self.names) + at, b) for at, b in enumerate(buffers) if b.fill]
        self._launches: list[tuple[Callable[..., Any], Callable[..., Any]]] = []

    def __call__(self, *inputs: torch.Tensor | None) -> Any:
        """The result for other inputs with the same key; None for tensors without memory."""
        if direct.hooked():
            return self._launch_again(inputs)
        if direct.current_device() != self.index:  # type: ignore[misc]
            with torch.cuda.device(self.index):
                return self(*inputs)
        addresses: list[int | None] = []
        for tensor in inputs:
            if tensor is None:
                addresses.append(None)
                continue
            try:
                address = tensor.data_ptr()
            except RuntimeError:  # sparse or nested
                return None
            if address % ALIGNMENT or tensor.is_neg() or not (self.strided or tensor.is_contiguous()):
                return self._launch_again(inputs)
            addresses.append(address)
        launches = self._launches or self._direct_launches()
        return (
            self._launch_again(inputs) if not launches else self._launch_directly(inputs, addresses, launches)
        )

    def _launch_directly(
        self, inputs: Sequence[Any], addresses: list[int | None], launches: list[Any]
    ) -> Any:
        """Allocate the buffers and launch, past everything of Triton that looks at arguments."""
        tensors, allocate = [*inputs], self._allocate
        for shape, strides, dtype in self._sizes:
            made = allocate(shape, strides, dtype)
            tensors.append(made)
            addresses.append(made.data_ptr())
        for at, buffer in self._fills:
            filled(tensors[at], buffer)
        addresses.append(None)
        stream = direct.current_stream(self.index)  # type: ignore[misc]
        for launch, select in launches:
            launch(stream, select(addresses))
        return self.finish(tensors)

    def _direct_launches(self) -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
        """For each launch its function, and what selects its addresses; nothing before all are compiled for aligned tensors.

        The last address is that of no tensor.
        """
        names, launches = [*self.names, *self.buffers], []
        for kernel, pointers, signature in self.steps:
            compiled = kernel.compiled.get(signature)
            if compiled is None:
                return []
            slots = [len(names) if name is None else names.index(name) for name in pointers]
            launches.append((compiled.function, itemgetter(*slots)))
        # In one step: another thread may be launching.
        self._launches = launches
        return launches

    def _launch_again(self, inputs: Sequence[torch.Tensor | None]) -> Any:
        """By `kernel[grid]` where nothing else will do: odd addresses, tensors that have to be copied, hooks."""
        given = {
            name: self._usable(name, tensor) for name, tensor in zip(self.names, inputs, strict=True) if tensor is not None
        }  # fmt: skip
        made = {
            name: filled(torch.empty(b.shape, dtype=DTYPES[b.dtype], device=self.device), b)
            for name, b in self.buffers.items()
        }
        tensors: dict[str | None, Any] = {**given, **made}
        for kernel, pointers, _ in self.steps:
            kernel.run([tensors.get(name) for name in pointers], self.index)
        return self.finish([*inputs, *made.values()])


def select(name: str) -> Finishing:
    """The tensor of this name is the result."""
    return lambda names: itemgetter(names.index(name))


def select_all(*wanted: str | None) -> Finishing:
    """The tensors of these names are the result, None where there is no name."""

    def finishing(names: list[str]) -> Callable[[list[Any]], Any]:
        places = [None if name is None else names.index(name) for name in wanted]
        return lambda tensors: tuple(None if at is None else tensors[at] for at in places)

    return finishing


def index_of(device: torch.device) -> int:
    """The number of a CUDA device; -1 stands for the CPU, where the interpreter runs."""
    return device.index if device.type == "cuda" else -1


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor that is not empty."""
    strides = [1]
    for length in shape[:0:-1]:
        strides.append(strides[-1] * length)
    return tuple(strides[::-1]) if shape else ()


def filled(made: torch.Tensor, buffer: Buffer) -> torch.Tensor:
    """The tensor of a buffer, its rows starting with the values of its fill."""
    if buffer.fill == (0,):
        return made.zero_()
    if buffer.fill:
        for row, value in zip(made, buffer.fill, strict=True):
            row.fill_(value)
    return made
