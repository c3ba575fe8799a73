"""A model block by block: each block sees inputs that the changed blocks before it have made, and memory stays bounded.

Where the blocks are (`find_blocks`): candidates are every `nn.ModuleList` whose entries have one class and hold linear layers,
but those inside another candidate (a block's experts). The longest is the list; where two are equally long (an encoder and a
decoder) the caller names one.

First (`captured`) every batch runs through the whole model once, as it is. That run keeps the input of the first block and the
other arguments of every block (masks, positions; most are the same tensors for all), notes which of them are outputs of blocks
before, and finds what would make the walk another computation than the model: blocks that are skipped, repeated or called in
another order, something between two blocks that changes what they hand on, arguments that blocks write to, caches, NaN and
infinity, layers that no data reach. All of it is an error before anything changes.

Then (`walk`) block by block: `visit` gets the block, runs the data through it as often as it likes (once, with hooks, is usual)
and changes it; after that the data run once more, and these outputs, all that later blocks take, are their inputs. What is held
are these tensors for every batch, in host memory where `offload` says so, and what `visit` keeps.

A block may return several tensors (hidden states and a residual, keys and values that later layers share), and a later block
may take any of them. An argument is such an output where it is the same memory, and nothing has written to it since. What is no
output of a block has to be the same whatever the blocks compute: masks, positions, the states of an encoder.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ao_lab.transforms.data import (
    Autocast,
    Call,
    Ranges,
    calls_of,
    changed,
    described,
    leaves,
    mask_of,
    observe,
    place_of,
    taken,
    tensors,
    unusable,
)
from ao_lab.transforms.layers import shorten

#: The name that makes the whole model one block.
WHOLE = ""


def block_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """The candidates by name, in the order of the model's modules."""
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if name and not inside and isinstance(module, nn.ModuleList) and _is_list_of_blocks(module):
            found[name] = module
    return found


def _is_list_of_blocks(modules: nn.ModuleList) -> bool:
    """One class, with linear layers inside; a list of linear layers or of norms is no list of blocks."""
    return len({type(module) for module in modules}) == 1 and any(map(_holds_linears, modules))


def _holds_linears(block: nn.Module) -> bool:
    """Whether nn.Linear, or transformers' Conv1D by its name, is inside."""
    return any(
        isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        for module in block.modules()
        if module is not block
    )


def find_blocks(model: nn.Module, blocks: str | None = None) -> dict[str, nn.Module]:
    """The blocks by full name, in order. `blocks`: the name of their nn.ModuleList or nn.Sequential, "" for the whole model as
    one block; None looks for the longest list.

    Raises ValueError where there is no list, where two are equally long, and for a name that is none; TypeError for no string.
    """
    if blocks is None:
        blocks = _longest(model)
    if not isinstance(blocks, str):
        raise TypeError(
            f"blocks is the name of a list of modules, got {type(blocks).__name__}: {blocks!r:.60}"
        )
    if blocks == WHOLE:
        return {WHOLE: model}
    module = dict(model.named_modules()).get(blocks)
    if not isinstance(module, (nn.ModuleList, nn.Sequential)) or not len(module):
        kind = (
            "no module" if module is None else f"a {type(module).__name__} of {len(list(module.children()))}"
        )
        raise ValueError(
            f"blocks={blocks!r} is {kind} of this model; name an nn.ModuleList or nn.Sequential that its forward runs through"
            f"{_known(model)}, or give blocks='' to treat the whole model as one block"
        )
    return {f"{blocks}.{name}": block for name, block in module.named_children()}


def _longest(model: nn.Module) -> str:
    """The name of the longest list; ValueError for none, or for several."""
    lists = block_lists(model)
    most = max(map(len, lists.values()), default=0)
    longest = [name for name, modules in lists.items() if len(modules) == most]
    if len(longest) == 1:
        return longest[0]
    if not longest:
        raise ValueError(
            f"{type(model).__name__} has no nn.ModuleList of blocks of one class that hold linear layers; name the list by "
            f"blocks=, or give blocks='' to treat the whole model as one block"
        )
    raise ValueError(
        f"{' and '.join(longest)} are lists of {most} blocks each, so the list is ambiguous; name it with blocks="
    )


