"""A call of a function: its inputs, the buffers that it allocates, its launches in order, and what makes its result.

The first time a call runs while it is described. After that it answers calls with the same key (`cache`): only addresses
change, so what is left is to allocate the buffers and to launch. All that is checked is what no key has: where tensors lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch

from fast import dispatch
from fast.dispatch import PLAIN
from fast.launch import launcher
from fast.launch.cuda import CudaLaunch
from fast.launch.launcher import ALIGNMENT, CompiledLaunch, Signature, interpreted

#: The dtypes that are quantized, with their names.
FLOAT_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# Shape, strides and dtype of a buffer.
Size = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
# Bytes that kernels read at once of packed codes, and of the values that become some.
WORD = 4


class Call:
    """See the module text. Buffers are allocated each time: a CUDA graph owns what its capture made, streams share none."""

    def __init__(
        self, inputs: Mapping[str, torch.Tensor | None], *, strided: bool = False, words: tuple[str, ...] = ()
    ) -> None:
        """inputs: in the order of the key. strided: the key has their strides, and kernels read by them; otherwise kernels get
        them contiguous. words: inputs that kernels read in words of 4 bytes."""
        given = [tensor for tensor in inputs.values() if tensor is not None]
        # The number of the CUDA device, or -1 for the CPU, where the interpreter runs.
        self.device, self.index = given[0].device, given[0].get_device()
        self.inputs, self.strided, self.words = dict(inputs), strided, words
        #: What kernels are given, by name, while the call is described.
        self.tensors = self._usable(inputs)
        #: Shape, dtype and fill. A buffer may have the name of an input that is not there.
        self.buffers: dict[str, tuple[tuple[int, ...], torch.dtype, tuple[int, ...]]] = {}
        self.steps: list[tuple[CompiledLaunch | CudaLaunch, list[str | None], Signature]] = []
        #: Whether the launches serve other tensors: not where one begins within a tensor, or an input is no plain tensor.
        self.repeatable = all(type(tensor) in PLAIN for tensor in given)

    def _usable(self, inputs: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """The inputs that are there, as kernels read them."""
        usable = {}
        for name, tensor in inputs.items():
            if tensor is not None:
                tensor = tensor.resolve_neg() if self.strided else tensor.resolve_neg().contiguous()
                usable[name] = tensor.clone() if name in self.words and tensor.data_ptr() % WORD else tensor
        return usable

    # Describing and running for the first time

    def allocate(
        self, name: str, shape: Sequence[int], dtype: torch.dtype | str, fill: tuple[int, ...] = ()
    ) -> torch.Tensor:
        """A fresh tensor. fill: the value that each row starts with; () where the launches write every element."""
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        result = filled(torch.empty(shape, dtype=dtype, device=self.device), fill)
        self.tensors[name], self.buffers[name] = result, (tuple(shape), dtype, fill)
        return result

    def launch(
        self,
        kernel: CompiledLaunch | CudaLaunch,
        pointers: Sequence[str | None],
        views: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Run on the tensors of these names; a name that there is no tensor of stands for None.

        views: parts of the tensors in their places. A call whose launches begin within a tensor is not remembered.
        """
        tensors = {**self.tensors, **views} if views else self.tensors
        names = [name if name in tensors else None for name in pointers]
        given = [None if name is None else tensors[name] for name in names]
        self.steps.append((kernel, names, kernel.run(given, self.index)))
        for name, view in (views or {}).items():
            self.repeatable &= view.data_ptr() == self.tensors[name].data_ptr()

    def result(
        self,
        template: Any,
        key: Any = None,
        record: Any = None,
        convert: Callable[[Any], Any] | None = None,
        before: Callable[[Call], Callable[..., Any]] | None = None,
    ) -> Any:
        """What the launches made: the template with tensors for their names (`cache.maker`), converted at last.

        With a key this answers the next call like it. record: whose id the key may have. before: what answers
        in its place, given this one, where operands have to be changed first.
        """
        names = [*self.inputs, *self.buffers]
        places = {name: at for at, name in enumerate(names) if name in self.tensors}
        finish = dispatch.maker(template, places)
        self.finish = finish if convert is None else lambda tensors: convert(finish(tensors))
        output = self.finish([*self.inputs.values(), *(self.tensors[name] for name in self.buffers)])
        if key is not None and self.repeatable and not interpreted():
            self._prepare(places)
            dispatch.remember(key, self if before is None else before(self), record)
        return output

    # Repeating

    def _prepare(self, places: dict[str, int]) -> None:
        """Forget the tensors, and keep what every call needs. places: of names among inputs and buffers."""
        self._places = places
        self._allocate = launcher.allocator(self.device)
        buffers = self.buffers.items()
        self._sizes: list[Size] = [
            (shape, self.tensors[name].stride(), dtype) for name, (shape, dtype, _) in buffers
        ]
        self._fills = [
            (places[name], fill, self.tensors[name].nbytes) for name, (_, _, fill) in buffers if fill
        ]
        self._launches: list[tuple[Callable[..., Any], Callable[..., Any]]] = []
        self.inputs, self.tensors = dict.fromkeys(self.inputs), {}

    def __call__(self, *inputs: torch.Tensor | None) -> Any:
        """The result for other inputs with the same key; None for tensors without memory."""
        tensors = self._run(inputs, self._sizes)
        return None if tensors is None else self.finish(tensors)

    def viewed(self, **views: Size | None) -> Callable[..., tuple[torch.Tensor, ...] | None]:
        """The same launches, which give these buffers alone, each as a view of its memory: shape, strides and dtype. None:
        as it is.

        What a caller would make of the results by `view` and `t` costs as much as allocating them. None for tensors without
        memory, as above. KeyError where there is no such buffer.
        """
        sizes, first = list(self._sizes), len(self.inputs)
        for name, size in views.items():
            at = self._places[name] - first
            sizes[at] = size or sizes[at]
        places = [self._places[name] for name in views]

        def run(*inputs: torch.Tensor | None) -> tuple[torch.Tensor, ...] | None:
            tensors = self._run(inputs, sizes)
            return None if tensors is None else tuple([tensors[at] for at in places])

        return run

    def _run(self, inputs: Sequence[torch.Tensor | None], sizes: list[Size]) -> list[Any] | None:
        """Inputs and buffers after the launches; None for tensors without memory."""
        if launcher.hooked():
            return self._launch_again(inputs, sizes)
        if launcher.current_device() != self.index:  # type: ignore[misc]
            with torch.cuda.device(self.index):
                return self._run(inputs, sizes)
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
                return self._launch_again(inputs, sizes)
            addresses.append(address)
        launches = self._launches or self._direct_launches()
        if not launches:
            return self._launch_again(inputs, sizes)
        # Allocate the buffers and launch, past everything of Triton that looks at arguments.
        allocate = self._allocate
        buffers = [allocate(*size) for size in sizes]
        addresses += [tensor.data_ptr() for tensor in buffers]
        addresses.append(None)
        tensors = [*inputs, *buffers]
        stream = launcher.current_stream(self.index)  # type: ignore[misc]
        for at, fill, size in self._fills:
            if fill != (0,) or not launcher.zero(addresses[at], size, stream):
                filled(tensors[at], fill)
        for launch, select in launches:
            launch(stream, select(addresses))
        return tensors

    def _direct_launches(self) -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
        """For each launch its function, and what selects its addresses; nothing before all are compiled for aligned tensors.

        The last address is that of no tensor.
        """
        absent, launches = len(self.inputs) + len(self.buffers), []
        for function, pointers in self.launches():
            slots = [absent if name is None else self._places[name] for name in pointers]
            launches.append((function, itemgetter(*slots)))
        # In one step: another thread may be launching.
        self._launches = launches
        return launches

    def launches(self) -> list[tuple[Callable[..., Any], list[str | None]]]:
        """For each launch its function, of a stream and addresses, and the names of its pointers; nothing before all are
        compiled for aligned tensors."""
        result = [(kernel.compiled.get(signature), names) for kernel, names, signature in self.steps]
        return (
            [(one.function, names) for one, names in result if one] if all(one for one, _ in result) else []
        )

    def _launch_again(self, inputs: Sequence[torch.Tensor | None], sizes: list[Size]) -> list[Any]:
        """By `kernel[grid]` where nothing else will do: odd addresses, tensors that have to be copied, hooks."""
        tensors = self._usable(dict(zip(self.inputs, inputs, strict=True)))
        result = [
            filled(torch.empty(shape, dtype=dtype, device=self.device), fill)
            for shape, dtype, fill in self.buffers.values()
        ]
        tensors.update(zip(self.buffers, result, strict=True))
        for kernel, pointers, _ in self.steps:
            kernel.run([None if name is None else tensors[name] for name in pointers], self.index)
        views = [
            one if size is own else torch.as_strided(one.view(size[2]), *size[:2])
            for one, own, size in zip(result, self._sizes, sizes, strict=True)
        ]
        return [*inputs, *views]


def filled(made: torch.Tensor, fill: tuple[int, ...]) -> torch.Tensor:
    """A tensor whose rows start with the values of a fill."""
    if fill == (0,):
        return made.zero_()
    if fill:
        for row, value in zip(made, fill, strict=True):
            row.fill_(value)
    return made
