"""Calibration block by block: each block sees inputs that the changed blocks before it have made, and memory stays bounded.

First every batch runs through the whole model once, as it is. That run keeps the input of the first block and the other
arguments of every block (masks, positions; most are the same tensors for all), notes which of them are outputs of blocks before
(`ao_lab.calibration.handed`), and finds what would make the walk another computation than the model: blocks that are skipped,
repeated or called in another order, something between two blocks that changes what they hand on, arguments that blocks write
to, caches, NaN and infinity, layers that no data reach. All of it is an error before anything changes.

Then block by block: `visit` gets the block, runs the data through it as often as it likes (once, with hooks, is usual) and
changes it; after that the data run once more, and these outputs, all that later blocks take, are their inputs. What is held are
these tensors for every batch, in host memory where `offload` says so, and what `visit` keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ao_lab.calibration.autocast import Autocast
from ao_lab.calibration.batches import (
    Call,
    calls_of,
    described,
    first_tensor,
    input_of,
    taken,
)
from ao_lab.calibration.handed import INPUT, Handed, Kept, Known, changed, check_no_cache, leaves, tensors
from ao_lab.calibration.hooks import watching

BETWEEN = "which a walk over blocks would leave out; give blocks='' to take the whole model as one block"
LEAVE_OUT = "leave the batch out, or look for the weights that make it"

Visit = Callable[["Block"], None]
#: Inputs up to here have squares within float32.
LARGEST_INPUT = math.sqrt(torch.finfo(torch.float32).max)


@dataclass(frozen=True)
class Block:
    """A block during the walk. `run()` passes all data through it as it is now, and drops the outputs."""

    name: str
    module: nn.Module
    run: Callable[[], None]


class _Enough(Exception):
    """Ends a forward whose remaining layers nobody needs."""


@dataclass
class Capture:
    """What the blocks of a model were given, batch by batch; made by `captured`, used up by `walk`."""

    blocks: dict[str, nn.Module]
    offload: bool = False
    #: Of each batch: what the block whose turn it is and those behind it take of the ones before.
    held: list[dict[Handed, Kept]] = field(default_factory=list)
    #: Of each batch and block: the arguments; a `Handed` stands where an output of a block before it goes.
    calls: list[list[Call]] = field(default_factory=list)
    #: Of each batch and block: whether the model casts there, which its forward may ask for.
    autocasts: list[list[Autocast]] = field(default_factory=list)
    #: What blocks have taken and returned in this batch, and the first output of the block that ran last.
    known: Known = field(default_factory=Known)
    last: torch.Tensor | None = None
    #: Names of layers that data reach, and what is to be said of the one that was reached last in this batch.
    reached: set[str] = field(default_factory=set)
    at: str = ""

    def observe(self, name: str, module: nn.Module, x: torch.Tensor) -> None:
        """Note that data reach a layer; ValueError where no statistic can be kept of its input."""
        self.at = f"; it was at {name}, {described(module.weight)}, with an input of {described(x)}"
        if not x.numel():
            return
        self.reached.add(name)
        most, batch = float(x.abs().max()), len(self.calls) - 1
        if not math.isfinite(most):
            raise ValueError(f"{name} is given NaN or infinity by batch {batch}; {LEAVE_OUT}")
        if most > LARGEST_INPUT:
            raise ValueError(
                f"{name} is given values up to {most:.2g} by batch {batch}, whose squares overflow float32; {LEAVE_OUT}"
            )

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
                f"{name} was called where {turn} was next: a walk needs blocks that run once each, in their order; name "
                f"another list by blocks=, or give blocks='' to take the whole model as one block"
            )
        x = input_of(args, kwargs, name)
        check_no_cache(args, kwargs, name)
        if index == 0:
            where = f"where {name or 'the model'} begins"
            _check_finite(x, f"batch {len(self.calls) - 1} holds NaN or infinity {where}")
            self.held.append({INPUT: Kept.of(x, self.offload)})
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
        found = {}
        for key, value in (*enumerate(args), *kwargs.items()):
            for one in leaves(value):
                self._check_followed(one, f"argument {key} of {name}")
                if isinstance(one, torch.Tensor) and (handed := self.known.handed(one)) is not None:
                    found[id(one)] = handed
        return found

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
        if len(self.blocks) > 1:
            x = first_tensor(output, name)
            _check_finite(x, f"{name} makes NaN or infinity of batch {len(self.calls) - 1}")
            self.known.returned(index, output)
            self.last = x
        if index == len(self.blocks) - 1 and len(self.calls) > 1:
            raise _Enough

    def outputs(self, index: int) -> Iterator[tuple[int, Any]]:
        """Batch by batch the outputs of a block as it is now."""
        block = list(self.blocks.values())[index]
        for batch, (held, calls) in enumerate(zip(self.held, self.calls, strict=True)):
            taken = {handed: held[handed].taken() for handed in _used(calls[index : index + 1])}
            args, kwargs = changed(calls[index], partial(_filled, taken))
            with self.autocasts[batch][index].entered():
                output = block(*args, **kwargs)
            yield batch, output

    def run(self, index: int) -> None:
        """All data through a block."""
        for _ in self.outputs(index):
            pass

    def advance(self, index: int) -> None:
        """The outputs of a block beside those of others that later blocks take, in place of its inputs."""
        for batch, output in self.outputs(index):
            needed = _used(self.calls[batch][index + 1 :])
            made = {Handed(index, place): x for place, x in enumerate(tensors(output))}
            kept = {handed: Kept.of(x, self.offload) for handed, x in made.items() if handed in needed}
            self.held[batch] = {key: one for key, one in self.held[batch].items() if key in needed} | kept


def captured(
    model: nn.Module,
    calibration: Iterable[Any],
    blocks: dict[str, nn.Module],
    *,
    offload: bool = False,
    layers: Iterable[tuple[str, nn.Module]] = (),
) -> Capture:
    """Run each batch through the model as it is, and keep what `walk` needs.

    calibration: an iterable of batches, gone through once: a tensor is the first argument, a tuple or list are the arguments, a
    mapping the keywords of a call of the model. blocks: of `find_blocks`. layers: linear layers, by name, whose inputs have to
    be finite, with squares within float32; `reached` are those that got any. Call it inside `calibrating`.

    Raises TypeError for other batches; ValueError where there is none, and as the module says: nothing has changed then. A note
    at an error of the model says which batch it is, and what the model takes.
    """
    capture = Capture(blocks, offload)
    handles: list[Any] = []
    try:
        for index, module in enumerate(blocks.values()):
            handles.append(module.register_forward_pre_hook(_before(capture, index), with_kwargs=True))
            handles.append(module.register_forward_hook(_after(capture, index)))
        with watching((name, module, capture) for name, module in layers):
            for index, batch in enumerate(calls_of(calibration)):
                capture.calls.append([])
                capture.autocasts.append([])
                capture.at, capture.known, capture.last = "", Known(), None
                with _noting(model, capture, index, batch):
                    _run_until_enough(model, batch)
                    _check_all_ran(capture)
    finally:
        for handle in handles:
            handle.remove()
        capture.known, capture.last = Known(), None
    if not capture.calls:
        raise ValueError("calibration has no batches; give some, of the data that the model is for")
    return capture


def walk(capture: Capture, visit: Visit) -> None:
    """`visit` each block in order, and then run the data through it once more, for the next one."""
    for index, (name, module) in enumerate(capture.blocks.items()):
        visit(Block(name, module, partial(capture.run, index)))
        if index + 1 < len(capture.blocks):
            capture.advance(index)


@contextmanager
def calibrating(model: nn.Module) -> Iterator[None]:
    """Without gradients, in eval mode and without caches of keys and values inside; everything as before afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    found: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs = {id(config): config for config in found if getattr(config, "use_cache", None) is True}
    try:
        model.eval()
        for config in configs.values():
            config.use_cache = False
        with torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        # Casts of weights as they were: inside a caller's autocast those of the first run would multiply on.
        torch.clear_autocast_cache()
        for config in configs.values():
            config.use_cache = True
        for module, training in modes:
            module.training = training