def _known(model: nn.Module) -> str:
    names = list(block_lists(model))
    return f" (here {', '.join(names[:5])})" if names else ""


def is_inside(path: str, names: Iterable[str]) -> bool:
    """Whether a module is one of those named, or in one; "" is the whole model."""
    return any(not name or f"{path}.".startswith(f"{name}.") for name in names)


def block_of(full: str, blocks: Iterable[str]) -> str | None:
    """The block that a parameter is in; None where it is in none."""
    return next((name for name in blocks if is_inside(full, [name])), None)


def check_reached(capture: Capture, names: Iterable[str], caller: str) -> None:
    """ValueError for layers that no data reached."""
    missing = [name for name in names if name not in capture.reached]
    if missing:
        raise ValueError(
            f"{caller} changed nothing. No input was seen by {shorten(missing)}; give data that reaches these layers by "
            f"calling their modules, or exclude them with filter_fn"
        )


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> torch.Tensor:
    """The first tensor among the arguments."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value
    raise ValueError(f"{name or 'the model'} was called without a tensor; batches hold tensors")


def first_tensor(output: Any, name: str) -> torch.Tensor:
    """What a block hands on: its output, or the first of several."""
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(first, torch.Tensor):
        raise ValueError(
            f"{name} returns {type(output).__name__}; it must be a tensor, or a tuple that begins with one"
        )
    return first


#: Arguments under which models hand a cache of keys and values to their blocks, whatever it is.
CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params", "cache")


@dataclass(frozen=True)
class Handed:
    """Stands where an output goes: of which block, and which of its tensors. `INPUT` is the input of the first block."""

    block: int
    place: int


INPUT = Handed(-1, 0)


@dataclass(frozen=True)
class HeldTensor:
    """A copy that no block can write to, and the device that it was on."""

    value: torch.Tensor
    device: torch.device

    @staticmethod
    def of(x: torch.Tensor, offload: bool) -> HeldTensor:
        """A copy, in host memory with `offload`."""
        x = x.detach()
        return HeldTensor(x.to("cpu", copy=True) if offload else x.clone(), x.device)

    def taken(self) -> torch.Tensor:
        """A tensor that a block may write to."""
        return self.value.clone() if self.value.device == self.device else self.value.to(self.device)


@dataclass
class Known:
    """The tensors that blocks were given and have returned in one run of the model, held as long as the model holds them."""

    outputs: list[tuple[Handed, weakref.ref[torch.Tensor], Any]] = field(default_factory=list)
    arguments: list[tuple[weakref.ref[torch.Tensor], Any]] = field(default_factory=list)
    #: Of the block that runs: arguments that are no outputs.
    given: list[tuple[torch.Tensor, Any]] = field(default_factory=list)

    def returned(self, block: int, output: Any) -> None:
        """Note what a block returns."""
        for place, x in enumerate(tensors(output)):
            self.outputs.append((Handed(block, place), weakref.ref(x), place_of(x)))

    def handed(self, x: torch.Tensor) -> Handed | None:
        """The latest output that a tensor is; None where it is none, or was written to."""
        place = place_of(x)
        return next((one for one, ref, was in reversed(self.outputs) if _is_still(x, place, ref, was)), None)

    def take(self, x: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the arguments of a block that is about to run, x its input among them."""
        new = [one for one in tensors([args, list(kwargs.values())]) if self.handed(one) is None]
        self.given = [(one, place_of(one)) for one in new if one is not x]
        self.arguments.extend((weakref.ref(one), place_of(one)) for one in new)

    def written(self) -> torch.Tensor | None:
        """An argument that the block has written to, which is no output."""
        return next((x for x, was in self.given if was is not None and place_of(x) != was), None)

    def is_followed(self, x: torch.Tensor, like: torch.Tensor) -> bool:
        """Whether a tensor is an output, or may be taken to be the same whatever blocks compute: not where it has the memory of
        an output in another shape or state, nor where it has the shape and dtype of `like`, an output, and is new."""
        if self.handed(x) is not None:
            return True
        place = place_of(x)
        if any(_is_still(x, place, ref, was) for ref, was in self.arguments):
            return True
        alive = [one for _, ref, _ in self.outputs if (one := ref()) is not None]
        return (x.shape, x.dtype) != (like.shape, like.dtype) and not any(share(x, one) for one in alive)


