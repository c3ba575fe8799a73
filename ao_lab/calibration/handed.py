"""What blocks hand to each other: which arguments of a block are outputs of blocks before it, and these while they wait.

A block may return several tensors (hidden states and a residual, keys and values that later layers share), and a later block
may take any of them. An argument is such an output where it is the same memory, and nothing has written to it since. What is no
output of a block has to be the same whatever the blocks compute: masks, positions, the states of an encoder.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ao_lab.calibration.batches import Call
from ao_lab.calibration.statistics import place_of

#: Arguments under which models hand a cache of keys and values to their blocks, whatever it is.
CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params", "cache")


@dataclass(frozen=True)
class Handed:
    """Stands where an output goes: of which block, and which of its tensors. `INPUT` is the input of the first block."""

    block: int
    place: int


INPUT = Handed(-1, 0)


@dataclass(frozen=True)
class Kept:
    """A copy that no block can write to, and the device that it was on."""

    value: torch.Tensor
    device: torch.device

    @staticmethod
    def of(x: torch.Tensor, offload: bool) -> Kept:
        """A copy, in host memory with `offload`."""
        x = x.detach()
        return Kept(x.to("cpu", copy=True) if offload else x.clone(), x.device)

    def taken(self) -> torch.Tensor:
        """A tensor that a block may write to."""
        return self.value.clone() if self.value.device == self.device else self.value.to(self.device)


def leaves(value: Any) -> Iterator[Any]:
    """The values in tuples and lists, in order. Mappings are values: blocks write into those that they share."""
    if isinstance(value, (tuple, list)):
        for one in value:
            yield from leaves(one)
    else:
        yield value


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in tuples and lists, in order."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def replaced(value: Any, change: Callable[[Any], Any]) -> Any:
    """A value with `change` of each leaf in its place; the value itself where none is another."""
    if not isinstance(value, (tuple, list)):
        return change(value)
    made = [replaced(one, change) for one in value]
    if all(new is old for new, old in zip(made, value, strict=True)):
        return value
    return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)


def changed(call: Call, change: Callable[[Any], Any]) -> Call:
    """The arguments of a call with `change` of each leaf in its place."""
    args, kwargs = call
    return tuple(replaced(value, change) for value in args), {
        key: replaced(value, change) for key, value in kwargs.items()
    }


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
        found = [one for one in tensors([args, list(kwargs.values())]) if self.handed(one) is None]
        self.given = [(one, place_of(one)) for one in found if one is not x]
        self.arguments.extend((weakref.ref(one), place_of(one)) for one in found)

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
        return (x.shape, x.dtype) != (like.shape, like.dtype) and not any(_share(x, one) for one in alive)


def _is_still(x: torch.Tensor, place: Any, ref: weakref.ref[torch.Tensor], was: Any) -> bool:
    """Whether x is the values of another tensor that is still held; of inference tensors, the same object."""
    held = ref()
    return held is not None and (held is x if place is None else place == was)


def _share(x: torch.Tensor, other: torch.Tensor) -> bool:
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
    given = [key for key in CACHES if kwargs.get(key) is not None]
    given += [key for key, value in kwargs.items() if any(map(is_cache, leaves(value)))]
    given += [f"a {type(value).__name__}" for value in leaves(args) if is_cache(value)]
    if given:
        raise ValueError(
            f"{name or 'the model'} was given {given[0]}, which grows with every run; give batches without it, and with "
            f"use_cache=False where they name use_cache"
        )


__all__ = ["INPUT", "Handed", "Kept", "Known", "changed", "check_no_cache", "leaves", "tensors"]
