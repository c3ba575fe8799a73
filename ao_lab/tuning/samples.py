"""What the layers of a model multiply: inputs and output gradients of each, recorded in one step on a sample.

A model as it was, after a step on a sample: what a forward and a backward leave in it is put back.

Buffers and tensors that modules hold (running statistics, codebooks of moving averages, caches), their other plain values,
lists and dictionaries, whether they train, gradients, and the states of random generators. Parameters are not copied, which
would take a model's memory again: a step that writes to one is told of.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from ao_lab.gemm.choices import rows_range
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.training.grouped.autograd import LISTENERS
from ao_lab.training.grouped.experts import LowPrecisionExperts
from ao_lab.training.layers import LowPrecisionLinear, autocast, padded_to_multiples
from reference.training.recipe import Recipe

#: Attributes that every module has, hooks among them.
OF_MODULES = frozenset(vars(nn.Module()))
PLAIN = (int, float, str, bytes, bool, type(None))
Undo = Callable[[], None]


@contextmanager
def untouched(model: nn.Module, given: Any = None) -> Iterator[None]:
    """Everything of a model that the module text names, of tensors among `given`, and of generators, as before afterwards.

    A UserWarning names parameters that were written to.
    """
    undo: list[Undo] = [
        *_gradients(model, given),
        *(one for module in model.modules() for one in _module(module)),
        partial(random.setstate, random.getstate()),
        partial(np.random.set_state, np.random.get_state()),  # noqa: NPY002  (the state that others draw from)
    ]
    versions = {name: _version(parameter) for name, parameter in model.named_parameters()}
    try:
        with torch.random.fork_rng():
            yield
    finally:
        with torch.no_grad():
            for one in undo:
                one()
        _tell_of_written(model, versions)


def _gradients(model: nn.Module, given: Any) -> Iterator[Undo]:
    """Take gradients away, and what optimizers do while these come into being."""
    for parameter in model.parameters():
        yield partial(setattr, parameter, "grad", parameter.grad)
        parameter.grad = None
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if hooks:
            yield partial(hooks.update, dict(hooks))
            hooks.clear()
    values = given.values() if isinstance(given, Mapping) else given if isinstance(given, tuple) else [given]
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad:
            yield partial(setattr, value, "grad", value.grad)


def _module(module: nn.Module) -> Iterator[Undo]:
    """Of one module, without those inside it. What modules of torch itself hold but tensors is torch's affair."""
    yield partial(setattr, module, "training", module.training)
    yield from _entries(module._buffers, only_tensors=False)
    of_torch = type(module).__module__.partition(".")[0] == "torch"
    yield from _entries(vars(module), only_tensors=of_torch)


def _entries(holder: dict[str, Any], *, only_tensors: bool) -> Iterator[Undo]:
    """The values of a module's dictionary, and that others are gone."""
    kept = {
        key: value for key, value in holder.items() if key not in OF_MODULES and _is_kept(value, only_tensors)
    }
    for value in kept.values():
        yield from _content(value)
    yield partial(_put_back, holder, kept, set(holder), only_tensors)


def _is_kept(value: Any, only_tensors: bool) -> bool:
    if isinstance(value, (torch.Tensor, type(None))):
        return True
    return not only_tensors and isinstance(value, (*PLAIN, list, dict, torch.Generator))


def _put_back(holder: dict[str, Any], kept: dict[str, Any], names: set[str], only_tensors: bool) -> None:
    for key in [key for key in holder if key not in names and _is_kept(holder[key], only_tensors)]:
        del holder[key]
    for key, value in kept.items():
        now = holder.get(key)
        if now is not value and (
            not only_tensors or isinstance(value, torch.Tensor) or isinstance(now, torch.Tensor)
        ):
            holder[key] = value


def _content(value: Any, depth: int = 2) -> Iterator[Undo]:
    """What is inside of a tensor, a generator, a list or a dictionary."""
    if isinstance(value, torch.Tensor):
        if not value.is_meta:
            yield partial(_copy_back, value, value.detach().clone())
    elif isinstance(value, torch.Generator):
        yield partial(_draw_from, value, value.get_state())
    elif isinstance(value, list) and depth:
        yield partial(value.__setitem__, slice(None), list(value))
        for one in value:
            yield from _content(one, depth - 1)
    elif isinstance(value, dict) and depth:
        yield partial(_fill, value, dict(value))
        for one in value.values():
            yield from _content(one, depth - 1)


def _fill(value: dict[Any, Any], before: dict[Any, Any]) -> None:
    if len(value) != len(before) or any(value.get(key, value) is not one for key, one in before.items()):
        value.clear()
        value.update(before)


def _draw_from(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def _copy_back(value: torch.Tensor, before: torch.Tensor) -> None:
    """In place, where values differ: operations of torch write to running statistics without counting it."""
    if value.shape != before.shape:
        value.data = before
    elif type(value) is not torch.Tensor or not torch.equal(value, before):
        value.copy_(before)


def _version(value: torch.Tensor) -> int | None:
    return None if value.is_inference() else value._version


def _tell_of_written(model: nn.Module, versions: dict[str, int | None]) -> None:
    now = dict(model.named_parameters())
    written = [
        name for name, version in versions.items() if name not in now or _version(now[name]) != version
    ]
    if written:
        warnings.warn(
            f"the step on sample_input wrote to {len(written)} parameters, which tune does not put back: "
            f"{', '.join(written[:3])}; hold what a forward writes in buffers, or give a sample_input that updates nothing",
            UserWarning,
            stacklevel=2,
        )


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
        g = None if g is None else padded_to_multiples(g, m, n)
        return replace(self, x=padded_to_multiples(x, m, k), w=padded_to_multiples(self.w, n, k), g=g)


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

    The model is afterwards what it was (`ao_lab.tuning.samples`). ValueError where no layer was reached that
    trains in low precision or has a quantized weight.
    """
    result: dict[object, Sample] = {}
    with untouched(model, sample_input), _listening(model, result):
        backward_of(output_of(model, sample_input))
    if not result:
        raise ValueError(
            "tune found no layer to measure: none trains in low precision or has a quantized weight whose kernel is 'auto', or "
            "sample_input reaches none; call convert_for_training_ first, or quantize_"
        )
    return list(result.values())


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


def output_of(model: nn.Module, sample_input: SampleInput) -> Any:
    if callable(sample_input):
        return sample_input(model)
    if isinstance(sample_input, Mapping):
        return model(**sample_input)
    return model(*sample_input) if isinstance(sample_input, tuple) else model(sample_input)


def backward_of(output: Any) -> None:
    """From a loss; from the mean square of anything else."""
    loss = getattr(output, "loss", None)
    loss = output if loss is None else loss
    loss = loss[0] if isinstance(loss, (tuple, list)) else getattr(loss, "logits", loss)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        (loss if loss.dim() == 0 else loss.float().square().mean()).backward()  # type: ignore[no-untyped-call]


__all__ = [
    "ExpertsSample",
    "Sample",
    "SampleInput",
    "ServingSample",
    "TrainingSample",
    "is_served",
    "record",
    "untouched",
]
