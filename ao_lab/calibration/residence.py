"""One block of a model on a device at a time; the others wait where they are: on the host, or in the files that they map.

A model that transformers has loaded on a CPU is views of its files (safetensors maps them), so that its weights take no memory
until they are read, and none for long after that. A block is copied to the device when data reach it first, and leaves when
they reach the next one: as it was where nothing has changed, so that its weights are views of the files again, else with what
changed. A quantized block whose file is there (`resume=`) becomes views of that file.

Modules outside of the blocks (embeddings, a norm, the head) are copied for each of their calls; the largest one stays between
calls as long as something stands in for the blocks (`ao_lab.transforms.by_block`). Operations, their order and
their device are those of a model that is there as a whole, and so are all bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.transforms.by_block import ByBlock
from ao_lab.transforms.data import holds_batches, of_tensors
from ao_lab.transforms.walk import Capture, is_inside

#: Takes the number of a finished block, gives its parameters by name; None where they are not in a file.
Stored = Callable[[int], Mapping[str, torch.Tensor] | None]


def needs_residence(model: nn.Module, device: Any) -> bool:
    """Whether blocks of a model have to be brought to a device, or out of files on a CPU."""
    if device is None:
        return False
    wanted = torch.device(device)
    if wanted.type == "meta":
        raise ValueError(
            "device='meta' has no values to calibrate with; quantize_ changed nothing. Give the model's, or leave it out"
        )
    return wanted.type == "cpu" or any(p.device != _indexed(wanted) for p in model.parameters())


def _indexed(device: torch.device) -> torch.device:
    """A device with its number, as tensors name theirs."""
    return torch.empty(0, device=device).device


def moved_batches(batches: Iterable[Any], device: Any) -> Any:
    """Batches on a device, one after the other; what is no iterable of batches is left to those who refuse it."""
    if not holds_batches(batches):
        return batches
    return (of_tensors(batch, lambda x: x.to(device)) for batch in batches)


@dataclass
class Copies:
    """The tensors of some modules on the device, and where each was before."""

    modules: list[nn.Module]
    device: torch.device
    #: (module, its dictionary's name, the key, what it was, its values there).
    homes: list[tuple[nn.Module, str, str, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """The size of them all."""
        return sum(x.nbytes for _, _, _, x in _tensors(self.modules))

    def enter(self) -> None:
        """Copy them. A dense parameter stays the same object with other values, since plans know it by that."""
        copies: dict[int, torch.Tensor] = {}
        # A parameter that several modules have is met again once its values are the copy.
        homes: dict[int, torch.Tensor] = {}
        for module, kind, key, old in _tensors(self.modules):
            self.homes.append((module, kind, key, old, homes.setdefault(id(old), old.data)))
            if kind == "_parameters" and not isinstance(old.data, QuantizedTensor):
                if id(old) not in copies:
                    copies[id(old)] = old
                    old.data = old.data.to(self.device, copy=True)
                continue
            new = old.detach().to(self.device, copy=True)
            if kind == "_parameters":
                new = nn.Parameter(new, requires_grad=False)
            getattr(module, kind)[key] = copies.setdefault(id(old), new)

    def leave(self, changed: bool) -> None:
        """Let the copies go; those that have changed go home."""
        home = {id(old): values for _, _, _, old, values in self.homes}
        if changed:
            self._take_home(home)
            return
        for module, kind, key, old, values in self.homes:
            if kind == "_parameters" and not isinstance(values, QuantizedTensor):
                old.data = values
            else:
                getattr(module, kind)[key] = old

    def _take_home(self, home: dict[int, torch.Tensor]) -> None:
        """Values that are not what they were before, on the device where they were; the others as they were."""
        where = next((values.device for values in home.values()), torch.device("cpu"))
        moved: dict[int, nn.Parameter] = {}
        before = {(id(module), kind, key): (old, values) for module, kind, key, old, values in self.homes}
        for module, kind, key, now in _tensors(self.modules):
            old, values = before.get((id(module), kind, key), (None, None))
            if kind == "_buffers":
                module._buffers[key] = now.to(where) if old is None else old
            elif isinstance(now.data, QuantizedTensor):
                if old is not None and isinstance(values, QuantizedTensor):
                    module._parameters[key] = old  # type: ignore[assignment]
                elif now.device != where:
                    new = nn.Parameter(now.data.to(where), requires_grad=False)
                    module._parameters[key] = moved.setdefault(id(now), new)
            elif values is None or now.data is not values:
                taken = now.data.to(where)
                now.data = values if values is not None and _same(taken, values) else taken


def _same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.dtype == two.dtype and one.shape == two.shape and torch.equal(one, two)


def _tensors(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, str, torch.Tensor]]:
    """The parameters and buffers that modules have themselves."""
    for module in modules:
        for kind in ("_parameters", "_buffers"):
            for key, value in list(getattr(module, kind).items()):
                if value is not None:
                    yield module, kind, key, value


@dataclass
class Residence:
    """The blocks of a model, of which one is on the device."""

    model: nn.Module
    blocks: Mapping[str, nn.Module]
    device: torch.device
    #: Blocks whose tensors may have changed.
    touched: set[str] = field(default_factory=set)
    stored: Stored | None = None
    here: str | None = None
    copies: Copies | None = None
    #: Whether something stands in for the blocks, which stay where they are.
    stood_in: bool = False
    #: Modules outside of the blocks whose calls run, and one whose tensors stay for its next call.
    calls: list[Copies] = field(default_factory=list)
    kept: Copies | None = None

    @contextmanager
    def placed(self) -> Iterator[Residence]:
        """Blocks come and go inside; afterwards all are where they were."""
        handles: list[Any] = []
        try:
            for name, module in self.blocks.items():
                handles.append(
                    module.register_forward_pre_hook(lambda *_, name=name: self.enter(name), prepend=True)
                )
            for module in self._outside():
                handles += self._for_each_call(module)
            yield self
        finally:
            for handle in handles:
                handle.remove()
            self.let_go()
            self.leave()

    @contextmanager
    def around(self) -> Iterator[None]:
        """Blocks that are called stay where they are inside: something stands in for them."""
        self.stood_in = True
        try:
            yield
        finally:
            self.stood_in = False

    def captures(self, waiting: int, say: Callable[[str], None]) -> Callable[..., Capture]:
        """Makes a capture of which each block is copied once for many batches: at most so many bytes of outputs wait on the
        device, or as many as the largest block has. say: is told of each block."""
        if len(self.blocks) == 1:
            return Capture
        largest = max(sum(p.nbytes for p in block.parameters()) for block in self.blocks.values())
        return partial(ByBlock, waiting=max(waiting, largest), around=self.around, say=say)

    def enter(self, name: str) -> None:
        """A block onto the device, the one before off it."""
        if self.stood_in:
            return
        # What came last goes first: they may share a tensor.
        self.let_go()
        if self.here == name:
            return
        self.leave()
        self.copies, self.here = Copies(list(self.blocks[name].modules()), self.device), name
        self.copies.enter()

    def visit(self, name: str) -> None:
        """A block onto the device that is going to change."""
        self.enter(name)
        self.touched.add(name)

    def leave(self) -> None:
        """The block that is here off the device."""
        if self.copies is None or self.here is None:
            return
        name, copies = self.here, self.copies
        self.here = self.copies = None
        copies.leave(name in self.touched)
        if name in self.touched and self.stored is not None:
            take(self.blocks[name], self.stored(list(self.blocks).index(name)))

    def _outside(self) -> list[nn.Module]:
        """Modules outside of the blocks that have tensors themselves."""
        return [
            module
            for path, module in self.model.named_modules()
            if not is_inside(path, self.blocks) and any(True for _ in _tensors([module]))
        ]

    def _for_each_call(self, module: nn.Module) -> list[Any]:
        """Hooks that copy a module's tensors for each of its calls."""
        return [
            module.register_forward_pre_hook(lambda *_: self._begin(module), prepend=True),
            module.register_forward_hook(lambda *_: self._end(), always_call=True),
        ]

    def _begin(self, module: nn.Module) -> None:
        """A module outside of the blocks onto the device, and a smaller one that was kept off it."""
        if self.kept is not None and self.kept.modules == [module]:
            self.calls.append(self.kept)
            self.kept = None
            return
        copies = Copies([module], self.device)
        if self.kept is not None and copies.bytes >= self.kept.bytes:
            self.let_go()
        self.calls.append(copies)
        copies.enter()

    def _end(self) -> None:
        """The module whose call ends off the device, unless it is kept."""
        copies = self.calls.pop()
        if self.stood_in and self.kept is None and not self.calls:
            self.kept = copies
        else:
            copies.leave(changed=False)

    def let_go(self) -> None:
        """The module that was kept off the device."""
        if self.kept is not None:
            self.kept.leave(changed=False)
            self.kept = None


def take(block: nn.Module, parameters: Mapping[str, torch.Tensor] | None) -> None:
    """Give a block the quantized weights of a file, in place of the same ones in memory."""
    taken: dict[int, nn.Parameter] = {}
    for name, parameter in list(block.named_parameters(remove_duplicate=False)):
        value = None if parameters is None else parameters.get(name)
        if value is None or not isinstance(parameter.data, QuantizedTensor):
            continue
        path, _, leaf = name.rpartition(".")
        new = taken.setdefault(id(parameter), nn.Parameter(value, requires_grad=False))
        block.get_submodule(path)._parameters[leaf] = new