def _before(capture: Capture, index: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        capture.before(index, args, kwargs)

    return hook


def _after(capture: Capture, index: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        capture.after(index, output)

    return hook


@contextmanager
def _noting(model: nn.Module, capture: Capture, index: int, call: Call) -> Iterator[None]:
    """A note at an error says which batch made it, and what the model takes."""
    try:
        yield
    except Exception as error:
        told = ", ".join(filter(None, map(described, call)))
        error.add_note(
            f"batch {index} of calibration is {told}; {taken(model)}{capture.at}. Nothing has changed"
        )
        raise


def _run_until_enough(model: nn.Module, call: Call) -> None:
    with suppress(_Enough):
        model(*call[0], **call[1])


def _check_all_ran(capture: Capture) -> None:
    missing = list(capture.blocks)[len(capture.calls[-1]) :]
    if missing:
        raise ValueError(
            f"{missing[0]} was not called by the model's forward: a walk needs blocks that run once each, in their order; name "
            f"another list by blocks=, or give blocks='' to take the whole model as one block"
        )


def _check_finite(x: torch.Tensor, what: str) -> None:
    if not bool(x.isfinite().all()):
        raise ValueError(f"{what}; {LEAVE_OUT}")


def _filled(taken: dict[Handed, torch.Tensor], value: Any) -> Any:
    return taken[value] if isinstance(value, Handed) else value


def _used(calls: Iterable[Call]) -> set[Handed]:
    """Outputs of blocks that are arguments of these calls."""
    return {
        leaf
        for args, kwargs in calls
        for leaf in leaves([args, list(kwargs.values())])
        if isinstance(leaf, Handed)
    }


__all__ = ["Block", "Capture", "Visit", "calibrating", "captured", "walk"]
