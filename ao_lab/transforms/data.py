"""Data that run through a model: observers that see the inputs of layers meanwhile, batches as calls, the model's state.

There is one way for all: `observe(layers, run)` shows the inputs of layers to observers while `run()` runs data, be it a user's
loop (static scales of `quantize_`), all batches through the model or through one block of it (`ao_lab.transforms.walk`).

Watched are calls of the layer's module. Where a model multiplies with a layer's weight without calling the module, or runs a
program compiled before, nothing is seen; that is an error at the end, by the layer's name. Weights that layers share have one
observer, which sees the inputs of all. Inside autocast the input is seen as the product takes it, cast.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ao_lab.transforms.layers import table_or_head

#: A layer's name, the layer, and what sees its inputs: anything with `observe(name, module, x)`, as `ao_lab.config.base`
#: has.
Watched = tuple[str, nn.Module, Any]


def observe(layers: Iterable[Watched], run: Callable[[], Any]) -> None:
    """Run data while observers see the inputs of their layers, and no longer, whatever it raises."""
    with watching(layers):
        run()


@dataclass
class Watch:
    """A forward hook that shows a layer's input to an observer."""

    name: str
    observer: Any

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the module runs."""
        x = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(x, torch.Tensor):
            self.observer.observe(self.name, module, as_multiplied(x))


def as_multiplied(x: torch.Tensor) -> torch.Tensor:
    """An input as the product takes it: inside autocast in the dtype of the moment."""
    kind = x.device.type
    cast = torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64
    return x.detach().to(torch.get_autocast_dtype(kind)) if cast else x.detach()


@contextmanager
def watching(layers: Iterable[Watched]) -> Iterator[None]:
    """Observers see the inputs of their layers inside."""
    handles: list[Any] = []
    try:
        for name, module, observer in layers:
            handles.append(watch(name, module, observer))
        yield
    finally:
        for handle in handles:
            handle.remove()


def watch(name: str, module: nn.Module, observer: Any) -> Any:
    """Show a module's inputs to an observer from now on; the handle removes it."""
    return module.register_forward_pre_hook(Watch(name, observer), with_kwargs=True)


def watches(module: nn.Module) -> list[Watch]:
    """The watches among a module's hooks."""
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, Watch)]


def unwatch(module: nn.Module) -> None:
    """Take the watches off a module."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, Watch):
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


class Seen:
    """A tensor as it was: held, so that no other takes its place in memory, with a count of what was written to it."""

    def __init__(self, x: torch.Tensor) -> None:
        self.tensor, self.place = x, place_of(x)

    def is_still(self, x: torch.Tensor) -> bool:
        """Whether x is a view of the same values, and nothing has written to them since."""
        return self.place is not None and place_of(x) == self.place


class Range(NamedTuple):
    """The ends of what a tensor holds, NaN where it holds NaN; what it is of, and a note."""

    name: str
    note: str
    low: float
    high: float


class Ranges:
    """Ranges of tensors that are taken together, so that the host waits for a device once and not for each."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, str, tuple[torch.Tensor, torch.Tensor]]] = []
        self.last: Seen | None = None

    def add(self, x: torch.Tensor, name: str, note: str = "") -> None:
        """That of a tensor that is not empty; once where the same was added last."""
        if self.last is None or not self.last.is_still(x):
            self.last = Seen(x)
            self.waiting.append((name, note, torch.aminmax(x)))

    def taken(self) -> list[Range]:
        """All of them in order, of which none is kept."""
        waiting, self.waiting, self.last = self.waiting, [], None
        ends = [end for _, _, pair in waiting for end in pair]
        alike = len({(end.device, end.dtype) for end in ends}) == 1
        values = torch.stack(ends).tolist() if alike else [float(end) for end in ends]
        return [Range(name, note, *values[2 * i : 2 * i + 2]) for i, (name, note, _) in enumerate(waiting)]


def place_of(x: torch.Tensor) -> tuple[Any, ...] | None:
    """Memory, shape and version; None of inference tensors, which count no writes."""
    if x.is_inference():
        return None
    return x.data_ptr(), x.shape, x.stride(), x.dtype, x.device, x._version


#: Values of a batch that an error describes.
MOST_TOLD = 8

Call = tuple[tuple[Any, ...], dict[str, Any]]


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
    values = [replaced(one, change) for one in value]
    if all(new is old for new, old in zip(values, value, strict=True)):
        return value
    return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)


