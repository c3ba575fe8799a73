"""What the layers of a model multiply: inputs and output gradients of each, recorded in one step on a sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ao_lab.gemm.problem import rows_range
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.training.grouped.autograd import LISTENERS
from ao_lab.training.grouped.experts import LowPrecisionExperts
from ao_lab.training.layers import LowPrecisionLinear, autocast
from ao_lab.training.shapes import padded
from ao_lab.tuning.untouched import untouched
from reference.training.recipe import Recipe

#: A tensor, positional or named arguments of the model, or a function that runs the model and returns a loss or an output.
SampleInput = torch.Tensor | tuple[Any, ...] | Mapping[str, Any] | Callable[[nn.Module], Any]


@dataclass
class TrainingSample:
    """A layer that trains by a recipe: its weight (N, K), one of its inputs (M, K), and the gradient (M, N) of its output.

    g: None where nothing flowed back. steps: what M, N and K are padded to multiples of, as the layer does.
    """

    name: str
    recipe: Recipe
    steps: tuple[int, int, int]
    x: torch.Tensor
    w: torch.Tensor
    g: torch.Tensor | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """What layers have in common that get the same choices for a range of rows."""
        return self.recipe.key, tuple(self.w.shape), self.x.dtype, self.x.device, self.g is None

    def of_rows(self, rows: int) -> TrainingSample:
        """With so many rows, the recorded ones again and again, and padded."""
        m, n, k = self.steps
        x, g = repeated(self.x, rows), None if self.g is None else repeated(self.g, rows)
        g = None if g is None else padded(g, m, n)
        return replace(self, x=padded(x, m, k), w=padded(self.w, n, k), g=g)


@dataclass
class ServingSample:
    """A layer with a quantized weight (N, K), and one of its inputs (M, K)."""

    name: str
    x: torch.Tensor
    w: QuantizedTensor

    @property
    def kind(self) -> tuple[object, ...]:
        """What layers have in common that get the same choices for a range of rows."""
        recipe = self.w.recipe
        return recipe.weight.key, recipe.activation, tuple(self.w.shape), self.x.dtype, self.x.device

    def of_rows(self, rows: int) -> ServingSample:
        """With so many rows, the recorded ones again and again."""
        return replace(self, x=repeated(self.x, rows))


@dataclass
class ExpertsSample:
    """Experts that train by a recipe: their weights (E, N, K), inputs (T, K) sorted by expert, and the gradient (T, N).

    offsets: (E,) the row after each expert's. g: None where nothing flowed back.
    """

    name: str
    recipe: Recipe
    offsets: torch.Tensor
    x: torch.Tensor
    w: torch.Tensor
    g: torch.Tensor | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """What experts have in common that get the same choices for a range of rows."""
        return self.recipe.key, tuple(self.w.shape), self.x.dtype, self.x.device, self.g is None

    def of_rows(self, rows: int) -> ExpertsSample:
        """With so many rows, the recorded ones again and again, each expert with its share of them."""
        offsets = (self.offsets.double() * rows / self.x.shape[0]).round().to(self.offsets.dtype)
        g = None if self.g is None else repeated(self.g, rows)
        return replace(self, x=repeated(self.x, rows), offsets=offsets, g=g)


Sample = TrainingSample | ServingSample | ExpertsSample


def repeated(x: torch.Tensor, rows: int) -> torch.Tensor:
    """The first rows of x, which begins anew at its end."""
    return x.repeat(-(-rows // max(x.shape[0], 1)), 1)[:rows] if rows > x.shape[0] else x[:rows]


def record(model: nn.Module, sample_input: SampleInput) -> list[Sample]:
    """A sample of each kind of layer and range of rows, from one forward, and one backward where something requires a gradient.

    The model is afterwards what it was (`ao_lab.tuning.untouched`). ValueError where no layer was reached that
    trains in low precision or has a quantized weight.
    """
    found: dict[object, Sample] = {}
    with untouched(model, sample_input), _listening(model, found):
        _backward(_output(model, sample_input))
    if not found:
        raise ValueError(
            "tune found no layer to measure: none trains in low precision or has a quantized weight whose kernel is 'auto', or "
            "sample_input reaches none; call convert_for_training_ first, or quantize_"
        )
    return list(found.values())


@contextmanager
def _listening(model: nn.Module, found: dict[object, Sample]) -> Iterator[None]:
    """Inside, samples of what the layers of a model multiply are added."""
    handles, inside = [], [""]
    for name, module in model.named_modules():
        if isinstance(module, (LowPrecisionLinear, LowPrecisionExperts)) or is_served(module):
            measured: nn.Module = module
            handles.append(measured.register_forward_pre_hook(partial(_refuse_meta, name)))
        if isinstance(module, LowPrecisionLinear):
            handles.append(module.register_forward_hook(_training_recorder(name, found)))
        elif isinstance(module, LowPrecisionExperts):
            experts: Any = module
            handles.append(experts.register_forward_pre_hook(partial(_enter, inside, name)))
        elif is_served(module):
            handles.append(module.register_forward_hook(_serving_recorder(name, found)))
    listener = _experts_recorder(inside, found)
    LISTENERS.append(listener)
    try:
        yield
    finally:
        LISTENERS.remove(listener)
        for handle in handles:
            handle.remove()


def is_served(module: nn.Module) -> bool:
    """Whether a module is a linear layer with a quantized weight whose function is chosen: its recipe names none."""
    weight: Any = module._parameters.get("weight") if isinstance(module, nn.Linear) else None
    return isinstance(weight, QuantizedTensor) and weight.dim() == 2 and weight.recipe.kernel == "auto"


def _training_recorder(name: str, found: dict[object, Sample]) -> Callable[..., None]:
    def hook(layer: LowPrecisionLinear, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        settings = layer.low_precision
        with torch.no_grad():
            x, w, _ = autocast(*layer.operands(inputs[0].detach()), None)
        w = w.detach()
        x = x.reshape(-1, layer.in_features)
        key = (settings.recipe.key, tuple(w.shape), rows_range(x.shape[0]), x.dtype, output.requires_grad)
        if key in found or settings.kernel != "auto" or isinstance(w, QuantizedTensor) or not x.shape[0]:
            return
        found[key] = sample = TrainingSample(name, settings.recipe, settings.steps, x, w)

        def keep(g: torch.Tensor) -> None:
            sample.g = g.detach().reshape(-1, layer.out_features)

        if output.requires_grad:
            output.register_hook(keep)  # type: ignore[no-untyped-call]

    return hook


def _refuse_meta(name: str, module: nn.Module, inputs: Any) -> None:
    """ValueError for inputs of a layer that have no values."""
    if any(isinstance(x, torch.Tensor) and x.is_meta for x in inputs):
        raise ValueError(
            f"tune measures, and inputs of {name or 'the model'} are on the meta device, where nothing runs; load the model's "
            f"weights first, and give sample_input on their device"
        )


def _enter(inside: list[str], name: str, module: nn.Module, inputs: Any) -> None:
    inside[0] = name


def _experts_recorder(inside: list[str], found: dict[object, Sample]) -> Callable[..., None]:
    """inside: the name of the module that multiplies."""

    def listener(
        x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, recipe: Recipe, kernel: str, y: torch.Tensor
    ) -> None:
        key = (recipe.key, tuple(w.shape), rows_range(x.shape[0]), x.dtype, y.requires_grad)
        if key in found or kernel != "auto" or not x.shape[0]:
            return
        x, w, offsets = (t.detach() for t in (x, w, offsets))
        found[key] = sample = ExpertsSample(inside[0], recipe, offsets, x, w)

        def keep(g: torch.Tensor) -> None:
            sample.g = g.detach()

        if y.requires_grad:
            y.register_hook(keep)  # type: ignore[no-untyped-call]

    return listener


def _serving_recorder(name: str, found: dict[object, Sample]) -> Callable[..., None]:
    def hook(layer: nn.Linear, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        x, _, _ = autocast(inputs[0].detach(), None, None)
        x = x.reshape(-1, x.shape[-1])
        w: Any = layer.weight.detach()
        key = (w.recipe.weight.key, w.recipe.activation, tuple(w.shape), rows_range(x.shape[0]), x.dtype)
        if x.shape[0]:
            found.setdefault(key, ServingSample(name, x, w))

    return hook


def _output(model: nn.Module, sample_input: SampleInput) -> Any:
    if callable(sample_input):
        return sample_input(model)
    if isinstance(sample_input, Mapping):
        return model(**sample_input)
    return model(*sample_input) if isinstance(sample_input, tuple) else model(sample_input)


def _backward(output: Any) -> None:
    """From a loss; from the mean square of anything else."""
    loss = getattr(output, "loss", None)
    loss = output if loss is None else loss
    loss = loss[0] if isinstance(loss, (tuple, list)) else getattr(loss, "logits", loss)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        (loss if loss.dim() == 0 else loss.float().square().mean()).backward()  # type: ignore[no-untyped-call]


__all__ = ["ExpertsSample", "Sample", "SampleInput", "ServingSample", "TrainingSample", "is_served", "record"]
