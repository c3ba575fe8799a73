"""What the layers of a model multiply: inputs and output gradients of each, recorded in one step on a sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ao_lab.training.layers import LowPrecisionLinear, autocast
from ao_lab.training.shapes import padded

#: A tensor, positional or named arguments of the model, or a function that runs the model and returns a loss or an output.
SampleInput = torch.Tensor | tuple[Any, ...] | Mapping[str, Any] | Callable[[nn.Module], Any]


@dataclass
class Sample:
    """A layer with its weight (N, K), one of its inputs (M, K), and the gradient (M, N) of its output.

    g: None where nothing flowed back. Lengths are padded as the layer pads them.
    """

    name: str
    layer: LowPrecisionLinear
    x: torch.Tensor
    w: torch.Tensor
    g: torch.Tensor | None = None

    def padded(self) -> Sample:
        """With zeros up to the lengths that the recipe's blocks ask for."""
        m, n, k = self.layer.low_precision.steps
        g = None if self.g is None else padded(self.g, m, n)
        return Sample(self.name, self.layer, padded(self.x, m, k), padded(self.w, n, k), g)


def record(model: nn.Module, sample_input: SampleInput) -> list[Sample]:
    """A sample of each layer and number of rows, from one forward and, where something requires a gradient, one backward.

    Gradients and the states of random generators are afterwards what they were. ValueError where no layer that trains in low
    precision was reached.
    """
    found: dict[tuple[str, int], Sample] = {}
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, LowPrecisionLinear):
            handles.append(module.register_forward_hook(_recorder(name, found)))
    try:
        with _untouched(model):
            _backward(_output(model, sample_input))
    finally:
        for handle in handles:
            handle.remove()
    if not found:
        raise ValueError(
            "tune found no layer to measure: none trains in low precision, or sample_input reaches none; call "
            "convert_for_training_ first"
        )
    return [sample.padded() for sample in found.values()]


def _recorder(name: str, found: dict[tuple[str, int], Sample]) -> Callable[..., None]:
    def hook(layer: LowPrecisionLinear, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        x, w, _ = autocast(inputs[0].detach(), layer.weight.detach(), None)
        x = x.reshape(-1, layer.in_features)
        sample = found.setdefault((name, x.shape[0]), Sample(name, layer, x, w))

        def keep(g: torch.Tensor) -> None:
            sample.g = g.detach().reshape(-1, layer.out_features)

        if output.requires_grad:
            output.register_hook(keep)  # type: ignore[no-untyped-call]

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


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Gradients and random generators as they were, afterwards."""
    grads = {parameter: parameter.grad for parameter in model.parameters()}
    for parameter in grads:
        parameter.grad = None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for parameter, grad in grads.items():
            parameter.grad = grad


__all__ = ["Sample", "SampleInput", "record"]
