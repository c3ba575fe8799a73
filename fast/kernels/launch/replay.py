"""Launches that ran before, again: what `fast.kernels.launch.cache` keeps for the next call like them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch

from fast.device import PLAIN
from fast.kernels.launch import cache as ready
from fast.kernels.launch import launcher as launch
from fast.kernels.launch.launcher import ALIGNMENT, Call, Fixed
from fast.kernels.launch.plan import Buffer

DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "bfloat16", "float16", "uint8", "int8", "uint16", "int32", "uint32")
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Makes an uninitialized tensor on the current device from shape, strides and dtype.
Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]
# A launch, and which tensor each pointer of its kernel is, by name.
Step = tuple[Fixed, Sequence[str | None]]
# Given the names of all tensors, what makes a call's result of them.
Finishing = Callable[[list[str]], Callable[[list[Any]], Any]]


class Replay:
    """Launches over fresh buffers: the shortest way from tensors to the driver.

    Nothing is checked but what changes from call to call: where tensors lie. Buffers are allocated each time, so that a CUDA
    graph owns what its capture made, and streams share nothing.
    """

    def __init__(
        self, inputs: Sequence[str], buffers: Mapping[str, Buffer], steps: Sequence[Step], device: torch.device, strided: bool
    ) -> None:  # fmt: skip
        """strided: the key has the strides of the inputs; without that they are contiguous."""
        self.names = [*inputs, *buffers]
        self.index, self.strided, self.steps = index_of(device), strided, steps
        self.allocate = allocator(device)
        self.sizes = [(b.shape, row_major(b.shape), DTYPES[b.dtype]) for b in buffers.values()]
        self.fills = [(len(inputs) + at, b) for at, b in enumerate(buffers.values()) if b.fill]
        self.calls: list[tuple[Call, Callable[..., Any]]] = []

    def __call__(self, *inputs: torch.Tensor | None) -> list[Any] | None:
        """The inputs and the buffers, in the order of `names`; None where only the JIT can launch."""
        if launch.hooked():
            return None
        if launch.current_device() != self.index:
            with torch.cuda.device(self.index):
                return self(*inputs)
        addresses: list[int | None] = []
        for tensor in inputs:
            if tensor is None:
                addresses.append(None)
                continue
            address = tensor.data_ptr()
            if address % ALIGNMENT or tensor.is_neg() or not (self.strided or tensor.is_contiguous()):
                return None
            addresses.append(address)
        return self.run([*inputs], addresses)

    def run(self, tensors: list[Any], addresses: list[int | None]) -> list[Any]:
        """Add the buffers, and launch."""
        allocate = self.allocate
        for shape, strides, dtype in self.sizes:
            made = allocate(shape, strides, dtype)
            tensors.append(made)
            addresses.append(made.data_ptr())
        for at, buffer in self.fills:
            filled(tensors[at], buffer)
        addresses.append(None)
        stream = launch.current_stream(self.index)
        for call, chosen in self.calls or self.prepare():
            call(stream, chosen(addresses))
        return tensors

    def prepare(self) -> list[tuple[Call, Callable[..., Any]]]:
        """For each launch its call, and what picks its addresses; the last address is that of no tensor."""
        calls = []
        for step, pointers in self.steps:
            slots = [len(self.names) if name is None else self.names.index(name) for name in pointers]
            calls.append((step.straight(self.index, len(slots)), itemgetter(*slots)))
        # In one step: another thread may be launching.
        self.calls = calls
        return calls


class Recording:
    """A call that is made for the first time: its launches over fresh buffers run, and answer the next call like it."""

    def __init__(self, inputs: Mapping[str, torch.Tensor | None], strided: bool = False) -> None:
        """inputs: in the order of the call's key. strided: see `Replay`; kernels read others contiguous."""
        self.inputs, self.strided = inputs, strided
        self.device = next(t.device for t in inputs.values() if t is not None)
        given = {name: tensor for name, tensor in inputs.items() if tensor is not None}
        #: What kernels are given, by name.
        self.tensors = given if strided else {name: tensor.contiguous() for name, tensor in given.items()}
        self.buffers: dict[str, Buffer] = {}
        self.steps: list[Step] = []
        self.whole = True

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A fresh tensor of which the launches write every element."""
        made = torch.empty(shape, dtype=dtype, device=self.device)
        self.take({name: made})
        return made

    def take(self, tensors: Mapping[str, torch.Tensor], fill: tuple[int, ...] = ()) -> None:
        """Tensors that were made for this call, of which the launches write every element that is not in the fill."""
        self.tensors.update(tensors)
        self.buffers.update(
            (name, Buffer(tuple(t.shape), NAMES[t.dtype], fill)) for name, t in tensors.items()
        )

    def launch(
        self, kernel: Fixed, pointers: Sequence[str], views: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Run on the tensors of these names; a name that there is no tensor of stands for None.

        views: parts of the tensors in their places. A call whose launches begin within a tensor is not remembered.
        """
        tensors = {**self.tensors, **(views or {})}
        kernel.run([tensors.get(name) for name in pointers], index_of(self.device))
        self.steps.append((kernel, [name if name in tensors else None for name in pointers]))
        moved = (
            name for name, view in (views or {}).items() if view.data_ptr() != self.tensors[name].data_ptr()
        )
        self.whole = self.whole and not any(moved)

    def remember(self, key: Any, record: Any, finishing: Finishing) -> None:
        """Answer the next call with this key by the same launches, where that can be."""
        if self.whole:
            remember(key, record, self.inputs, self.buffers, self.steps, finishing, self.strided)


