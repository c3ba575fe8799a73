"""Pairs of layers between which channels can be scaled without changing the model, found by trying it out.

The output channels of one module (a norm's gain, rows of a linear layer) times s and the input channels of all layers that read
them divided by s compute the same function, where nothing but these layers, and products that are linear in the channel, comes
in between. Which modules of a block are such a pair is no matter of names here: output channels are multiplied by random powers
of two, input channels divided by them, and the block runs. Powers of two are exact, so of a pair the output is bit-equal, and
of anything else it is not. A second run with the producer alone has to change it: a path that no data takes proves nothing.

What is tried, for the layers that read one tensor of K channels, is every module before them, the last one first:

* a gain: a parameter `weight` (K,) of a module that is no linear layer, with its bias if it has one; or one that multiplies by
  1 + g (Gemma's): tried with gains for which 1 + g is a power of two, since s (1 + g) - 1 rounds;
* rows of a linear layer with its bias: all K; or fewer, n = K / r, whose heads are repeated r times (grouped queries: a factor
  for each channel of values, shared by its query heads); or the last ones of a joined projection (queries, keys and values;
  gate and up).

A gain that is scaled for good is rounded to its dtype once, and factors are what that rounding makes them, so that the function
stays what it was to the precision of the weights that are divided.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.transforms.data import Seen, leaves, observe, tensors
from ao_lab.transforms.layers import TABLES, is_linear, is_transposed
from ao_lab.transforms.walk import Block

#: What a producer scales by: its gain, 1 + its gain, its rows.
GAIN, OFFSET_GAIN, ROWS = "gain", "offset gain", "rows"
#: Exponents of the powers of two of a probe; zeros among them, so that a shifted map of channels is another one.
EXPONENTS = (-2, -1, 0, 1, 2)


@dataclass(frozen=True)
class Pair:
    """A producer and the layers that read its channels, by their names in the block."""

    producer: str
    kind: str
    consumers: tuple[str, ...]
    #: The first row, and how many, of the producer's channels that are read.
    first: int
    count: int
    #: Channels of a head and how often each head is repeated among the consumers' inputs.
    head: int
    repeats: int

    def per_input(self, factors: torch.Tensor) -> torch.Tensor:
        """Factors (count,) of the producer's channels, for each input of the consumers (count * repeats,)."""
        heads = factors.reshape(-1, self.head)
        return heads.repeat_interleave(self.repeats, 0).reshape(-1)

    def per_channel(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the consumers' inputs (count * repeats,), the largest of those that share a channel (count,)."""
        heads = values.reshape(-1, self.repeats, self.head)
        return heads.amax(1).reshape(-1)


def find_pairs(block: Block, known: Sequence[Pair] = ()) -> list[Pair]:
    """The pairs of a block. known: those of a block before it, which are tried all at once.

    Runs the first batch through the block a few times; weights are changed meanwhile and put back, bit for bit.
    """
    modules = dict(block.module.named_modules())
    order, groups = _executed(block, modules)
    probe = Probe(block, modules)
    if known and _fits(known, modules, groups) and probe.holds(known):
        return list(known)
    pairs: list[Pair] = []
    for consumers in groups:
        candidates = _candidates(modules, order, consumers)
        pair = next((one for one in candidates if probe.holds([one])), None)
        if pair is not None:
            pairs.append(pair)
    return pairs


def _fits(known: Sequence[Pair], modules: dict[str, nn.Module], groups: list[tuple[str, ...]]) -> bool:
    """Whether pairs of another block can be those of this one: the same readers, and producers of the same sizes."""
    return {pair.consumers for pair in known} <= set(groups) and all(
        pair.producer in modules and _size(modules[pair.producer]) >= pair.first + pair.count
        for pair in known
    )


@dataclass
class _Order:
    """An observer of modules that run and of what linear layers read."""

    order: list[str]
    groups: list[list[str]]
    last: Seen | None = None

    def observe(self, name: str, module: nn.Module, x: torch.Tensor) -> None:
        """Note a module, and with which others a linear layer shares its input."""
        self.order.append(name)
        if not is_linear(module) or not x.numel():
            return
        if self.last is not None and self.last.is_still(x):
            self.groups[-1].append(name)
        else:
            self.groups.append([name])
            self.last = Seen(x)


def _executed(block: Block, modules: dict[str, nn.Module]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Modules with weights in the order in which they first run, and linear layers by the tensor that they read."""
    seen = _Order([], [])
    watched = [(name, module, seen) for name, module in modules.items() if name and _size(module)]
    observe(watched, lambda: _run_once(block))
    groups = [tuple(dict.fromkeys(group)) for group in seen.groups]
    names = [name for group in groups for name in group]
    # A layer that runs twice has two readers' worth of inputs; it is in no pair.
    once = [group for group in groups if all(names.count(name) == 1 for name in group)]
    return list(dict.fromkeys(seen.order)), [g for g in once if all(_is_plain(modules[name]) for name in g)]


def _is_plain(module: nn.Module) -> bool:
    """Whether a module's weight is a dense parameter that can be scaled."""
    weight = module._parameters.get("weight")
    return weight is not None and not isinstance(weight, QuantizedTensor) and weight.is_floating_point()


def _size(module: nn.Module) -> int:
    """How many output channels a module has whose outputs could be scaled; 0 for others."""
    weight = module._parameters.get("weight")
    if weight is None or isinstance(module, TABLES) or not _is_plain(module):
        return 0
    if is_linear(module):
        return int(weight.shape[-1 if is_transposed(module) else 0])
    return len(weight) if weight.dim() == 1 else 0


def _inputs(module: nn.Module) -> int:
    """How many channels a linear layer reads."""
    weight = module.get_parameter("weight")
    return int(weight.shape[0 if is_transposed(module) else -1])


def _candidates(
    modules: dict[str, nn.Module], order: list[str], consumers: tuple[str, ...]
) -> Iterator[Pair]:
    """What could produce the input of these layers: modules that ran before the first of them, the last one first."""
    width = _inputs(modules[consumers[0]])
    before = order[: min(order.index(name) for name in consumers)]
    for name in reversed(before):
        size = _size(modules[name])
        if not is_linear(modules[name]):
            if size == width:
                yield Pair(name, GAIN, consumers, 0, width, width, 1)
                yield Pair(name, OFFSET_GAIN, consumers, 0, width, width, 1)
            continue
        for first, count in _row_ranges(size, width):
            for head in _heads(modules, name, count, width):
                yield Pair(name, ROWS, consumers, first, count, head, width // count)


def _row_ranges(size: int, width: int) -> list[tuple[int, int]]:
    """Rows of a linear layer of this size that inputs of this width may be: all, or the last of a joined projection."""
    if size == width or (size < width and width % size == 0):
        return [(0, size)]
    counts = [width, (size - width) // 2] if size > width else []
    return [(size - count, count) for count in counts if 0 < count <= width and width % count == 0]


def _heads(modules: dict[str, nn.Module], name: str, count: int, width: int) -> list[int]:
    """Sizes of heads that may be repeated: what the module around says first, then every divisor."""
    if count == width:
        return [count]
    said = getattr(modules.get(name.rpartition(".")[0]), "head_dim", None)
    divisors = [head for head in range(count, 0, -1) if count % head == 0]
    return [said, *divisors] if isinstance(said, int) and said > 0 and count % said == 0 else divisors


def _run_once(block: Block) -> list[torch.Tensor]:
    """What the block returns of the first batch, and what it leaves in mappings that blocks share."""
    for batch, output in block.outputs():
        args, kwargs = block.capture.calls[batch][block.index]
        shared = [one for one in leaves([args, list(kwargs.values())]) if isinstance(one, Mapping)]
        return [x.detach().clone() for x in tensors([output, *(list(one.values()) for one in shared)])]
    return []


@dataclass
class Probe:
    """Tries pairs out on the first batch of a block."""

    block: Block
    modules: dict[str, nn.Module]

    def holds(self, pairs: Sequence[Pair]) -> bool:
        """Whether powers of two between all these pairs leave the output bit-equal, and the producers' alone do not."""
        generator = torch.Generator().manual_seed(0)
        exponents = [
            torch.tensor(EXPONENTS)[torch.randint(len(EXPONENTS), (pair.count,), generator=generator)]
            for pair in pairs
        ]
        parameters = [p for pair in pairs for p in self._parameters(pair)]
        with _restored(parameters):
            for pair in pairs:
                if pair.kind == OFFSET_GAIN:
                    _set_powers(self.modules[pair.producer])
            plain = _run_once(self.block)
            for pair, powers in zip(pairs, exponents, strict=True):
                self._scale(pair, powers, consumers=False)
            alone = _run_once(self.block)
            for pair, powers in zip(pairs, exponents, strict=True):
                self._scale(pair, powers, producer=False)
            both = _run_once(self.block)
        return _equal(plain, both) and not _equal(plain, alone)

    def _parameters(self, pair: Pair) -> list[nn.Parameter]:
        """What a probe changes."""
        modules = [self.modules[pair.producer], *(self.modules[name] for name in pair.consumers)]
        return [p for module in modules for p in module._parameters.values() if p is not None]

    def _scale(self, pair: Pair, powers: torch.Tensor, producer: bool = True, consumers: bool = True) -> None:
        factors = torch.exp2(powers.to(torch.float64))
        if producer:
            scale_producer(self.modules[pair.producer], pair, factors)
        for name in pair.consumers if consumers else ():
            scale_inputs(self.modules[name], 1 / pair.per_input(factors))


def _equal(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return len(one) == len(two) and all(map(torch.equal, one, two))


@contextmanager
def _restored(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Parameters as they were, afterwards."""
    values = [
        (parameter, parameter.detach().clone()) for parameter in {id(p): p for p in parameters}.values()
    ]
    try:
        yield
    finally:
        for parameter, value in values:
            parameter.data.copy_(value)


def _set_powers(module: nn.Module) -> None:
    """Gains for which 1 + g is 1 or 2, in turn."""
    gain = module.get_parameter("weight")
    gain.data.copy_(torch.arange(len(gain), device=gain.device) % 2)


def scale_inputs(module: nn.Module, factors: torch.Tensor) -> None:
    """Multiply the columns of a linear layer, rounded to its dtype once."""
    weight = module.get_parameter("weight")
    factors = factors.to(weight.device, torch.float64)
    wide = weight.data.to(torch.float64)
    weight.data.copy_(wide * (factors[:, None] if is_transposed(module) else factors))


def scale_producer(module: nn.Module, pair: Pair, factors: torch.Tensor) -> torch.Tensor:
    """Multiply the channels of a producer; what they were multiplied by after rounding to its dtype, (count,) float64.

    Rows of a linear layer are rounded element by element, so their factors stay what they are.
    """
    weight = module.get_parameter("weight")
    factors = factors.to(weight.device, torch.float64)
    place = slice(pair.first, pair.first + pair.count)
    if pair.kind == ROWS:
        rows = weight.data.T[place] if is_transposed(module) else weight.data[place]
        rows.copy_(rows.to(torch.float64) * factors[:, None])
    else:
        offset = 1.0 if pair.kind == OFFSET_GAIN else 0.0
        factors = _scaled_gain(weight, offset, factors)
    bias = module._parameters.get("bias")
    if bias is not None:
        bias.data[place] = (bias.data[place].to(torch.float64) * factors).to(bias.dtype)
    return factors


def _scaled_gain(weight: nn.Parameter, offset: float, factors: torch.Tensor) -> torch.Tensor:
    """Scale a gain in place; the factors that rounding left, 1 where it would have become 0 or has been."""
    old = weight.data.to(torch.float64) + offset
    new = (old * factors - offset).to(weight.dtype)
    rounded = new.to(torch.float64) + offset
    good = (old != 0) & (rounded != 0) & rounded.isfinite()
    weight.data.copy_(torch.where(good, new, weight.data))
    return torch.where(good, rounded / torch.where(good, old, 1), 1.0)
