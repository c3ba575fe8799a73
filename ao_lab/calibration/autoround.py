"""AutoRound in a model: codes, and ranges, of all weights of a block learned together, by the block's output.

Each weight starts at the best of what the methods before have made (V is its distance from there) and keeps its scales; one
that was only rounded learns its ranges too. A step runs some batches through the block with the values that the scheme stores
(`fast.signround_quantize`), compares what comes out with what the block of the model as it was makes of that model's inputs,
and moves V and the ranges by the signs of the gradients; inputs that a layer quantizes pass gradients straight through. Steps
go through the batches in an order that a seed draws; held-out tokens and padding are no part of the loss.

Of the start, the end and the step of the least loss that one is taken whose block has the least error on held-out tokens, so a
block is never worse there than it was without.

The order of all sums is fixed: the same call has the same bits on one kind of device with the same versions, be the blocks
resident or from files, and whoever else uses the device. (A gradient next to 0 has another sign in another order, and all later
steps differ.) For that torch's attention is learned through by kernels whose backward adds in one order (`one_order`); other
operations of a model that torch calls nondeterministic stay what they are, as does attention that is not torch's.

Sources: Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent" (arXiv 2309.05516), algorithm 1; which attention
is deterministic: PyTorch's notes on reproducibility (docs.pytorch.org/docs/stable/notes/randomness.html).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Any

import torch
from torch import nn

import fast
from ao_lab.calibration.groups import Target, dense_of, rows_stand_alone, with_packed_codes
from ao_lab.calibration.judge import output_error, quantized_inputs, token_errors
from ao_lab.calibration.layers import Calibrated, Part
from ao_lab.calibration.methods import AutoRound
from ao_lab.calibration.tokens import HELD_OUT, TRAIN, SplitMoments, Tokens
from ao_lab.tensor.quantized_tensor import from_quantized
from ao_lab.transforms.walk import Block
from fast.calibration.signround import signround_keep, signround_span, signround_unchecked
from fast.layers.hadamard import hadamard
from reference import Quantized, Scales
from reference.calibration.signround import Span

#: Elements of a matrix of several weights at most: temporaries of a step are several times its size.
SMALL = 1 << 24


@dataclass
class Learned:
    """One weight while it is learned."""

    target: Target
    before: Calibrated
    part: Part
    inputs: SplitMoments
    leaf: nn.Parameter | None = None

    @cached_property
    def dense(self) -> torch.Tensor:
        """As it is learned: (out, in), its inputs rotated where those of the layer are."""
        dense, length = dense_of(self.target), self.rotation
        return fast.rotate(dense, length, dtype=torch.float32) if length else dense

    def begin(self) -> Any:
        """The state that starts at what methods before have made: other weights of the block may be quantized before."""
        start = None if self.scales is None else self.before.weight.plain.quantized
        return fast.signround_start(self.dense, self.scheme, start)

    @cached_property
    def scales(self) -> Scales | None:
        """Its codes' scales where they stay: methods have searched them, or share an outer one."""
        stays = not self.before.rounded or self.part.outer is not None
        return self.before.weight.plain.quantized.scales if stays else None

    @property
    def scheme(self) -> Any:
        """The weight's scheme."""
        return self.target.recipe.weight

    @property
    def rotation(self) -> int:
        """Inputs of a block that is rotated, or 0."""
        return self.before.weight.recipe.rotation

    @property
    def module(self) -> nn.Module:
        """The first of its layers."""
        return next(iter(self.target.layers.values()))

    def put_start(self) -> None:
        """The values of the weight that it started at: V reaches no code that lies farther than the next."""
        self.place(fast.dequantize(self.before.weight.plain.quantized))

    def place(self, values: torch.Tensor) -> None:
        """Values (out, in) in the layers, to take gradients."""
        values = values.to(self.before.weight.dtype)
        self.leaf = nn.Parameter(values.T.contiguous() if self.target.transposed else values)
        for module in self.target.layers.values():
            module._parameters["weight"] = self.leaf

    def gradient(self) -> torch.Tensor:
        """That of its values, (out, in) in the dtype of `dense`; 0 where nothing gave any."""
        assert self.leaf is not None
        g = torch.zeros_like(self.leaf) if self.leaf.grad is None else self.leaf.grad
        return (g.T if self.target.transposed else g).contiguous().to(self.dense.dtype)

    def codes(self, state: Any) -> Quantized:
        """What a state stores."""
        v, low, high = state
        return fast.signround_codes(self.dense, v, low, high, self.scheme, scales=self.scales)

    def remade(self, state: Any, note: str) -> Calibrated:
        """The weight of a state, in place of the one that it started at."""
        dtype, recipe = self.before.weight.dtype, self.before.weight.recipe
        q, result = self.codes(state), self.before.result
        self.inputs.judge_on(self.dense.device)
        inputs = self.inputs.rotated(self.rotation) if self.rotation else self.inputs
        error = output_error(self.dense, q, inputs, recipe.activation, self.part.input_scales, self.part.rows)
        method = f"{result.method} + autoround" if result.method != "rounding" else "autoround"
        weight = from_quantized(with_packed_codes(q), recipe, dtype, self.part.input_scales)
        return Calibrated(weight, replace(result, method=method, error=error, notes=(*result.notes, note)))


