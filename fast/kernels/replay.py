"""Launches that ran before, again: what `fast.ready` keeps for the next call like them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch

from fast import ready
from fast.device import PLAIN
from fast.kernels import launch
from fast.kernels.launch import ALIGNMENT, Call, Fixed
from fast.kernels.passes import Buffer

DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "bfloat16", "float16", "uint8", "int8", "uint16", "int32", "uint32")
}
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


def remember(
    key: Any,
    scheme: Any,
    inputs: Mapping[str, torch.Tensor | None],
    buffers: Mapping[str, Buffer],
    steps: Sequence[Step],
    finishing: Finishing,
    strided: bool = False,
) -> None:
    """Answer the next call with this key by these steps, which just ran; not where that is done already, or cannot be.

    scheme: whose id the key may have.
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
    ready.remember(key, replay, finishing(replay.names), scheme)


def picked(name: str) -> Finishing:
    """The tensor of this name is the result."""
    return lambda names: itemgetter(names.index(name))


def buffers_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Buffer]:
    """Buffers like tensors that a call made, of which it wrote every element."""
    return {name: Buffer(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}


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
