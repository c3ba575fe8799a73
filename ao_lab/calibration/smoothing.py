"""Smooth and AWQ in a model: channels scaled between a producer and the layers that read it, before anything is quantized.

Pairs are found by trying (`ao_lab.calibration.equivalence`), factors by `fast.smoothing_factors` or `fast.awq_factors` of what
the readers' inputs were. Each weight of a pair is rounded before and after, and its output errors on held-out tokens compared:
a pair is scaled only where these fall, by the geometric mean over its weights. None may rise, where nothing but rounding
follows; where scales are searched or GPTQ follows, which win more than that, each may rise by `MORE`. Everything here is of
one block; what follows reads the moments of the scaled inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from typing import Any

import torch
from torch import nn

import fast
from ao_lab.calibration.equivalence import Pair, find_pairs, scale_inputs, scale_producer
from ao_lab.calibration.groups import Target, dense_of
from ao_lab.calibration.judge import output_error
from ao_lab.calibration.layers import Part
from ao_lab.calibration.methods import AWQ, Method, Smooth
from ao_lab.calibration.tokens import SplitMoments
from ao_lab.tensor.chunked import quantized_weight
from ao_lab.transforms.walk import Block

#: By how much rounding's error of a weight may rise where a better method follows.
MORE = 1.1


@dataclass
class Smoothing:
    """One block while its pairs are scaled."""

    block: Block
    #: Weights to be quantized by the names of their layers in the block, their inputs, and what is known of each.
    targets: Mapping[str, Target]
    inputs: dict[str, SplitMoments]
    parts: dict[str, Part]
    method: Method
    #: By how much rounding's error of a weight may rise.
    most: float = 1.0
    modules: dict[str, nn.Module] = field(init=False)

    def __post_init__(self) -> None:
        self.modules = dict(self.block.module.named_modules())

    def find(self, known: Sequence[Pair]) -> list[Pair]:
        """The pairs of the block. known: those of the block before."""
        return find_pairs(self.block, known)

    def run(self, pairs: Sequence[Pair]) -> None:
        """Scale the pairs of the block."""
        for pair in pairs:
            readers = [name for name in pair.consumers if name in self.targets]
            if readers:
                self._scale(pair, readers)

    def _scale(self, pair: Pair, readers: list[str]) -> None:
        """Scale one pair, and put it back where a weight comes out worse."""
        factors, method = self._factors(pair, readers)
        if bool((factors == 1).all()):
            self._note(readers, f"{method}: no factors are better")
            return
        judged = [*readers, *([pair.producer] if pair.producer in self.targets else [])]
        before, finished = {name: self._error(name) for name in judged}, False
        for name, error in before.items():
            if self.parts[name].baseline is None:
                self.parts[name].baseline = error
        modules = [self.modules[name] for name in (pair.producer, *pair.consumers)]
        values = [(p, p.detach().clone()) for m in modules for p in m._parameters.values() if p is not None]
        inputs, rows = dict(self.inputs), {name: self.parts[name].rows for name in judged}
        worse: list[str] = []
        try:
            self._apply(pair, readers, factors)
            ratios = {name: _ratio(self._error(name), before[name]) for name in judged}
            worse += [name for name, ratio in ratios.items() if ratio > self.most]
            finished = not worse and prod(ratios.values()) < 1
        finally:
            # Half a pair would be another model.
            if not finished:
                for parameter, value in values:
                    parameter.data.copy_(value)
        if finished:
            for name in readers:
                self.parts[name].before += (method,)
            return
        self.inputs.update(inputs)
        for name in judged:
            self.parts[name].rows = rows[name]
        what = ", ".join(worse or judged)
        self._note(readers, f"{method} would make {what} worse than rounding and was not applied")

    def _note(self, names: list[str], note: str) -> None:
        for name in names:
            self.parts[name].notes += (note,)

    def _factors(self, pair: Pair, readers: list[str]) -> tuple[torch.Tensor, str]:
        """By what the readers' weights are multiplied, (count,) by channel of the producer, and what found it."""
        weights = [dense_of(self.targets[name]) for name in readers]
        moments = self.inputs[readers[0]].train
        device = weights[0].device
        if isinstance(self.method, Smooth):
            largest = _largest(moments.largest, pair).to(device)
            w = torch.stack([pair.per_channel(one.abs().amax(0).to(torch.float64)) for one in weights]).amax(
                0
            )
            return fast.smoothing_factors(largest, w, self.method.alpha), self.method.name
        method: Any = self.method
        mean = pair.per_input(_largest(moments.mean_magnitude, pair)).to(device)
        awq = fast.awq_factors(
            weights, moments.hessian.to(device), mean, self.targets[readers[0]].recipe.weight, ratios=method.ratios
        )  # fmt: skip
        # Repeated heads have one factor: that of the first.
        heads = awq.factors.reshape(-1, pair.repeats, pair.head)
        return heads[:, 0].reshape(-1), method.name

    def _apply(self, pair: Pair, readers: list[str], factors: torch.Tensor) -> None:
        """Divide the producer's channels by factors, multiply its readers' columns by what that was."""
        rounded = scale_producer(self.modules[pair.producer], pair, 1 / factors)
        inputs = pair.per_input(rounded)
        for name in pair.consumers:
            scale_inputs(self.modules[name], 1 / inputs)
        known: dict[int, SplitMoments] = {}
        for name in readers:
            old = self.inputs[name]
            self.inputs[name] = known.setdefault(id(old), old.scaled(inputs))
        if pair.producer in self.targets:
            part = self.parts[pair.producer]
            rows = torch.ones(_rows(self.modules[pair.producer]), dtype=torch.float64, device=rounded.device)
            rows[pair.first : pair.first + pair.count] = rounded
            part.rows = rows if part.rows is None else part.rows * rows

    def _error(self, name: str) -> float:
        """Rounding's error of a weight as it is now."""
        target, part = self.targets[name], self.parts[name]
        dense = dense_of(target)
        rounded = quantized_weight(dense, target.recipe, axis=target.axis, outer=part.outer)
        return output_error(
            dense, rounded.stored, self.inputs[name], target.recipe.activation, part.input_scales, part.rows
        )


def _ratio(error: float, before: float) -> float:
    """An error over the one before; NaN counts as worse."""
    if before == 0:
        return 1.0 if error == 0 else inf
    return error / before if error == error else inf


def _largest(values: torch.Tensor | None, pair: Pair) -> torch.Tensor:
    """By channel of the producer, the largest of its copies; ValueError where no token was seen."""
    if values is None:
        raise ValueError("no token was seen; run data through the layer")
    return pair.per_channel(values)


def _rows(module: nn.Module) -> int:
    """Outputs of a linear layer."""
    weight = module.get_parameter("weight")
    return int(weight.shape[-1 if type(module).__name__ == "Conv1D" else 0])


def smoothing_method(methods: Sequence[Method]) -> Method | None:
    """Smooth or AWQ, where one of them is asked for."""
    return next((method for method in methods if isinstance(method, (Smooth, AWQ))), None)
