"""Rotations of the residual stream, merged into weights: a model of the same function whose channels have no outliers.

Embeddings and all layers that write to the residual stream are rotated along their outputs, all layers that read it along their
inputs (QuaRot, arXiv 2404.00456, section 3): W_embed R, R^T W_write, W_read R. An RMS norm without a gain commutes with R, so
gains are folded into the layers that read the norm first, and become 1. A head that shares the embedding's weight gets one of
its own, which is stored in addition. R is the Hadamard rotation of `reference.calibration.rotation`, of m 2^k channels.

Which layers read and write follows from shapes and the order in which modules run, and is proved before anything changes: a
copy of each block runs in float64 (casts to float32 go there too), with and without R, and B(x) R has to be B'(x R) within
`TOLERANCE`. Where both fit (square weights) the roles are tried. Refused are norms that are no RMS norms or have a bias, norms
that scale what a block adds (after a branch), and whatever else lies between embedding, blocks, norm and head.

Inside of blocks values are rotated by head where that is proved too (`ao_lab.calibration.heads`). What else a block hands on
(further outputs, mappings that blocks share) has to stay as it is.

Weights are rotated in float64 and rounded to their dtype once. A rotation that has begun is finished, whatever interrupts it.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import fast
from ao_lab.calibration.heads import Head, find_heads, with_heads
from ao_lab.calibration.rotations import Change
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.transforms.data import changed, observe, of_tensors, tensors
from ao_lab.transforms.layers import contraction_axis, full_name, is_transposed, shorten
from ao_lab.transforms.walk import (
    Capture,
    Handed,
    captured,
    first_tensor,
    is_inside,
)

#: Of the largest output, in float64: sums of some thousand terms are off by less than 1e-12 of it.
TOLERANCE = 1e-9
#: Sequences and tokens of the batch that proves it.
SEQUENCES, LENGTH = 1, 16
READS, WRITES, BOTH = "reads", "writes", "reads and writes"
CHANGED_NOTHING = "quantize_ changed nothing. Leave this Rotate out, or use Rotate()"


class Wide(TorchFunctionMode):
    """What casts to float32 casts to float64 inside, so that norms and softmaxes of copies in float64 have that precision."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.float:
            return args[0].double()
        if function is torch._grouped_mm and args[0].dtype is torch.float64:
            return _grouped(args[0], args[1], (kwargs or {})["offs"])
        wide = [torch.float64 if one is torch.float32 else one for one in args]
        more = {key: torch.float64 if one is torch.float32 else one for key, one in (kwargs or {}).items()}
        return function(*wide, **more)


def _grouped(x: torch.Tensor, w: torch.Tensor, ends: Any) -> torch.Tensor:
    """torch._grouped_mm in float64, which torch lacks: rows of x (tokens, in) up to each end by one of w (experts, in, out)."""
    starts = [0, *ends.tolist()]
    return torch.cat([x[a:b] @ one for a, b, one in zip(starts, starts[1:], w, strict=False)])


@dataclass
class Residual:
    """The residual stream of a model."""

    capture: Capture
    width: int
    #: Channels of a block of the rotation.
    block: int
    #: Where weights are rotated and copies run.
    device: torch.device
    changes: dict[int, Change] = field(default_factory=dict)
    #: Roles of square weights, by their names in a block, once they are known.
    roles: dict[str, str] = field(default_factory=dict)
    worst: float = 0.0
    #: Whether values are rotated by head; the pairs of the block before, and how many there were of each width.
    by_head: bool = True
    heads: list[Head] | None = None
    widths: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True)
class Rotated:
    """What was done: channels of a block of the rotation, how far float64 copies were off, bytes that untying a head adds."""

    block: int
    worst: float
    untied: int
    #: Of values that are rotated by head: the channels of a rotation, and in how many blocks.
    heads: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        what = f"the residual stream is rotated by blocks of {self.block}" if self.block else "rotated"
        texts = [f"{what}, equal in float64 to {self.worst:.1g}"]
        texts += [f"values by heads of {size} in {count} blocks" for size, count in self.heads]
        texts += [f"an untied head adds {self.untied} bytes"] if self.untied else []
        return "; ".join(texts)


def rotate_residual(
    model: nn.Module, blocks: dict[str, nn.Module], batch: Any, size: int | None = None, device: Any = None,
    heads: bool = True, *, stream: bool = True,
) -> Rotated:  # fmt: skip
    """Rotate the residual stream of a model, in place. batch: one of calibration. size: channels of a block of R, None: all.
    heads: whether values are rotated by head too, where that leaves a block's function as it is. stream: whether the stream is
    rotated, and not values alone.

    Raises ValueError where the model's function would change, with what is in the way: nothing has changed then.
    """
    if list(blocks) == [""]:
        raise _refused("the whole model is one block, so its residual stream is unknown")
    small, order = _small(batch), _Order([])
    watched = [(name, m, order) for name, m in model.named_modules() if name and _own(m)]
    holder: list[Capture] = []
    observe(watched, lambda: holder.append(captured(model, [small], blocks)))
    capture = holder[0]
    _check_dense(model, blocks, order.names)
    x = next(iter(capture.held[0].values())).value
    width = int(x.shape[-1])
    block = width if size is None else size
    if width % block:
        raise _refused(f"its residual stream has {width} channels, which blocks of {block} do not divide")
    fast.rotate(torch.zeros(1, block), block)  # ValueError where no Hadamard matrix of this order is known
    where = torch.device(device) if device is not None else x.device
    residual = Residual(capture, width, block if stream else 0, where, by_head=heads)
    outside = _outside(model, blocks, order.names, residual) if stream else None
    for index, (name, module) in enumerate(blocks.items()):
        _prove_block(residual, index, name, module, order.names)
    if not stream and not residual.widths:
        raise _refused("no block has values and an output projection between which channels can be rotated")
    untied = 0 if outside is None else _untied(model, residual, outside)
    _finish(list(residual.changes.values()), residual)
    return Rotated(residual.block, residual.worst, untied, tuple(residual.widths.items()))


def _refused(why: str) -> ValueError:
    return ValueError(f"Rotate: {why}; {CHANGED_NOTHING}")


def _check_dense(model: nn.Module, blocks: Iterable[str], order: Iterable[str]) -> None:
    """ValueError for weights that are quantized, which would be rounded a second time."""
    names = {*blocks, *order}
    quantized = [
        name
        for name, parameter in model.named_parameters()
        if isinstance(parameter.data, QuantizedTensor) and is_inside(name.rpartition(".")[0], names)
    ]
    if quantized:
        raise _refused(f"{shorten(quantized)}: quantized already, and a rotation would round it again")


def _small(batch: Any) -> Any:
    """A few tokens of a batch."""
    return of_tensors(batch, lambda x: x[:SEQUENCES, :LENGTH] if x.dim() > 1 else x[:SEQUENCES])


def _own(module: nn.Module) -> bool:
    return any(p is not None for p in module._parameters.values())


@dataclass
class _Order:
    """An observer of the modules that run, in their order."""

    names: list[str]

    def observe(self, name: str, module: nn.Module, x: torch.Tensor) -> None:
        """Note a module."""
        if name not in self.names:
            self.names.append(name)


def _norm_gain(module: nn.Module, width: int) -> nn.Parameter | None:
    """The gain of a norm over all channels; None for other modules. ValueError for one with a bias."""
    own = {key: p for key, p in module._parameters.items() if p is not None}
    gain = own.get("weight")
    if gain is None or gain.dim() != 1 or len(gain) != width or isinstance(module, nn.Linear):
        return None
    if len(own) > 1:
        kind = type(module).__name__
        raise _refused(f"{kind} has {' and '.join(own)}: a norm with a bias does not commute with a rotation")
    return gain


def _multiplied(module: nn.Module, gain: nn.Parameter, device: torch.device) -> tuple[torch.Tensor, float]:
    """What a norm multiplies by in float64, 1 + g for some, and the value of a gain that changes nothing; ValueError for no RMS
    norm."""
    mine = _wide(module, device)
    x = torch.randn(4, len(gain), dtype=torch.float64, device=device)
    weight = mine.get_parameter("weight")
    values = weight.data.clone()
    with Wide():
        weight.data.zero_()
        offset = bool((mine(x) != 0).any())
        weight.data.fill_(0.0 if offset else 1.0)
        plain = mine(x)
        turned = mine(fast.rotate(x, len(gain)))
    if float((turned - fast.rotate(plain, len(gain))).abs().max()) > TOLERANCE * float(plain.abs().max()):
        raise _refused(
            f"{type(module).__name__} is no RMS norm: its output for rotated channels is not the rotated output"
        )
    return (values + 1.0 if offset else values), 0.0 if offset else 1.0


def _wide(module: nn.Module, device: torch.device) -> Any:
    """A copy in float64 without hooks."""
    held = {id(p): p for p in module.parameters()}
    memo = {
        key: nn.Parameter(p.detach().to(device, torch.float64, copy=True), requires_grad=False)
        for key, p in held.items()
    }
    mine = copy.deepcopy(module, dict(memo)).to(device)
    for one in mine.modules():
        one._forward_pre_hooks.clear()
        one._forward_hooks.clear()
        one._forward_pre_hooks_with_kwargs.clear()
    return mine.double().eval()


@dataclass
class _Slot:
    """A matrix, or batch of them, of a module: its axes of inputs and outputs, None where they have other widths."""

    name: str
    module: nn.Module
    key: str
    reads: int | None
    writes: int | None

    @property
    def parameter(self) -> nn.Parameter:
        return self.module._parameters[self.key]  # type: ignore[return-value]


def _slots(block: nn.Module, width: int) -> list[_Slot]:
    """Matrices of a block that read or write so many channels, as far as shapes say."""
    slots = []
    for path, module in block.named_modules():
        for key, p in module._parameters.items():
            if p is None or p.dim() < 2:
                continue
            inner = contraction_axis(module, p)
            if inner is None:
                raise _refused(
                    f"{path}.{key} of shape {tuple(p.shape)} does not say which axis it multiplies by"
                )
            inner = -2 if is_transposed(module) else inner
            outer = -1 if inner == -2 else -2
            sizes = [axis if p.shape[axis] == width else None for axis in (inner, outer)]
            if any(axis is not None for axis in sizes):
                slots.append(_Slot(f"{path}.{key}", module, key, *sizes))
    return slots


def _prove_block(residual: Residual, index: int, name: str, module: nn.Module, order: list[str]) -> None:
    """Find what becomes of a block's parameters; ValueError where no roles of its weights leave its function as it is."""
    width, device = residual.width, residual.device
    # Without a rotation of the stream nothing of a block changes but what heads change.
    slots = _slots(module, width) if residual.block else []
    gains = _gains(module, name, slots, order, residual) if residual.block else {}
    square = [slot for slot in slots if slot.reads is not None and slot.writes is not None]
    wide = _wide(module, device)
    x, call = _call(residual.capture, index, device)
    with Wide():
        wanted, *others = _run(wide, call, x, name)
    turned, best = _rotated(wanted, residual), float("inf")

    def off(changes: Sequence[Change]) -> float:
        """How far the block is from the same function with these changes, as a share of what is largest."""
        with Wide():
            output, *left = _run(_turned(module, wide, changes, residual), call, _rotated(x, residual), name)
        beside = (
            min(_error(new, one) for one in (old, _as_stream(old, residual)))
            for new, old in zip(left, others, strict=True)
        )
        return max([_error(output, turned), *beside])

    for roles in _choices(square, residual.roles):
        changes = _changes(slots, gains, roles)
        error = off(changes)
        best = min(best, error)
        if error <= TOLERANCE:
            residual.roles = roles
            if residual.by_head:
                changes, error = _rotate_heads(residual, module, name, order, changes, off)
            residual.worst = max(residual.worst, error)
            residual.changes.update({id(change.parameter): change for change in changes})
            return
    raise _refused(
        f"{name} is not the same function in rotated channels, by {best:.1g} of its output: it holds something between its "
        f"norms and layers that is of single channels (a norm or a factor after a branch, for instance)"
    )


def _rotate_heads(
    residual: Residual, module: nn.Module, name: str, order: Iterable[str], changes: Sequence[Change],
    off: Callable[[Sequence[Change]], float],
) -> tuple[list[Change], float]:  # fmt: skip
    """A block's changes with values rotated by head, where all of them together leave the function as it is; and how far off it
    is with them."""
    inside = [path[len(name) + 1 :] for path in order if is_inside(path, [name]) and path != name]
    heads = find_heads(module, inside, changes, lambda new: off(new) <= TOLERANCE, residual.heads)
    changed = with_heads(dict(module.named_modules()), changes, heads)
    error = off(changed)
    if error > TOLERANCE:
        return list(changes), off(changes)
    # Blocks without attention, or of another kind, leave what is known to those that follow.
    residual.heads = heads or residual.heads
    residual.widths.update(head.size for head in heads)
    return changed, error


def _gains(
    block: nn.Module, name: str, slots: Sequence[_Slot], order: list[str], residual: Residual
) -> dict[str, tuple[nn.Parameter, torch.Tensor, float]]:
    """By names of weights the norm that runs before them: its gain, what it multiplies by, the value of none."""
    readers = {
        full_name(name, slot.name.rpartition(".")[0]): slot.name for slot in slots if slot.reads is not None
    }
    modules = dict(block.named_modules(prefix=name))
    norms, last = {}, None
    for path in (one for one in order if is_inside(one, [name])):
        gain = _norm_gain(modules[path], residual.width)
        if gain is not None:
            last = (gain, *_multiplied(modules[path], gain, residual.device))
        # A module with several weights (experts) has one name in the order.
        for full, slot in readers.items():
            if last is not None and full == path:
                norms.update(
                    {
                        one.name: last
                        for one in slots
                        if one.name.rpartition(".")[0] == slot.rpartition(".")[0]
                    }
                )
    return norms


def _choices(square: Sequence[_Slot], known: dict[str, str]) -> Iterator[dict[str, str]]:
    """Roles of square weights, the likely ones first: those of the block before, else the last one of all writes."""
    names = [slot.name for slot in square]
    if known and set(known) == set(names):
        yield known
    guesses = [
        dict(zip(names, roles, strict=True)) for roles in product((READS, WRITES, BOTH), repeat=len(names))
    ]
    last = names[-1:]
    guesses.sort(
        key=lambda roles: sum(role != (WRITES if name in last else READS) for name, role in roles.items())
    )
    yield from guesses[:100]


def _changes(
    slots: Sequence[_Slot],
    gains: Mapping[str, tuple[nn.Parameter, torch.Tensor, float]],
    roles: Mapping[str, str],
) -> list[Change]:
    """What becomes of a block's parameters under these roles."""
    changes: list[Change] = []
    for slot in slots:
        role = roles.get(slot.name, READS if slot.reads is not None else WRITES)
        change = Change(slot.parameter)
        if role != WRITES:
            change.reads = slot.reads
            change.gain = gains[slot.name][1] if slot.name in gains else None
        if role != READS:
            change.writes = slot.writes
            bias = slot.module._parameters.get(f"{slot.key}_bias", slot.module._parameters.get("bias"))
            if bias is not None:
                changes.append(Change(bias, writes=-1))
        changes.append(change)
    folded = {id(gain): Change(gain, neutral=neutral) for gain, _, neutral in gains.values()}
    return [*changes, *folded.values()]


def _turned(module: nn.Module, wide: nn.Module, changes: Sequence[Change], residual: Residual) -> nn.Module:
    """A copy of a block in float64 with these changes."""
    mine = copy.deepcopy(wide)
    same = dict(zip(map(id, module.parameters()), mine.parameters(), strict=True))
    for change in changes:
        there = same[id(change.parameter)]
        there.data = replace(change, parameter=there).values(residual.block, residual.device)
    return mine


def _call(capture: Capture, index: int, device: torch.device) -> tuple[torch.Tensor, Any]:
    """Inputs at random for a block, and the arguments of its call, in float64."""
    held = next(iter(capture.held[0].values())).value
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(held.shape, dtype=torch.float64, generator=generator).to(device)

    def wide(value: Any) -> Any:
        if isinstance(value, MutableMapping):
            mine = copy.copy(value)
            mine.update({key: of_tensors(one, wide) for key, one in value.items()})
            return mine
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(device, torch.float64) if value.is_floating_point() else value.to(device)

    return x, changed(capture.calls[0][index], wide)


