"""All batches through one block of a model before the next: the first pass of `ao_lab.transforms.walk` where blocks are brought
to a device one at a time, so that a block is copied once for many batches and not once for each.

The first batch runs through the whole model as it is, and shows what each block returns. Of another one only what stands around
the blocks runs at first: each block is stood in for by something that returns new tensors, of the form that its outputs have.
Nothing may read them (an operation that takes one is refused, whatever it is), so that the arguments of all blocks are those of
the model. Then the blocks run, each with the batches that wait: the layers inside are seen, outputs have to be finite, new, and
of the expected form, and what blocks were given has to be as it was. All that `walk` takes is the same, bit for bit.

Outputs wait on the device, in as many bytes as the caller says; then the batches so far run through all blocks, and others
follow. Batches run through the whole model one after the other (`ByBlock.reason`) where a block returns something else than
tensors like its input, writes to what it is given or is given a mapping, and where the model computes with outputs in between.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ao_lab.transforms.data import Call, Ranges, calls_of, described, leaves, place_of, replaced, tensors
from ao_lab.transforms.walk import (
    Capture,
    Enough,
    Handed,
    HeldTensor,
    input_of,
    noting,
    share,
    used,
)

LOG = logging.getLogger(__name__)


class UnsuitedError(Exception):
    """Why batches run through the whole model one after the other."""


class Stage(Enum):
    """What runs: the whole model, what stands around its blocks, or a block."""

    WHOLE = auto()
    AROUND = auto()
    BLOCK = auto()


class Like(NamedTuple):
    """What a tensor is but for its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(x: torch.Tensor) -> Like:
        """That of a tensor."""
        return Like(tuple(x.shape), x.stride(), x.dtype, x.device)

    def empty(self) -> torch.Tensor:
        """A new one."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    @property
    def bytes(self) -> int:
        """Its size."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Place(Enum):
    """Stands in an output's form where a tensor like the block's input is."""

    LIKE_INPUT = auto()


#: Tensors that a block is given, and where each is (`place_of`).
Given = list[tuple[torch.Tensor, Any]]


def form_of(output: Any, like: Like, given: Given, name: str) -> Any:
    """What a block returns, `Place.LIKE_INPUT` in place of tensors; UnsuitedError where nothing could stand in for it."""
    found: list[torch.Tensor] = []
    for leaf in leaves(output):
        if leaf is None:
            continue
        if not isinstance(leaf, torch.Tensor) or Like.of(leaf) != like:
            raise UnsuitedError(f"{name} returns {described(leaf)}, which is not like its input")
        if any(share(leaf, x) for x in (*(x for x, _ in given), *found)):
            raise UnsuitedError(f"{name} returns memory that it was given, or the same twice")
        found.append(leaf)
    if any(place_of(x) != place for x, place in given):
        raise UnsuitedError(f"{name} writes to what it is given")
    return replaced(output, lambda leaf: None if leaf is None else Place.LIKE_INPUT)


class Unread(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch says no types
    """Refuses operations on tensors that have no values yet."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refs: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operation, where it takes none of them."""
        alive = [x for ref in self.refs if (x := ref()) is not None]
        for one in tensors([args, list((kwargs or {}).values())]):
            if any(share(one, x) for x in alive):
                raise UnsuitedError(f"the model computes {func} of what a block returns, in between")
        return func(*args, **(kwargs or {}))

    def new(self, like: Like) -> torch.Tensor:
        """A tensor without values."""
        self.refs = [ref for ref in self.refs if ref() is not None]
        x = like.empty()
        self.refs.append(weakref.ref(x))
        return x


@dataclass
class ByBlock(Capture):
    """A capture whose batches run through a block together, where the model allows it."""

    #: Bytes of outputs that wait on the device at most, and one batch more.
    waiting: int = 0
    #: Entered while blocks are called that something stands in for.
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    #: Is told of a block that batches are about to run through, and why batches do not.
    say: Callable[[str], None] = LOG.debug
    #: Why batches run through the whole model one after the other; "" where they do not.
    reason: str = ""
    stage: Stage = Stage.WHOLE
    #: Of each block: what it returned of the first batch.
    forms: list[Any] = field(default_factory=list)
    #: Of the block that runs: what its input is like, and all that it was given.
    like: Like | None = None
    given: Given = field(default_factory=list)
    #: The last batches, which wait for the blocks, and their bytes on the device.
    group: list[Call] = field(default_factory=list)
    held_back: int = 0

    def run(self, model: nn.Module, calibration: Iterable[Any]) -> None:
        """All batches, the first one through the whole model."""
        for call in calls_of(calibration):
            if self.reason or not self.calls:
                self.run_whole(model, call)
            elif not self.run_around(model, call):
                # The batches before it come first, in errors too.
                self.run_blocks(model)
                self.run_whole(model, call)
            elif self.is_full(call):
                self.run_blocks(model)
        self.run_blocks(model)

    def unsuited(self, reason: str) -> None:
        """Note why batches run through the whole model from now on."""
        if self.reason:
            return
        self.reason = reason
        LOG.info("batches run through the whole model one after the other: %s", self.reason)
        self.say(f"one batch after the other: {self.reason}")

    def run_around(self, model: nn.Module, call: Call) -> bool:
        """What stands around the blocks, of one batch that joins those that wait; whether it was possible."""
        first = len(self.calls)
        self.begin(call)
        try:
            with self.stood_in(), suppress(Enough):
                model(*call[0], **call[1])
            self.check_ranges()
            self.check_all_ran()
        except Exception as error:  # noqa: BLE001  the whole model says what is wrong with a batch
            self.forget(first)
            self.unsuited(
                str(error) if isinstance(error, UnsuitedError) else f"{type(error).__name__}: {error}"
            )
            return False
        self.group.append(call)
        return True

    @contextmanager
    def stood_in(self) -> Iterator[None]:
        """Calls of blocks return tensors that nothing may read."""
        self.stage, unread = Stage.AROUND, Unread()
        try:
            with ExitStack() as stack:
                stack.enter_context(self.around())
                for index, module in enumerate(self.blocks.values()):
                    stack.enter_context(_forward(module, partial(self._stand_in, index, unread)))
                stack.enter_context(unread)
                yield
        finally:
            self.stage = Stage.WHOLE

    def _stand_in(self, index: int, unread: Unread, *args: Any, **kwargs: Any) -> Any:
        """In place of a block's forward: an output of the form that the first batch's had."""
        new = partial(unread.new, self.first)
        return replaced(self.forms[index], lambda leaf: None if leaf is None else new())

    @property
    def first(self) -> Like:
        """What inputs of the blocks are like; RuntimeError before a block was given one."""
        if self.like is None:
            block = next(iter(self.blocks), "a block")
            raise RuntimeError(f"no input has reached {block}; run a batch through the model first")
        return self.like

    def is_full(self, call: Call) -> bool:
        """Whether no other batch of this size may wait beside those that do."""
        outputs = max(sum(leaf is not None for leaf in leaves(form)) for form in self.forms)
        size = self.first.bytes * outputs + sum(x.nbytes for x in tensors([call[0], list(call[1].values())]))
        self.held_back += size
        return self.held_back + size > self.waiting

    def forget(self, first: int) -> None:
        """Batches from this one on, as if they had not run."""
        for one in (self.held, self.calls, self.autocasts, self.shapes, self.masks):
            del one[first:]

    def run_blocks(self, model: nn.Module) -> None:
        """The batches that wait through every block, or, where one turns out to be unsuited, each through the whole model."""
        group, self.group, self.held_back = self.group, [], 0
        first = len(self.calls) - len(group)
        try:
            self._run_blocks(model, first, group)
        except UnsuitedError as error:
            self.forget(first)
            self.unsuited(str(error))
            for call in group:
                self.run_whole(model, call)

    def _run_blocks(self, model: nn.Module, first: int, group: list[Call]) -> None:
        stream = self.held[first:]
        self.stage = Stage.BLOCK
        try:
            for index, name in enumerate(self.blocks if group else ()):
                self.say(name)
                for number, call in enumerate(group):
                    self.running, self.at, self.ranges = first + number, "", Ranges()
                    with noting(model, self, call):
                        stream[number] = self._handed_on(index, stream[number])
        finally:
            self.stage, self.given = Stage.WHOLE, []

    def _handed_on(self, index: int, held: dict[Handed, HeldTensor]) -> dict[Handed, HeldTensor]:
        """What later blocks take of this one's outputs, in the batch that runs, and of those before."""
        output = self.output(index, self.running, held)
        needed = used(self.calls[self.running][index + 1 :])
        outputs = {Handed(index, place): HeldTensor(x, x.device) for place, x in enumerate(tensors(output))}
        return {key: one for key, one in (held | outputs).items() if key in needed}

    def before(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take in the arguments of a block, as they are whatever blocks compute."""
        if self.stage is not Stage.BLOCK:
            super().before(index, args, kwargs)
        x = input_of(args, kwargs, list(self.blocks)[index])
        if self.stage is Stage.AROUND:
            if index == 0 and not x.numel():
                raise UnsuitedError("a batch is empty")
            self.like = Like.of(x) if index == 0 else self.like
            return
        self.like = Like.of(x)
        self.given = [(one, place_of(one)) for one in tensors([args, list(kwargs.values())])]
        if self.stage is Stage.WHOLE and any(
            isinstance(one, Mapping) for one in leaves([args, *kwargs.values()])
        ):
            self.unsuited(f"{list(self.blocks)[index]} is given a mapping")

    def after(self, index: int, output: Any) -> None:
        """Take in the output of a block, or hold it against the first batch's."""
        name = list(self.blocks)[index]
        if self.stage is Stage.BLOCK:
            self.check_returned(name, output)
            if self._form_of(output, name) != self.forms[index]:
                raise UnsuitedError(f"{name} returns another number of values than of the first batch")
            self.given = []
            return
        super().after(index, output)
        if self.stage is Stage.WHOLE and not self.running and not self.reason:
            try:
                self.forms.append(self._form_of(output, name))
            except UnsuitedError as error:
                self.unsuited(str(error))
        self.given = []

    def _form_of(self, output: Any, name: str) -> Any:
        return form_of(output, self.first, self.given, name)

    def check_returned(self, name: str, output: Any) -> None:
        """ValueError for NaN or infinity, where there are values."""
        if self.stage is not Stage.AROUND:
            super().check_returned(name, output)


@contextmanager
def _forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Another forward of a module inside."""
    own = vars(module)
    before = own.get("forward")
    own["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del own["forward"]
        else:
            own["forward"] = before


__all__ = ["ByBlock"]
