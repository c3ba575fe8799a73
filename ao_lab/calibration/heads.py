"""Rotations of values by head, merged into the layers that write them and the layer that reads them (SpinQuant's R2).

What a head of attention puts out is a sum of values, weighted by numbers that are the same for all its channels: values times
R come out as outputs times R. So the rows of a value projection are rotated head by head, and the columns of the output
projection with them: R of a head's width, the Hadamard rotation of m 2^k channels (`reference.calibration.rotation`), the same
for all heads, so that repeated heads (grouped queries) need no map.

Which layers these are is found by trying, as in all of `ao_lab.calibration.offline`: a producer and a consumer between which
pairs of channels can be rotated in float64 (no gate, no activation, no norm), then the widest rotation that holds. A joined
projection has its values last. Values that a block leaves to blocks behind it (shared keys and values) stay as they are.

Sources: Ashkboos et al., QuaRot (arXiv 2404.00456), section 4; Liu et al., SpinQuant (arXiv 2405.16406), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from ao_lab.calibration.rotations import Change
from ao_lab.transforms.layers import is_linear, is_transposed
from reference.calibration.hadamard_matrices import split_length

#: The widest rotation that is tried where no module says how wide a head is.
WIDEST = 256
#: What rotates the channels in pairs, to see whether they can be mixed at all.
LEAST = 2


@dataclass(frozen=True)
class Head:
    """A producer of values and the layer that reads them, by their names in a block; the channels, and those of a rotation."""

    producer: str
    consumer: str
    first: int
    count: int
    size: int


#: Whether a block is the same function when its parameters change so.
Proof = Callable[[Sequence[Change]], bool]


def find_heads(
    block: nn.Module, order: Sequence[str], changes: Sequence[Change], proves: Proof, known: Sequence[Head] | None
) -> list[Head]:  # fmt: skip
    """The pairs of a block. order: its modules as they run, by their names in it. changes: what becomes of its parameters
    already, which says what reads and writes the residual stream; empty: nothing. proves: whether a block is the same function
    with changes. known: pairs of the block before, which alone are tried again; None: there is none.
    """
    modules = dict(block.named_modules())
    if known is not None:
        return [one for one in known if _fits(one, modules) and proves(with_heads(modules, changes, [one]))]
    roles = {id(change.parameter): change for change in changes}
    layers = [
        name
        for name in order
        if is_linear(modules[name]) and (not roles or id(modules[name].weight) in roles)
    ]
    heads: list[Head] = []
    for place, consumer in enumerate(layers):
        role = roles.get(id(modules[consumer].weight))
        if role is None or (role.reads is None and role.writes is not None):
            producers = [
                name for name in layers[:place] if not roles or roles[id(modules[name].weight)].writes is None
            ]
            tried = (one for name in reversed(producers) for one in _candidates(modules, name, consumer))
            pairs = (one for one in tried if proves(with_heads(modules, changes, [replace(one, size=LEAST)])))
            wide = (wider for one in pairs for wider in _sizes(modules, one))
            head = next((one for one in wide if proves(with_heads(modules, changes, [one]))), None)
            heads += [] if head is None else [head]
    return heads


def _axis_sizes(module: nn.Module) -> tuple[int, int]:
    """Inputs and outputs of a linear layer."""
    out, inner = module.get_parameter("weight").shape
    return (out, inner) if is_transposed(module) else (inner, out)


def _fits(head: Head, modules: dict[str, nn.Module]) -> bool:
    if head.producer not in modules or head.consumer not in modules:
        return False
    inputs, outputs = _axis_sizes(modules[head.consumer])[0], _axis_sizes(modules[head.producer])[1]
    return inputs % head.count == 0 and outputs >= head.first + head.count


def _candidates(modules: dict[str, nn.Module], producer: str, consumer: str) -> Iterator[Head]:
    """Rows of a producer that may be what a consumer reads: all, or the last ones of a joined projection."""
    outputs, inputs = _axis_sizes(modules[producer])[1], _axis_sizes(modules[consumer])[0]
    if inputs % outputs == 0:
        yield Head(producer, consumer, 0, outputs, LEAST)
    for count in (inputs, (outputs - inputs) // 2) if outputs > inputs else ():
        if 0 < count <= inputs and inputs % count == 0 and count % LEAST == 0:
            yield Head(producer, consumer, outputs - count, count, LEAST)


def _sizes(modules: dict[str, nn.Module], head: Head) -> Iterator[Head]:
    """The same with rotations of a head's width as the module around says it, else of every width, the widest first."""
    said = getattr(modules.get(head.producer.rpartition(".")[0]), "head_dim", None)
    widths = [said] if isinstance(said, int) and said > 0 else range(min(head.count, WIDEST), 1, -1)
    for size in (*widths, LEAST):
        if head.count % size == 0 and is_order(size):
            yield replace(head, size=size)


def is_order(size: int) -> bool:
    """Whether a Hadamard matrix of so many channels is known."""
    try:
        split_length(size)
    except ValueError:
        return False
    return size >= LEAST


def with_heads(
    modules: dict[str, nn.Module], changes: Sequence[Change], heads: Sequence[Head]
) -> list[Change]:
    """Changes of a block with those of heads among them."""
    result = {id(change.parameter): change for change in changes}
    for head in heads:
        producer, consumer = modules[head.producer], modules[head.consumer]
        rows = slice(head.first, head.first + head.count)
        for name, axis in (("weight", -1 if is_transposed(producer) else -2), ("bias", -1)):
            parameter = producer._parameters.get(name)
            if parameter is not None:
                before = result.get(id(parameter), Change(parameter))
                result[id(parameter)] = replace(before, writes=axis, writes_size=head.size, part=rows)
        weight = consumer.get_parameter("weight")
        axis = -2 if is_transposed(consumer) else -1
        before = result.get(id(weight), Change(weight))
        result[id(weight)] = replace(before, reads=axis, reads_size=head.size)
    return list(result.values())