def of_tensors(batch: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A batch with `change` of each tensor in its place, of those in mappings too."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: of_tensors(one, change) for key, one in value.items()}
        return change(value) if isinstance(value, torch.Tensor) else value

    return replaced(batch, leaf)


def changed(call: Call, change: Callable[[Any], Any]) -> Call:
    """The arguments of a call with `change` of each leaf in its place."""
    args, kwargs = call
    return tuple(replaced(value, change) for value in args), {
        key: replaced(value, change) for key, value in kwargs.items()
    }


def holds_batches(value: Any) -> bool:
    """Whether this is an iterable of batches, not a single one, nor a text."""
    return isinstance(value, Iterable) and not isinstance(value, (torch.Tensor, Mapping, str))


def calls_of(calibration: Iterable[Any]) -> Iterator[Call]:
    """The arguments of a call for each batch."""
    if not holds_batches(calibration):
        raise TypeError(
            f"calibration is an iterable of batches, such as a list or a DataLoader, got {type(calibration).__name__}; put a "
            f"single batch into a list"
        )
    for batch in calibration:
        if isinstance(batch, torch.Tensor):
            yield (batch,), {}
        elif isinstance(batch, Mapping):
            yield (), dict(batch)
        elif isinstance(batch, (tuple, list)):
            yield tuple(batch), {}
        else:
            raise TypeError(
                f"a batch of calibration is a tensor, a tuple of arguments or a mapping of keywords, got {type(batch).__name__}"
            )


def mask_of(call: Call) -> torch.Tensor | None:
    """Which tokens of a batch are no padding, bool (batch, tokens), by its keyword attention_mask; None where none is."""
    mask = call[1].get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.is_floating_point():
        return None
    mask = mask.detach() != 0
    return None if bool(mask.all()) else mask


def described(value: Any) -> str:
    """Dtypes and shapes of a batch, or of one of its values."""
    if isinstance(value, torch.Tensor):
        where = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}{where}"
    if not isinstance(value, (Mapping, tuple, list)):
        return type(value).__name__
    values = list(value.items()) if isinstance(value, Mapping) else [("", one) for one in value]
    told = [(f"{key}: " if key else "") + described(one) for key, one in values[:MOST_TOLD]]
    return ", ".join([*told, *(["..."] if len(values) > MOST_TOLD else [])])


def unusable(model: nn.Module, call: Call) -> str | None:
    """Why a model of transformers that takes token numbers cannot run a batch, by its keywords and values; None where they do
    not say it. Values on a GPU are not looked at: after an index out of range nothing can be read there."""
    args, kwargs = call
    if getattr(model, "main_input_name", None) != "input_ids":
        return None
    ids = args[0] if args else kwargs.get("input_ids")
    if ids is None:
        unknown = [key for key in kwargs if key not in inspect.signature(model.forward).parameters]
        return f"it has no input_ids, and the model does not know {', '.join(unknown)}" if unknown else None
    if not isinstance(ids, torch.Tensor):
        kind = type(ids).__name__
        return f'input_ids is a {kind}, and the model takes tensors; tokenizer(text, return_tensors="pt") makes them'
    if ids.is_floating_point():
        return f"input_ids are token numbers, int64, got {described(ids)}"
    if ids.dim() != 2:
        return f"input_ids are (batch, tokens), got {described(ids)}; ids[None] makes one sequence a batch"
    return _out_of_vocabulary(
        ids, getattr(table_or_head(model, "get_input_embeddings"), "num_embeddings", None)
    )


def _out_of_vocabulary(ids: torch.Tensor, size: int | None) -> str | None:
    """That token numbers are none of a vocabulary's."""
    if size is None or ids.device.type != "cpu" or not ids.numel():
        return None
    low, high = (int(end) for end in torch.aminmax(ids))
    if low >= 0 and high < size:
        return None
    wrong = low if low < 0 else high
    return f"input_ids has token {wrong}, and the model has tokens 0 to {size - 1}; take the model's own tokenizer"


def taken(model: nn.Module) -> str:
    """What a model takes, as far as it says: arguments of its forward, dtype and device of its weights."""
    try:
        arguments = ", ".join(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):  # a forward that is no Python function
        arguments = "..."
    weights = {f"{str(p.dtype).removeprefix('torch.')} on {p.device}" for p in model.parameters()}
    return f"{type(model).__name__} takes ({arguments}), its weights are {' and '.join(sorted(weights)) or 'none'}"


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


@dataclass(frozen=True)
class Autocast:
    """Whether autocast is on and to which dtype, of the kinds of devices that a block may multiply on."""

    states: tuple[tuple[str, bool, torch.dtype], ...]

    @staticmethod
    def now(device: torch.device) -> Autocast:
        """The state of the moment. A block may move its input, which waits on a host, to a GPU by itself."""
        kinds = dict.fromkeys((device.type, "cpu", *(["cuda"] if torch.cuda.is_available() else [])))
        return Autocast(
            tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in kinds
                if torch.amp.is_autocast_available(kind)
            )
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The same state inside. Casts of weights are not kept, since weights change between two calls."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self.states:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield
