"""How much options move a model's predictions: scores of each, from one pass over data, and the divergence that is measured.

A layer whose weights change by D moves its outputs by D x. With g the gradient, at these outputs, of the negative log
likelihood of a label *sampled from the model itself*, the mean over tokens of (g . D x)^2 / 2 is the second-order change of
the KL divergence to the model as it was. (With labels of the text it is not: they are no draws from the model, and rankings
get worse.) One forward and one backward pass give g of all layers; hooks form D x of each option then, one at a time. Where
an option quantizes inputs too, D x becomes Q q(x) - W x.

The arithmetic is `fast.calibration.layer_score` (`reference.calibration.allocate`). What a setting of all
layers costs in truth is measured (`divergences`): the KL divergence from the model to itself with the quantized weights in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import fast
from ao_lab.choose.items import Item
from ao_lab.choose.weights import Setting, Weights
from ao_lab.config.recipe import Recipe
from ao_lab.eval import divergence
from ao_lab.transforms.data import Call, Seen, as_multiplied, mask_of
from ao_lab.transforms.layers import TABLES, shorten
from ao_lab.transforms.walk import first_tensor
from fast.calibration.allocate import layer_score
from fast.layers.hadamard import hadamard, rotated_back

#: Rows of probabilities that are summed up at a time to draw labels, and predictions that are compared at a time.
ROWS, COMPARED = 256, 1024
#: Bytes of a batch's log probabilities that are held while all settings are compared with them.
HELD = 2 << 30


def logits_of(output: Any) -> torch.Tensor:
    """What a model returns as logits, (..., classes)."""
    logits = getattr(output, "logits", None)
    values: torch.Tensor = first_tensor(output, "the model") if logits is None else logits
    if values.dim() < 2 or not values.is_floating_point():
        raise ValueError(
            f"the model returns {str(values.dtype).removeprefix('torch.')} {tuple(values.shape)}, no logits (tokens, classes) "
            f"to score options by; give a model that has `logits`, or returns them first"
        )
    return values


def counted(call: Call, logits: torch.Tensor) -> torch.Tensor:
    """Which predictions count, flat: those of tokens that are no padding."""
    mask = mask_of(call)
    if mask is None or mask.shape != logits.shape[:-1]:
        return torch.ones(logits.shape[:-1].numel(), dtype=torch.bool, device=logits.device)
    return mask.to(logits.device).reshape(-1)


@dataclass
class Scoring:
    """The pass: sums of (g . D x)^2 / 2 over tokens, by item and option."""

    items: Sequence[Item]
    options: Sequence[str]
    weights: Weights
    generator: torch.Generator
    sums: dict[tuple[str, str], float] = field(default_factory=dict)
    #: By an item's name: a number of the tensor that its layers read first, the same for those that read the same.
    reads: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    last: Seen | None = None

    def run(self, model: nn.Module, call: Call) -> None:
        """Take in one batch."""
        args, kwargs = call
        with self._watching(), torch.enable_grad():
            logits = logits_of(model(*args, **kwargs))
            self.last = None
            if not bool(logits.isfinite().all()):
                raise ValueError(
                    "the model's logits are NaN or infinite on a calibration batch; leave the batch out"
                )
            which = counted(call, logits)
            if logits.requires_grad:
                logits.backward(self._gradient(logits.detach(), which))  # type: ignore[no-untyped-call]
        self.tokens += int(which.sum())

    def _gradient(self, logits: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        """Of the sum of -log p(label) at the logits: p minus one at a label drawn by p; 0 where a prediction does not count."""
        rows = logits.reshape(-1, logits.shape[-1])
        result = torch.zeros_like(rows)
        for places in which.nonzero()[:, 0].split(ROWS):  # type: ignore[no-untyped-call]
            p = rows[places].float().softmax(-1)
            drawn = torch.rand(len(p), 1, generator=self.generator, dtype=torch.float64).to(p.device)
            sums = p.double().cumsum(-1)
            label = torch.searchsorted(sums, drawn * sums[:, -1:], right=True).clamp_(max=p.shape[-1] - 1)
            p.scatter_add_(1, label, torch.full_like(label, -1, dtype=p.dtype))
            result[places] = p.to(result.dtype)
        return result.reshape(logits.shape)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        handles: list[Any] = []
        try:
            for item in self.items:
                for module, _ in item.places.values():
                    handles.append(module.register_forward_hook(Hook(self, item), with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def note_input(self, item: Item, x: torch.Tensor) -> None:
        """Tell which tensor an item reads."""
        if item.name in self.reads:
            return
        same = self.last is not None and self.last.is_still(x)
        self.reads[item.name] = max(self.reads.values(), default=-1) + (not same)
        self.last = Seen(x)

    def add(self, item: Item, module: nn.Module, x: torch.Tensor, g: torch.Tensor) -> None:
        """Take in what a call of a layer read, and the gradient at its outputs."""
        if not bool(g.isfinite().all()):
            raise ValueError(
                f"{item.name}: the gradient at its outputs is NaN or infinite; run the model in bfloat16 or float32, or leave "
                f"out the batch that makes it"
            )
        for option in self.options:
            if option in item.changes:
                key = item.name, option
                self.sums[key] = self.sums.get(key, 0.0) + self._score(item, option, module, x, g)

    def _score(self, item: Item, option: str, module: nn.Module, x: torch.Tensor, g: torch.Tensor) -> float:
        """The sum over a call's tokens."""
        weight, change = self.weights.of(item, option), item.changes[option]
        if weight is None or change is None or not g.numel():
            return 0.0
        quantized: Any = weight.detach()
        w, q = item.parameter.detach().float(), quantized.dequantize(torch.float32)
        rows = g.reshape(-1, g.shape[-1]).float()
        if isinstance(module, TABLES):
            return float(((q - w)[x.reshape(-1)].double() * rows.double()).sum(-1).square().sum()) / 2
        w, q = (w.T, q.T) if change.transposed else (w, q)
        inputs = x.reshape(-1, x.shape[-1])
        if quantized.recipe.activation is not None:
            seen = as_seen(inputs, quantized.recipe)
            return layer_score(torch.cat([q, -w], 1), torch.cat([seen, inputs.float()], 1), rows) * len(rows)
        # A model in bfloat16 computes no D x more exactly than D in bfloat16 has it; products are several times quicker so.
        d = (q - w).to(inputs.dtype) if inputs.dtype == torch.bfloat16 else q - w
        return layer_score(d, inputs, rows) * len(rows)

    def means(self) -> dict[str, dict[str, float]]:
        """The score of each item under each of its options; ValueError for layers without a gradient."""
        if not self.tokens:
            raise ValueError("calibration has no token that is no padding; give other batches")
        missing = [
            item.name for item in self.items if not any((item.name, one) in self.sums for one in self.options)
        ]
        if missing:
            raise ValueError(
                f"no input, or no gradient, reached {shorten(missing)}; give calibration data that reaches these layers by "
                f"calling their modules, or exclude them with filter_fn"
            )
        return {
            item.name: {
                one: self.sums[item.name, one] / self.tokens for one in self.options if one in item.changes
            }
            for item in self.items
        }


def as_seen(x: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Inputs (tokens, channels) as a layer's product sees them, in float32: quantized; where they are rotated, rotated back."""
    length, scheme = recipe.rotation, recipe.activation
    rotated = hadamard(x, length) if length else x
    seen = rotated if scheme is None else fast.fake_quantize(rotated, scheme)
    return rotated_back(seen.float(), length) if length else seen.float()


@dataclass
class Hook:
    """A forward hook of one layer."""

    scoring: Scoring
    item: Item

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Begin a graph where there is none yet, and wait for the gradient."""
        x = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(x, torch.Tensor) or not isinstance(output, torch.Tensor):
            return output
        x = as_multiplied(x)
        self.scoring.note_input(self.item, x)
        if not output.requires_grad:
            output = output.detach().requires_grad_().view_as(output)
        output.register_hook(lambda g: self.scoring.add(self.item, module, x, g))
        return output


def divergences(
    model: nn.Module,
    calls: Sequence[Call],
    weights: Weights,
    settings: Sequence[Setting],
    done: Callable[[], None],
) -> list[float]:
    """The mean over predictions of the divergence to the model as it is, nats, for each setting."""
    sums, tokens = [0.0] * len(settings), 0
    for args, kwargs in calls:
        logits = logits_of(model(*args, **kwargs))
        base, which = Base(_flat(logits)), counted((args, kwargs), logits)
        tokens += int(which.sum())
        for i, setting in enumerate(settings):
            with weights.placed(setting):
                sums[i] += base.divergence(_flat(logits_of(model(*args, **kwargs))), which)
        done()
    return [value / max(tokens, 1) for value in sums]


def _flat(logits: torch.Tensor) -> torch.Tensor:
    return logits.reshape(-1, logits.shape[-1])


class Base:
    """What the model as it is predicts of a batch, (predictions, classes), with its log probabilities where they are small."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits
        self.held = [self._part(i) for i in self._starts] if logits.numel() * 4 <= HELD else None

    @property
    def _starts(self) -> range:
        return range(0, len(self.logits), COMPARED)

    def _part(self, start: int) -> torch.Tensor:
        return self.logits[start : start + COMPARED].float().log_softmax(-1)

    def divergence(self, logits: torch.Tensor, which: torch.Tensor) -> float:
        """The sum over predictions that count of the divergence to other logits."""
        total = torch.zeros((), dtype=torch.float64, device=logits.device)
        for i, start in enumerate(self._starts):
            part = slice(start, start + COMPARED)
            base = self._part(start) if self.held is None else self.held[i]
            terms = divergence(base, logits[part].float().log_softmax(-1))
            total += torch.where(which[part], terms, 0.0).sum()
        return float(total)