def _is_still(x: torch.Tensor, place: Any, ref: weakref.ref[torch.Tensor], was: Any) -> bool:
    """Whether x is the values of another tensor that is still held; of inference tensors, the same object."""
    held = ref()
    return held is not None and (held is x if place is None else place == was)


def share(x: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are of one piece of memory. A tensor without storage, as subclasses are, shares none."""
    try:
        mine, theirs = x.untyped_storage().data_ptr(), other.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return False
    return mine == theirs != 0


def is_cache(value: Any) -> bool:
    """Whether a value is an object that keeps keys and values, or states, of what it was given: it has a method `update`."""
    if isinstance(value, (torch.Tensor, nn.Module, Mapping, Set, type)):
        return False
    return callable(getattr(type(value), "update", None)) or type(value).__name__.endswith("Cache")


def check_no_cache(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> None:
    """ValueError where a block is given a cache: by its value, or by a name under which models hand one on."""
    caches = [key for key in CACHES if kwargs.get(key) is not None]
    caches += [key for key, value in kwargs.items() if any(map(is_cache, leaves(value)))]
    caches += [f"a {type(value).__name__}" for value in leaves(args) if is_cache(value)]
    if caches:
        raise ValueError(
            f"{name or 'the model'} was given {caches[0]}, which grows with every run; give batches without it, and with "
            f"use_cache=False where they name use_cache"
        )


BETWEEN = "which block-by-block calibration would skip; give blocks='' to treat the whole model as one block"
LEAVE_OUT = "drop the batch, or look for the weights that cause it"

Visit = Callable[["Block"], None]
#: Inputs up to here have squares within float32.
LARGEST_INPUT = math.sqrt(torch.finfo(torch.float32).max)


@dataclass(frozen=True)
class Block:
    """A block during the walk. `run()` passes all data through it as it is now, and drops the outputs."""

    name: str
    module: nn.Module
    index: int
    capture: Capture
    #: Of each batch: what the block of the model as it was returned of that model's inputs, where the walk holds them.
    originals: Sequence[HeldTensor] = ()

    def run(self) -> None:
        """All data through the block, batch by batch."""
        for _ in self.outputs():
            pass

    def outputs(self) -> Iterator[tuple[int, Any]]:
        """Batch by batch, by their numbers, what the block returns now."""
        return self.capture.outputs(self.index)

    def output(self, batch: int) -> torch.Tensor:
        """What the block hands on of one batch now."""
        return first_tensor(self.capture.output(self.index, batch, self.capture.held[batch]), self.name)


#: Of each batch, what blocks to come take of those before.
Stream = list[dict[Handed, HeldTensor]]


class Enough(Exception):
    """Ends a forward whose remaining layers nobody needs."""


@dataclass
class Capture:
    """What the blocks of a model were given, batch by batch; made by `captured`, used up by `walk`."""

    blocks: dict[str, nn.Module]
    offload: bool = False
    #: Of each batch: what the block whose turn it is and those behind it take of the ones before.
    held: Stream = field(default_factory=list)
    #: Of each batch and block: the arguments; a `Handed` stands where an output of a block before it goes.
    calls: list[list[Call]] = field(default_factory=list)
    #: Of each batch and block: whether the model casts there, which its forward may ask for.
    autocasts: list[list[Autocast]] = field(default_factory=list)
    #: Of each batch: the shape of the tokens that the first block is given, and which are no padding, where the batch says so.
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    masks: list[torch.Tensor | None] = field(default_factory=list)
    #: The number of the batch that runs through a block.
    running: int = 0
    #: What blocks have taken and returned in this batch, and the first output of the block that ran last.
    known: Known = field(default_factory=Known)
    last: torch.Tensor | None = None
    #: Names of layers that data reach, and what is to be said of the one that was reached last in this batch.
    reached: set[str] = field(default_factory=set)
    at: str = ""
    #: Of the block that runs: the ranges of its layers' inputs.
    ranges: Ranges = field(default_factory=Ranges)

    def begin(self, call: Call) -> None:
        """A new batch."""
        self.calls.append([])
        self.masks.append(mask_of(call))
        self.autocasts.append([])
        self.at, self.known, self.last, self.ranges = "", Known(), None, Ranges()
        self.running = len(self.calls) - 1

    def run(self, model: nn.Module, calibration: Iterable[Any]) -> None:
        """All batches through the model as it is, one after the other."""
        for call in calls_of(calibration):
            self.run_whole(model, call)

    def run_whole(self, model: nn.Module, call: Call) -> None:
        """A batch through the whole model."""
        self.begin(call)
        with noting(model, self, call):
            with suppress(Enough):
                model(*call[0], **call[1])
            self.check_ranges()
            self.check_all_ran()

    def check_all_ran(self) -> None:
        """ValueError for a block that the batch has not reached."""
        if missing := list(self.blocks)[len(self.calls[-1]) :]:
            raise ValueError(
                f"{missing[0]} was not called by the model's forward: blocks must run once each, in order; "
                f"name another list with blocks=, or give blocks='' to treat the whole model as one block"
            )

    def observe(self, name: str, module: nn.Module, x: torch.Tensor) -> None:
        """Note that data reach a layer, and the ends of its input's range, which are looked at when its block has returned."""
        self.at = f"; it was at {name}, {described(module.weight)}, with an input of {described(x)}"
        if not x.numel():
            return
        self.reached.add(name)
        self.ranges.add(x, name, self.at)

    def check_ranges(self) -> None:
        """ValueError for layers that ran since the last block returned, of whose inputs no statistic can be kept, and for NaN
        or infinity in what that block hands on.
        """
        for name, note, low, high in self.ranges.taken():
            most, finite = max(-low, high), math.isfinite(low) and math.isfinite(high)
            if finite and (not note or most <= LARGEST_INPUT):
                continue
            self.at, batch = note or self.at, self.running
            if not note:
                raise ValueError(f"{name} makes NaN or infinity of batch {batch}; {LEAVE_OUT}")
            what = f"values up to {most:.2g} by batch {batch}, whose squares overflow float32"
            what = what if finite else f"NaN or infinity by batch {batch}"
            raise ValueError(f"{name} is given {what}; {LEAVE_OUT}")

    def before(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take in the arguments of a block; ValueError where the walk would not be the model."""
        name, calls = list(self.blocks)[index], self.calls[-1]
        if len(calls) != index:
            turn = (
                f"block {len(calls)} of {len(self.blocks)}"
                if len(calls) < len(self.blocks)
                else "the end of all blocks"
            )
            raise ValueError(
                f"{name} was called where {turn} was next: blocks must run once each, in order; name "
                f"another list by blocks=, or give blocks='' to treat the whole model as one block"
            )
        x = input_of(args, kwargs, name)
        check_no_cache(args, kwargs, name)
        if index == 0:
            where = f"where {name or 'the model'} begins"
            _check_finite(x, f"batch {self.running} holds NaN or infinity {where}")
            self.held.append({INPUT: HeldTensor.of(x, self.offload)})
            self.shapes.append(tuple(x.shape[:-1] if x.is_floating_point() else x.shape))
            handed = {id(x): INPUT}
        else:
            handed = self._handed(x, args, kwargs, name)
        self.known.take(x, args, kwargs)
        calls.append(changed((args, kwargs), lambda value: handed.get(id(value), value)))
        self.autocasts[-1].append(Autocast.now(x.device))

    def _handed(
        self, x: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], name: str
    ) -> dict[int, Handed]:
        """The outputs among the arguments of a block, by the identity of their tensors; ValueError where they were changed."""
        before = list(self.blocks)[len(self.calls[-1]) - 1]
        if self.last is None or self.known.handed(x) is None:
            raise ValueError(
                f"the input of {name} is not the output of {before}: the model changes it in between, {BETWEEN}"
            )
        handed_on = {}
        for key, value in (*enumerate(args), *kwargs.items()):
            for one in leaves(value):
                self._check_followed(one, f"argument {key} of {name}")
                if isinstance(one, torch.Tensor) and (handed := self.known.handed(one)) is not None:
                    handed_on[id(one)] = handed
        return handed_on

    def _check_followed(self, value: Any, what: str) -> None:
        """ValueError where a walk would not know how an argument follows from what blocks return."""
        assert self.last is not None
        if isinstance(value, torch.Tensor) and not self.known.is_followed(value, self.last):
            raise ValueError(
                f"{what}, {described(value)}, may be made of outputs of blocks before it, in between, {BETWEEN}"
            )
        if isinstance(value, Mapping) and any(map(self.known.handed, tensors(list(value.values())))):
            raise ValueError(f"{what} is a mapping with outputs of blocks before it, {BETWEEN}")

    def after(self, index: int, output: Any) -> None:
        """Take in the output of a block; stop behind the last one. The first batch runs on, to find a block that runs again."""
        name = list(self.blocks)[index]
        if (written := self.known.written()) is not None:
            raise ValueError(
                f"{name or 'the model'} writes to an argument, {described(written)}, so that its second run would compute "
                f"something else; let it write to a copy"
            )
        self.check_returned(name, output)
        if len(self.blocks) > 1:
            self.known.returned(index, output)
            self.last = first_tensor(output, name)
        if index == len(self.blocks) - 1 and self.running:
            raise Enough

    def check_returned(self, name: str, output: Any) -> None:
        """Look at what a block hands on, and at what its layers were given: the host waits once for all of it."""
        if len(self.blocks) > 1 and (x := first_tensor(output, name).detach()).numel():
            self.ranges.add(x, name)
        self.check_ranges()

    def output(self, index: int, batch: int, held: Mapping[Handed, HeldTensor]) -> Any:
        """What a block returns as it is now, of what the ones before have handed on in a batch."""
        self.running, call = batch, self.calls[batch][index]
        taken = {handed: held[handed].taken() for handed in used([call])}
        args, kwargs = changed(call, partial(_filled, taken))
        with self.autocasts[batch][index].entered():
            return list(self.blocks.values())[index](*args, **kwargs)

    def outputs(self, index: int) -> Iterator[tuple[int, Any]]:
        """Batch by batch the outputs of a block as it is now."""
        for batch, held in enumerate(self.held):
            yield batch, self.output(index, batch, held)

    def following(self, index: int, stream: Stream) -> Iterator[tuple[Any, dict[Handed, HeldTensor]]]:
        """Batch by batch the output of a block as it is now, and what later blocks take of it and of those before."""
        for batch, held in enumerate(stream):
            output, needed = self.output(index, batch, held), used(self.calls[batch][index + 1 :])
            outputs = {Handed(index, place): x for place, x in enumerate(tensors(output))}
            new = {key: HeldTensor.of(x, self.offload) for key, x in outputs.items() if key in needed}
            yield output, {key: one for key, one in held.items() if key in needed} | new

    def advance(self, index: int, stream: Stream) -> Iterator[Any]:
        """Batch by batch the output of a block; what later blocks take comes in place of its inputs."""
        for batch, (output, held) in enumerate(self.following(index, stream)):
            stream[batch] = held
            yield output


def captured(
    model: nn.Module,
    calibration: Iterable[Any],
    blocks: dict[str, nn.Module],
    *,
    offload: bool = False,
    layers: Iterable[tuple[str, nn.Module]] = (),
    make: Callable[[dict[str, nn.Module], bool], Capture] = Capture,
) -> Capture:
    """Run each batch through the model as it is, and keep what `walk` needs.

    calibration: an iterable of batches, gone through once: a tensor is the first argument, a tuple or list are the arguments, a
    mapping the keywords of a call of the model. blocks: of `find_blocks`. layers: linear layers, by name, whose inputs have to
    be finite, with squares within float32; `reached` are those that got any. make: makes the capture, of blocks and `offload`;
    it runs the batches (`ao_lab.transforms.by_block`). Call it inside `calibrating`.

    Raises TypeError for other batches; ValueError where there is none, and as the module says: nothing has changed then. A note
    at an error of the model says which batch it is, and what the model takes.
    """
    capture = make(blocks, offload)
    handles: list[Any] = []
    try:
        for index, module in enumerate(blocks.values()):
            before, after = _hooks(capture, index)
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after))
        observe(
            [(name, module, capture) for name, module in layers],
            partial(capture.run, model, calibration),
        )
    finally:
        for handle in handles:
            handle.remove()
        capture.known, capture.last = Known(), None
    if not capture.calls:
        raise ValueError("calibration has no batches; give some like the data that the model will see")
    return capture


def walk(capture: Capture, visit: Visit, originals: bool = False, changed: bool = True) -> None:
    """`visit` each block in order; the next one gets what it makes of its inputs afterwards, or with changed=False before.

    originals: hold what the model as it was makes of each batch, too (`Block.originals`), at twice the memory.
    """
    stream = [dict(held) for held in capture.held] if originals else []
    for index, (name, module) in enumerate(capture.blocks.items()):
        outputs = capture.advance(index, stream)
        held = [HeldTensor.of(first_tensor(output, name), capture.offload) for output in outputs]
        last = index + 1 == len(capture.blocks)
        before = [] if changed or last else [one for _, one in capture.following(index, capture.held)]
        visit(Block(name, module, index, capture, held))
        capture.held = before or capture.held
        if changed and not last:
            for _ in capture.advance(index, capture.held):
                pass


def _hooks(capture: Capture, index: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """Hooks of a block, before and after it runs."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        capture.before(index, args, kwargs)

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        capture.after(index, output)

    return before, after


@contextmanager
def noting(model: nn.Module, capture: Capture, call: Call) -> Iterator[None]:
    """A note at an error says which batch made it, and what the model takes; where the batch's own values are why, the error
    does."""
    try:
        yield
    except Exception as error:
        told = ", ".join(filter(None, map(described, call)))
        note = f"batch {capture.running} of calibration is {told}; {taken(model)}{capture.at}. Nothing has changed"
        error.add_note(note)
        if (reason := unusable(model, call)) is not None:
            raise ValueError(
                f"batch {capture.running} of calibration: {reason}. Nothing has changed"
            ) from error
        raise


def _check_finite(x: torch.Tensor, what: str) -> None:
    if not bool(x.isfinite().all()):
        raise ValueError(f"{what}; {LEAVE_OUT}")


def _filled(taken: dict[Handed, torch.Tensor], value: Any) -> Any:
    return taken[value] if isinstance(value, Handed) else value


def used(calls: Iterable[Call]) -> set[Handed]:
    """Outputs of blocks that are arguments of these calls."""
    return {
        leaf
        for args, kwargs in calls
        for leaf in leaves([args, list(kwargs.values())])
        if isinstance(leaf, Handed)
    }
