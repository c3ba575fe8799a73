"""A product that was computed once, prepared for inputs like those it had: from addresses to launches, nothing looked up.

`fast.linear` finds a call by a key of all its operands (`fast.dispatch`), which is half of its time on the host.
Who keeps a weight knows that its parts stay, so that a `Program` looks at the inputs and the bias alone. It launches the steps
of the calls that the cache has, one call after the other; where the cache has none there is no program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from operator import itemgetter
from typing import Any

import torch

#: Compiled kernels take addresses that are multiples of this (`launcher.ALIGNMENT`; that module needs Triton).
ALIGNMENT = 16
#: What places of buffers in one allocation are multiples of, as those of allocations are.
APART = 256
#: Addresses in order: of the inputs, of the bias, of the fixed tensors, of buffers, and last that of no tensor.
X, BIAS, FIXED, ABSENT = 0, 1, 2, -1

Launch = Callable[["Program", torch.Tensor, torch.Tensor | None], Any]
#: Shape, dtype and fill of a buffer; shape, strides and dtype of an allocation.
Buffer = tuple[tuple[int, ...], torch.dtype, tuple[int, ...]]
Size = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


class Steps:
    """Launches of calls in order, with the places of their addresses."""

    def __init__(self, *fixed: torch.Tensor | None) -> None:
        self.fixed = [tensor for tensor in fixed if tensor is not None]
        self.buffers: list[Buffer] = []
        self.launches: list[tuple[Callable[..., Any], list[int]]] = []

    @property
    def first(self) -> int:
        """The place of the first buffer."""
        return FIXED + len(self.fixed)

    def place(self, tensor: torch.Tensor | None) -> int:
        """Of a fixed tensor."""
        return next((FIXED + at for at, one in enumerate(self.fixed) if one is tensor), ABSENT)

    def add(self, call: Any, inputs: Sequence[int]) -> Any:
        """Add a call whose inputs have these places: its result, with places for tensors. None for what cannot say its launches
        (`Call.launches`), and where a kernel was not compiled for aligned addresses."""
        launches = call.launches() if hasattr(call, "launches") else []
        if not launches:
            return None
        first = self.first + len(self.buffers)
        buffers = range(first, first + len(call.buffers))
        named = {
            **dict(zip(call.inputs, inputs, strict=True)),
            **dict(zip(call.buffers, buffers, strict=True)),
        }
        self.buffers += call.buffers.values()
        for function, names in launches:
            places = [ABSENT if name is None else named[name] for name in names]
            self.launches.append((function, places))
        return call.finish([*inputs, *buffers])

    def view(self, place: int, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
        """Give the buffer at a place a shape of as many elements, and a dtype as wide as its own."""
        at = place - self.first
        _, own, fill = self.buffers[at]
        self.buffers[at] = shape, dtype or own, fill


class Program:
    """The launches of a product, for inputs of one shape and dtype and a bias of one, all on one device.

    `run(x, bias)` is the product; None where it takes more than launches: tensors elsewhere, odd addresses or strides,
    listeners. That shapes and dtypes are those that the program was prepared for, the caller has seen to. Between two runs of a
    model's layer the processor forgets what belongs to that layer alone, so a program has little of its own: `launch`, called
    with the program, is one for all weights that are computed alike.
    """

    __slots__ = ("known", "launch", "parts")

    def __init__(self, steps: Steps, results: Sequence[int], device: torch.device) -> None:
        """results: places of the buffers that `run` gives, a tuple of them where they are several."""
        kept = [place - steps.first for place in results]
        sizes, spots = allocations(steps.buffers, kept)
        fills = tuple(
            (spots[at][0], fill, prod(size) * dtype.itemsize)
            for at, (size, dtype, fill) in enumerate(steps.buffers)
            if fill
        )
        launches = tuple((function, tuple(places)) for function, places in steps.launches)
        self.parts, self.known = tuple(steps.fixed), [0] * len(steps.fixed)
        self.launch = launching(device, sizes, spots, fills, launches, tuple(spots[at][0] for at in kept))

    def run(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        """The product, or None; see above."""
        return self.launch(self, x, bias)

    def are_readable(self, addresses: list[int]) -> bool:
        """Whether kernels read the fixed tensors at these addresses, which are known then: not columns of a wider weight, which
        the ordinary call copies."""
        readable = not any(address % ALIGNMENT for address in addresses)
        readable = readable and all(part.is_contiguous() for part in self.parts)
        if readable:
            self.known[:] = addresses
        return readable


def allocations(
    buffers: Sequence[Buffer], kept: Sequence[int]
) -> tuple[tuple[Size, ...], tuple[tuple[int, int], ...]]:
    """Sizes of allocations, and of every buffer its allocation and how many bytes behind its beginning it lies.

    Buffers that are `kept`, or start with a fill, have their own; all others are one.
    """
    own = [at for at, (_, _, fill) in enumerate(buffers) if at in kept or fill]
    sizes = [(shape, contiguous_strides(shape), dtype) for shape, dtype, _ in (buffers[at] for at in own)]
    spots, shared = [], 0
    for at, (shape, dtype, _) in enumerate(buffers):
        spots.append((own.index(at), 0) if at in own else (len(own), shared))
        if at not in own:
            shared += -(-prod(shape) * dtype.itemsize // APART) * APART
    return (*sizes, *([((shared,), (1,), torch.uint8)] if shared else [])), tuple(spots)


@lru_cache(maxsize=1024)
def launching(
    device: torch.device, sizes: Any, spots: Any, fills: Any, launches: Any, results: tuple[int, ...]
) -> Launch:
    """What runs programs of these allocations (shape, strides, dtype), places of buffers in them (allocation, bytes), fills
    (allocation, value, bytes), launches (function, places of addresses) and results (allocations). It is a closure: in so short
    a time every attribute that is looked up counts."""
    from fast.launch import direct

    index, hooked = -1 if device.type == "cpu" else device.index, direct.hooked
    current, stream, allocate = direct.current_device, direct.current_stream, direct.allocator(device)
    steps = [(function, itemgetter(*places)) for function, places in launches]
    alone = len(spots) == len(launches) == 1 and not fills
    (size, *_), ((first, where), *_), take = sizes, steps, itemgetter(*results)

    def launch(program: Program, x: torch.Tensor, bias: torch.Tensor | None) -> Any:
        address, other = address_of(x, index), None if bias is None else address_of(bias, index)
        if not address or other == 0 or current() != index or hooked():
            return None
        addresses = [part.data_ptr() for part in program.parts]
        if addresses != program.known and not program.are_readable(addresses):
            return None
        if alone:  # as below, in three quarters of the time
            y = allocate(*size)
            first(stream(index), where((address, other, *addresses, y.data_ptr(), None)))
            return y
        result, on = [allocate(*size) for size in sizes], stream(index)
        if fills:
            fill(result, fills, on)
        begins = [one.data_ptr() for one in result]
        addresses = [address, other, *addresses, *[begins[at] + more for at, more in spots], None]
        for step, select in steps:
            step(on, select(addresses))
        return take(result)

    return launch


def fill(made: Sequence[torch.Tensor], fills: Any, stream: int) -> None:
    """Give buffers the values that they start with."""
    from fast.launch import direct
    from fast.launch.call import filled

    for at, value, size in fills:
        if value != (0,) or not direct.zero(made[at].data_ptr(), size, stream):
            filled(made[at], value)


def address_of(tensor: torch.Tensor, index: int) -> int:
    """Where a tensor lies on a device (-1: the CPU), as kernels read it; 0 where they cannot."""
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # sparse or nested
        return 0
    if address % ALIGNMENT or tensor.get_device() != index or not tensor.is_contiguous() or tensor.is_neg():
        return 0
    return address


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor whose last axis is the innermost."""
    return tuple(prod(shape[at + 1 :]) for at in range(len(shape)))


__all__ = ["ABSENT", "BIAS", "Program", "Steps", "X"]