def _run(block: nn.Module, call: Any, x: torch.Tensor, name: str) -> list[torch.Tensor]:
    """What a block returns, its output first, and what it leaves in mappings: blocks behind it may read all of that, as those
    do that share keys and values."""
    shared: list[MutableMapping[Any, Any]] = []

    def mine(value: Any) -> Any:
        if isinstance(value, MutableMapping):
            shared.append(copy.copy(value))
            return shared[-1]
        return x.clone() if isinstance(value, Handed) else value

    args, kwargs = changed(call, mine)
    output = block(*args, **kwargs)
    first_tensor(output, name)
    return tensors([output, *(list(one.values()) for one in shared)])


def _error(x: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference as a share of the largest number; infinity for NaN."""
    if torch.equal(x, wanted):  # infinities of masks too
        return 0.0
    error = float((x.double() - wanted).abs().max()) / (float(wanted.abs().max()) or 1.0)
    return error if error == error else float("inf")


def _as_stream(x: torch.Tensor, residual: Residual) -> torch.Tensor:
    """Rotated where it may be of the residual stream."""
    wide = x.is_floating_point() and x.dim() > 0 and x.shape[-1] == residual.width
    return _rotated(x, residual) if wide else x


def _rotated(x: torch.Tensor, residual: Residual) -> torch.Tensor:
    return fast.rotate(x, residual.block) if residual.block else x


def _outside(
    model: nn.Module, blocks: Iterable[str], order: list[str], residual: Residual
) -> tuple[list[str], str, str]:
    """Names of embeddings, of the last norm and of the head; ValueError where something else is there."""
    modules, names = dict(model.named_modules()), list(blocks)
    first = next(i for i, name in enumerate(order) if is_inside(name, names))
    last = max(i for i, name in enumerate(order) if is_inside(name, names))
    before, after = order[:first], order[last + 1 :]
    for name in before:
        module = modules[name]
        if not isinstance(module, nn.Embedding) or module.embedding_dim != residual.width:
            raise _refused(f"{name} ({type(module).__name__}) is between the embeddings and the blocks")
    if not before:
        raise _refused("the first block's input does not come from an embedding")
    kinds = [type(modules[name]).__name__ for name in after]
    if len(after) != 2 or _norm_gain(modules[after[0]], residual.width) is None:
        raise _refused(
            f"after its blocks there are {', '.join(kinds) or 'no modules'}, not a norm and a head"
        )
    head = modules[after[1]].get_parameter("weight")
    if head.dim() != 2 or head.shape[-1] != residual.width or is_transposed(modules[after[1]]):
        raise _refused(f"{after[1]} does not read the residual stream")
    return before, after[0], after[1]


def _untied(model: nn.Module, residual: Residual, outside: tuple[list[str], str, str]) -> int:
    """Note what becomes of embeddings, norm and head; the bytes of a head that is parted from its table."""
    modules = dict(model.named_modules())
    tables, norm, head = outside
    gain = _norm_gain(modules[norm], residual.width)
    assert gain is not None
    by, neutral = _multiplied(modules[norm], gain, residual.device)
    added, weight = 0, modules[head].get_parameter("weight")
    if any(modules[name].get_parameter("weight") is weight for name in tables):
        weight = nn.Parameter(weight.data, requires_grad=weight.requires_grad)
        modules[head]._parameters["weight"] = weight
        added = weight.numel() * weight.dtype.itemsize
    changes = [Change(gain, neutral=neutral), Change(weight, reads=-1, gain=by)]
    changes += [Change(modules[name].get_parameter("weight"), writes=-1) for name in tables]
    residual.changes.update({id(change.parameter): change for change in changes})
    return added


def _finish(changes: Sequence[Change], residual: Residual) -> None:
    """All changes; after an interruption the rest of them first, so that the model is one function or the other."""
    waiting = list(changes)
    try:
        while waiting:
            waiting[0].finish(residual.block, residual.device)
            waiting.pop(0)
    except BaseException as error:
        for change in waiting:
            change.finish(residual.block, torch.device("cpu"))
        error.add_note(
            "the residual stream of the model is rotated as a whole: the same function with other weights"
        )
        raise