@dataclass
class Joined:
    """Weights whose rows are those of one matrix in each step, with the bits that each has alone (`rows_stand_alone`).

    A step is some two hundred small operations a matrix where ranges are learned, which a GPU waits for if weights are small.
    """

    weights: list[Learned]
    state: Any = None
    stepped: Any = None

    @cached_property
    def dense(self) -> torch.Tensor:
        """All rows."""
        return _rows([one.dense for one in self.weights])

    @cached_property
    def span(self) -> Span | None:
        """The blocks' ends where scales are learned, the same for all steps."""
        first = self.weights[0]
        return signround_span(self.dense, first.scheme) if first.scales is None else None

    def begin(self) -> None:
        """Start at what methods before have made."""
        states = [one.begin() for one in self.weights]
        self.state = type(states[0])(
            *(None if parts[0] is None else _rows(parts) for parts in zip(*states, strict=True))
        )

    def put(self) -> None:
        """The values of the state in the layers, to take gradients."""
        first, (v, low, high) = self.weights[0], self.state
        values, self.stepped = signround_unchecked(
            self.dense, v, low, high, first.scheme, scales=first.scales, span=self.span
        )
        for one, part in zip(self.weights, self._split(values), strict=True):
            # Memory of its own: how a product sums may depend on where a matrix begins.
            one.place(part if len(self.weights) == 1 else part.clone())

    def step(self, rate: float) -> None:
        """Move the state against its gradients, made of those of the values."""
        self.state, self.stepped = self.stepped(_rows([one.gradient() for one in self.weights]), rate), None

    def states(self, state: Any) -> list[Any]:
        """Each weight's part of a state."""
        nothing = [None] * len(self.weights)
        parts = [nothing if part is None else self._split(part) for part in state]
        return [type(state)(*one) for one in zip(*parts, strict=True)]

    def _split(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Each weight's rows of values or of blocks."""
        whole = max(len(self.dense), 1)
        return list(torch.split(part, [len(one.dense) * len(part) // whole for one in self.weights]))


def _rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def joined(weights: Sequence[Learned]) -> list[Joined]:
    """The weights of a block, those in one matrix that learn ranges, have one scheme and are small, in their order."""
    result: list[Joined] = []
    known: dict[Any, Joined] = {}
    for one in weights:
        dense = one.dense
        key = one.scheme, dense.shape[1], dense.dtype, dense.device
        alone = one.scales is not None or not rows_stand_alone(one.scheme, len(dense))
        into = None if alone else known.get(key)
        if into is not None and sum(w.dense.numel() for w in into.weights) + dense.numel() <= SMALL:
            into.weights.append(one)
            continue
        result.append(Joined([one]))
        if not alone:
            known[key] = result[-1]
    return result


@dataclass
class Learning:
    """One block while its weights are learned."""

    block: Block
    tokens: Tokens
    method: AutoRound
    weights: list[Learned]
    #: The same, those that are evaluated as one matrix together.
    joined: list[Joined] = field(default_factory=list)
    #: The states of the least loss, and that, on the block's device; None before the first step.
    best: list[Any] | None = None
    least: torch.Tensor | None = None
    #: By batch and kind: which tokens are of that kind, on the device of the block's output.
    kinds: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    #: Whether a block's output had other tokens than its batch, so that all of them count.
    unmatched: bool = False

    def run(self) -> list[Calibrated]:
        """Learn; the weights, as they were where nothing is won."""
        self.joined = joined(self.weights)
        for one in self.joined:
            one.begin()
        with self._in_place():
            for weight in self.weights:
                weight.put_start()
            before = self.error()
            self._learn()
            last = [one.state for one in self.joined]
            states = [last if self.best is None else self.best, last]
            errors = [self._error_of(one) for one in states]
        best = min(range(len(states)), key=lambda i: errors[i])
        share = errors[best] / before if before else 1.0
        note = f"the block's error on held-out tokens is {share:.3f} of that without autoround"
        if self.unmatched:
            note += "; padding and held-out tokens are part of it, since its outputs are not of the batch's tokens"
        if not share < 1:
            return [
                weight.before.noting("autoround did not lower the block's error and was not used")
                for weight in self.weights
            ]
        parts = {
            id(weight): part
            for one, state in zip(self.joined, states[best], strict=True)
            for weight, part in zip(one.weights, one.states(state), strict=True)
        }
        return [weight.remade(parts[id(weight)], note) for weight in self.weights]

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Weights and inputs of the layers as they are learned inside; the model as it was afterwards."""
        originals = [(m, m._parameters["weight"]) for one in self.weights for m in one.target.layers.values()]
        hooks = [hook for one in self.weights for hook in _hooks(one)]
        trained = [p for p in self.block.module.parameters() if p.requires_grad]
        try:
            for parameter in trained:
                parameter.requires_grad_(False)
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for module, weight in originals:
                module._parameters["weight"] = weight
            for parameter in trained:
                parameter.requires_grad_(True)

    def _learn(self) -> None:
        """All steps."""
        order = self._order()
        for step in range(self.method.steps):
            for one in self.joined:
                one.put()
            self._remember(self._loss([next(order) for _ in range(self._count())]))
            rate = (1 - step / self.method.steps) / self.method.steps
            for one in self.joined:
                one.step(rate)

    def _remember(self, loss: torch.Tensor) -> None:
        """Keep the states of the least loss; chosen on the device, so that no step waits for it, and in one place."""
        if self.best is None or self.least is None:
            self.least = torch.full_like(loss, torch.inf)
            self.best = [type(one.state)(*map(_copied, one.state)) for one in self.joined]
        better = loss < self.least
        torch.where(better, loss, self.least, out=self.least)
        for one, best in zip(self.joined, self.best, strict=True):
            signround_keep(better, one.state, best)

    def _order(self) -> Iterator[int]:
        """Numbers of batches that have tokens to learn from, over and over, in orders that a seed draws."""
        numbers = torch.tensor([i for i, role in enumerate(self.tokens.roles) if bool((role == TRAIN).any())])
        generator = torch.Generator().manual_seed(self.method.seed + self.block.index)
        while True:
            for at in torch.randperm(len(numbers), generator=generator):
                yield int(numbers[at])

    def _count(self) -> int:
        """Batches of a step: about `sequences` sequences."""
        sequences = max(len(role) for role in self.tokens.roles)
        return max(self.method.sequences // max(sequences, 1), 1)

    def _loss(self, batches: Sequence[int]) -> torch.Tensor:
        """The mean square error over tokens to learn from, its gradients with the weights."""
        # No zero of the host's to begin with: to copy it there a GPU would be waited for in every step.
        losses = []
        for batch in batches:
            with torch.enable_grad():
                with without_cudnn():
                    loss = self._squares(batch, TRAIN) / len(batches)
                with one_order(loss):
                    loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach().to(torch.float64))
        return reduce(torch.add, losses)

    def _squares(self, batch: int, role: int) -> torch.Tensor:
        """The mean over tokens of a kind in a batch of the squared error of the block's output."""
        y = self.block.output(batch)
        wanted = self.block.originals[batch].value.to(y.device)
        off = token_errors(y, wanted)
        chosen = self._of_kind(batch, role, off)
        return torch.where(chosen, off, 0).sum() / chosen.sum().clamp(min=1)

    def _of_kind(self, batch: int, role: int, like: torch.Tensor) -> torch.Tensor:
        """Which tokens of a block's output are of a kind: all of them where they are not those of the batch."""
        key, roles = (batch, role), self.tokens.roles[batch]
        if key not in self.kinds:
            fits = roles.shape == like.shape
            self.unmatched = self.unmatched or not (fits or bool((roles == TRAIN).all()))
            chosen = roles == role if fits else torch.ones(like.shape, dtype=torch.bool)
            self.kinds[key] = chosen.to(like.device)
        return self.kinds[key]

    def _error_of(self, states: list[Any]) -> float:
        """The block's error with these states."""
        now = [one.state for one in self.joined]
        for one, state in zip(self.joined, states, strict=True):
            one.state = state
            one.put()
            one.state = now.pop(0)
        return self.error()

    def error(self) -> float:
        """The block's error on held-out tokens as it is now; on those to learn from where none are held out."""
        role = HELD_OUT if any(bool((r == HELD_OUT).any()) for r in self.tokens.roles) else TRAIN
        counts = [int((r == role).sum()) for r in self.tokens.roles]
        squares = [
            self._squares(i, role).to(torch.float64) * count for i, count in enumerate(counts) if count
        ]
        return float(sum(squares)) / max(sum(counts), 1)


#: How the names begin of torch's attention among nodes of a graph of gradients.
ATTENTION = "ScaledDotProduct"


@contextmanager
def without_cudnn() -> Iterator[None]:
    """scaled_dot_product_attention without cuDNN's kernel, whose backward has no order of sums; where another is allowed."""
    allowed: Any = torch.backends.cuda
    others = allowed.flash_sdp_enabled() or allowed.mem_efficient_sdp_enabled() or allowed.math_sdp_enabled()
    before = allowed.cudnn_sdp_enabled()
    try:
        allowed.enable_cudnn_sdp(before and not others)
        yield
    finally:
        allowed.enable_cudnn_sdp(before)


@contextmanager
def one_order(loss: torch.Tensor) -> Iterator[None]:
    """Gradients of a loss inside: the backward of its attention, and nothing else, by torch's deterministic algorithms.

    Not of all operations: those without a deterministic backward would be errors. Afterwards the mode is what it was.
    """
    before = torch.get_deterministic_debug_mode()
    for node in nodes_of(loss):
        if node.name().startswith(ATTENTION):
            node.register_prehook(lambda _: torch.set_deterministic_debug_mode("error"))
            node.register_hook(lambda *_: torch.set_deterministic_debug_mode(before))
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def nodes_of(loss: torch.Tensor) -> Iterator[Any]:
    """Each node of a tensor's graph of gradients once."""
    waiting, seen = [loss.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting.extend(following for following, _ in node.next_functions)


def _copied(part: torch.Tensor | None) -> torch.Tensor | None:
    return None if part is None else part.clone()


def _hooks(one: Learned) -> list[Any]:
    """What changes the inputs of a weight's layers to what the layers are going to multiply."""
    activation, length, scales = one.target.recipe.activation, one.rotation, one.part.input_scales
    if activation is None and not length:
        return []

    def change(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = rotated(args[0], length) if length else args[0]
        return (x if activation is None else straight(x, activation, scales), *args[1:])

    return [module.register_forward_pre_hook(change) for module in one.target.layers.values()]


def straight(x: torch.Tensor, scheme: Any, scales: Any) -> torch.Tensor:
    """Inputs as a layer quantizes them; gradients pass."""
    return x + (quantized_inputs(x.detach(), scheme, scales) - x.detach())


def rotated(x: torch.Tensor, length: int) -> torch.Tensor:
    """hadamard(x, length) as a product, of which there are gradients."""
    matrix = hadamard(torch.eye(length, device=x.device), length).to(x.dtype)
    return (x.reshape(*x.shape[:-1], -1, length) @ matrix).reshape(x.shape)