def remember(
    key: Any,
    record: Any,
    inputs: Mapping[str, torch.Tensor | None],
    buffers: Mapping[str, Buffer],
    steps: Sequence[Step],
    finishing: Finishing,
    strided: bool = False,
) -> None:
    """Answer the next call with this key by these steps, which just ran; not where that is done already, or cannot be.

    record: whose id the key may have.
    """
    given = [tensor for tensor in inputs.values() if tensor is not None]
    index = index_of(given[0].device)
    if launch.interpreted() or not ready.is_new(key) or any(index not in step.compiled for step, _ in steps):
        return
    if any(type(tensor) not in PLAIN for tensor in given):
        return  # nothing that was like it would be found
    # An input that is not there has no name: a buffer may be made in its place.
    names = ["" if tensor is None else name for name, tensor in inputs.items()]
    replay = Replay(names, buffers, steps, given[0].device, strided)
    ready.remember(key, replay, finishing(replay.names), record)


def picked(name: str) -> Finishing:
    """The tensor of this name is the result."""
    return lambda names: itemgetter(names.index(name))


def several(*wanted: str | None) -> Finishing:
    """The tensors of these names are the result, None where there is no name."""

    def finishing(names: list[str]) -> Callable[[list[Any]], Any]:
        places = [None if name is None else names.index(name) for name in wanted]
        return lambda made: tuple(None if at is None else made[at] for at in places)

    return finishing


def index_of(device: torch.device) -> int:
    """The number of a CUDA device; -1 stands for the CPU, where the interpreter runs."""
    return device.index if device.type == "cuda" else -1


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor that is not empty."""
    made = [1]
    for length in shape[:0:-1]:
        made.append(made[-1] * length)
    return tuple(made[::-1]) if shape else ()


def allocator(device: torch.device) -> Allocate:
    """What allocates on the current device, which is to be this one.

    torch.compile's own programs allocate past the dispatcher, in a third of the time; where torch has no such function any
    more, the public one does.
    """
    quick = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if quick is not None:
        return quick  # type: ignore[no-any-return]
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


def filled(made: torch.Tensor, buffer: Buffer) -> torch.Tensor:
    """The tensor of a buffer, its rows starting with the numbers of its fill."""
    if buffer.fill == (0,):
        return made.zero_()
    for row, value in zip(made, buffer.fill, strict=True):
        row.fill_(value)
    return made
