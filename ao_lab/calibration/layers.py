"""What methods make of one weight (or a `Stack` of them) and the moments of its inputs, and which of it is taken.

Each step leaves a candidate: rounding to nearest, codes by searched scales, codes by GPTQ for these scales. They are compared
by the layer's output error on tokens that no method has read (`ao_lab.calibration.judge`), weight by weight; taken is the last
one, unless it is worse than rounding there, and then the best of those before. So no layer is worse than rounding on the
held-out tokens. Where there are none the tokens that the methods read decide, and the record says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

import fast
from ao_lab.calibration.groups import Stack, Target, with_packed_codes
from ao_lab.calibration.judge import output_error
from ao_lab.calibration.methods import (
    GPTQ,
    HELD_OUT,
    HQQ,
    BiasCorrection,
    Clip,
    LowRank,
    Method,
    Rotate,
    of_kind,
)
from ao_lab.calibration.result import LayerResult
from ao_lab.calibration.tokens import Moments, SplitMoments
from ao_lab.config.recipe import Recipe, changed_recipe
from ao_lab.tensor.chunked import quantized_weight
from ao_lab.tensor.quantized_tensor import QuantizedTensor, from_quantized
from ao_lab.transforms.low_rank import add_residual, residual_bits
from fast.calibration.damping import gptq_held_out
from reference import Quantized, Scales
from reference.calibration.residual import LowRank as Factors

ROUNDING = "rounding"
#: GPTQ's damping where no tokens are held out.
DAMPING = 0.01


@dataclass
class Part:
    """One weight of a stack."""

    #: Static scales of its inputs, or None.
    input_scales: Scales | None = None
    #: The outer scale that it shares with others, or None.
    outer: torch.Tensor | None = None
    #: By what its outputs are multiplied since a pair was smoothed, (N,), or None.
    rows: torch.Tensor | None = None
    #: Rounding's error before smoothing, or None.
    baseline: float | None = None
    #: What was done to it before, and what is to be said of it.
    before: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass
class Candidate:
    """What steps so far made of a stack: a quantized matrix for each weight."""

    name: str
    parts: list[Quantized]
    damping: float | None = None
    floor: float = 0.0


@dataclass
class Work:
    """One stack while methods are applied."""

    stack: Stack
    inputs: SplitMoments | None
    parts: list[Part]
    methods: Sequence[Method]
    #: Inputs of a block that is rotated; 0: none is.
    rotation: int = 0
    #: Whether the moments are needed by nobody else.
    last: bool = False
    #: Whether that holds of the products that methods read; what is held out judges afterwards.
    spent: bool = False
    w: torch.Tensor = field(init=False)
    scales: Scales | None = None
    candidates: list[Candidate] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stack.read()
        if self.rotation:
            turned = [fast.rotate(dense, self.rotation, dtype=torch.float32) for dense in self.stack.dense]
            self.stack.dense = turned
            self.inputs = None if self.inputs is None else self.inputs.rotated(self.rotation, self.last)
        self.w = self.stack.matrix()

    def recipe(self, index: int) -> Recipe:
        """How the layer of a weight is going to run."""
        recipe = self.stack.targets[index].recipe
        return changed_recipe(recipe, rotation=self.rotation) if self.rotation else recipe

    def add(self, name: str, q: Quantized, damping: float | None = None, floor: float = 0.0) -> None:
        """A candidate of one quantized matrix."""
        before = self.candidates[-1].name if self.candidates else ROUNDING
        path = name if before == ROUNDING else f"{before} + {name}"
        self.candidates.append(Candidate(path, self.stack.split_quantized(q), damping, floor))

    @property
    def outer(self) -> torch.Tensor | None:
        """The outer scale of a weight that is no part of a stack, where it shares one."""
        outer = self.parts[0].outer
        return None if outer is None else outer.to(self.w.device)

    @property
    def train(self) -> Moments | None:
        """What methods read."""
        return None if self.inputs is None else self.inputs.train

    def take_hessian(self) -> torch.Tensor:
        """The Hessian on the weight's device, for the last that reads it: nobody has it any more where nobody needs it."""
        assert self.inputs is not None
        hessian = self.inputs.train.hessian.to(self.w.device)
        if self.spent and of_kind(self.methods, LowRank) is None:
            self.inputs.train.value = None
        return hessian


Step = Callable[[Work, Any], None]


def clip(work: Work, method: Clip) -> None:
    """Searched scales, and codes rounded to nearest by them."""
    usual = 2.0 if of_kind(work.methods, GPTQ) is None else 3.0
    norm = usual if method.norm is None else method.norm
    work.scales = searched(work, work.train if method.weights == "inputs" else None, norm)
    work.add("clip", fast.quantize(work.w, work.stack.scheme, scales=work.scales))


def searched(work: Work, moments: Moments | None, norm: float) -> Scales:
    """Scales of least error, columns weighted by the mean square of their inputs where there are moments."""
    weights = None if moments is None else moments.mean_squares.to(work.w.device)
    return fast.search_scales(work.w, work.stack.scheme, weights=weights, norm=norm, outer=work.outer)


def gptq(work: Work, method: GPTQ) -> None:
    """Codes by GPTQ, for the scales so far, or searched ones."""
    if work.inputs is None:
        return
    train, held, scheme = work.inputs.train, work.inputs.held_out, work.stack.scheme
    scales = work.scales = work.scales or searched(work, train, 3.0)
    damping, device = method.damping, work.w.device
    if damping == HELD_OUT and held.count:
        result = gptq_held_out(
            work.w, work.take_hessian, held.hessian.to(device), scheme, scales=scales, order=method.order
        )
    else:
        if damping == HELD_OUT:
            damping = DAMPING
            work.notes.append("no tokens are held out to choose damping by")
        hessian = train.hessian.to(device)
        result = fast.gptq(work.w, hessian, scheme, scales=scales, order=method.order, damping=float(damping))
    work.add("gptq", result.quantized, float(result.damping), float(result.floor))


def hqq(work: Work, method: HQQ) -> None:
    """Zero points or scales by half-quadratic splitting."""
    if work.outer is not None:
        work.notes.append("hqq chooses an outer scale of its own, which joined layers cannot have")
        return
    q = fast.hqq(work.w, work.stack.scheme, steps=method.steps, p=method.p, beta=method.beta)
    work.scales = q.scales
    work.add("hqq", q)


STEPS: dict[type[Method], Step] = {Clip: clip, HQQ: hqq, GPTQ: gptq}


class Calibrated(NamedTuple):
    """A weight, what was won, and what is to be added to its layer's bias (N,), or None."""

    weight: QuantizedTensor
    result: LayerResult
    bias: torch.Tensor | None = None
    #: Whether its scales and codes are those of rounding to nearest.
    rounded: bool = False
    #: The low-rank residual of its layer, or None.
    residual: Factors | None = None

    def noting(self, note: str) -> Calibrated:
        """With one more note."""
        return self._replace(result=replace(self.result, notes=(*self.result.notes, note)))


class Placing(NamedTuple):
    """A quantized weight, and the bias and the residual that belong to it, on their way into the model."""

    target: Target
    weight: nn.Parameter
    bias: torch.Tensor | None
    residual: Factors | None

    @classmethod
    def of(cls, target: Target, calibrated: Calibrated) -> Placing:
        """What is to be placed of a calibrated weight."""
        weight = calibrated.weight.transposed() if target.transposed else calibrated.weight
        bias = calibrated.bias
        if bias is not None:
            layer = next(iter(target.layers.values()))
            bias = layer.get_parameter("bias").detach().to(torch.float64) + bias
        return cls(target, nn.Parameter(weight, requires_grad=False), bias, calibrated.residual)

    def place(self) -> None:
        """All in their places; a second time changes nothing."""
        self.target.put(self.weight)
        layer: Any = next(iter(self.target.layers.values()), None)
        if self.bias is not None:
            layer.get_parameter("bias").data.copy_(self.bias)
        if self.residual is not None:
            add_residual(layer, self.residual)


def quantized(work: Work) -> list[Calibrated]:
    """Each weight of a stack, quantized by the best of what methods make of it."""
    rounded = [
        quantized_weight(dense, work.recipe(index), axis=-1, input_scales=part.input_scales, outer=part.outer)
        for index, (dense, part) in enumerate(zip(work.stack.dense, work.parts, strict=True))
    ]
    work.candidates.append(Candidate(ROUNDING, [one.stored for one in rounded]))
    for method in work.methods:
        if type(method) in STEPS:
            STEPS[type(method)](work, method)
    return [_chosen(work, index, one) for index, one in enumerate(rounded)]


def quantized_either_way(work: Work, rotate: Rotate | None) -> list[Calibrated]:
    """Each weight of a stack, rotated or as it is, whichever has the smaller error."""
    work.spent = work.spent and rotate is None
    plain = quantized(work)
    if rotate is None:
        return plain
    length = rotate.length(work.stack.scheme, work.w.shape[1])
    if length is None or any(part.outer is not None or part.input_scales is not None for part in work.parts):
        why = (
            "its inputs divide into no blocks" if length is None else "its scales are not its own, or static"
        )
        return [one.noting(f"not rotated: {why}") for one in plain]
    parts = [
        replace(part, baseline=one.result.rounding, before=(*part.before, rotate.name))
        for part, one in zip(work.parts, plain, strict=True)
    ]
    turned = quantized(
        Work(Stack(work.stack.targets), work.inputs, parts, work.methods, length, work.last, True)
    )
    return [_better(one, other) for one, other in zip(plain, turned, strict=True)]


def _better(plain: Calibrated, turned: Calibrated) -> Calibrated:
    """The one of less error; as it is where both have the same."""
    if turned.result.error < plain.result.error:
        return turned
    return plain.noting(f"{turned.result.method} would have {turned.result.ratio:.3f} and was not used")


def _chosen(work: Work, index: int, rounded: QuantizedTensor) -> Calibrated:
    """One weight by its best candidate, the later of two that are alike."""
    target, part = work.stack.targets[index], work.parts[index]
    errors = [
        output_error(
            work.stack.dense[index], one.parts[index], work.inputs, target.recipe.activation, part.input_scales, part.rows
        )
        for one in work.candidates
    ]  # fmt: skip
    base, last = errors[0] if part.baseline is None else part.baseline, len(errors) - 1
    best = last if errors[last] <= errors[0] else min(range(last), key=lambda i: (errors[i], -i))
    candidate, notes = work.candidates[best], [*part.notes, *work.notes]
    if best != last:
        share = errors[last] / base if base else float("inf")
        name = work.candidates[last].name
        notes.append(f"{name} would have {share:.3f} of rounding's error and was not used")
    inputs = work.inputs
    counts = (0, 0) if inputs is None else (inputs.train.seen, inputs.held_out.seen)
    names = [*part.before, *([] if part.before and candidate.name == ROUNDING else [candidate.name])]
    result = LayerResult(
        " + ".join(names), errors[best], base, *counts, candidate.damping, candidate.floor, tuple(notes)
    )
    shift, dtype, q = None, target.parameter.dtype, candidate.parts[index]
    result, residual = _with_residual(work, index, q, result)
    if of_kind(work.methods, BiasCorrection) is not None:
        result, shift = _corrected(work, index, q, result, residual)
    if best == 0:
        weight = rounded if rounded.dtype == dtype else rounded.remade(rounded.parts, dtype=dtype)
        return Calibrated(weight, result, shift, True, residual)
    weight = from_quantized(with_packed_codes(q), work.recipe(index), dtype, part.input_scales)
    return Calibrated(weight, result, shift, False, residual)


def _with_residual(
    work: Work, index: int, q: Quantized, result: LayerResult
) -> tuple[LayerResult, Factors | None]:
    """The result with a low-rank residual of a quantized matrix, and its factors as they stand beside the layer; None where
    none is asked for, or possible, or nothing is won."""
    method: LowRank | None = of_kind(work.methods, LowRank)
    if method is None:
        return result, None
    target, dense = work.stack.targets[index], work.stack.dense[index]
    if (reason := no_residual(target, method.rank, work.inputs)) is not None:
        return replace(result, notes=(*result.notes, f"no residual: {reason}")), None
    assert work.inputs is not None
    dtype = getattr(torch, method.dtype)
    found = fast.low_rank_residual(
        dense, q, work.inputs.train.hessian.to(dense.device), method.rank, dtype=dtype
    )
    factors = Factors(found.left, _turned(found.right, work.rotation))
    part = work.parts[index]
    error = output_error(
        _less(work, dense, factors), q, work.inputs, target.recipe.activation, part.input_scales, part.rows
    )
    if not error <= result.error:
        return replace(result, notes=(*result.notes, "a residual would be worse")), None
    bits = residual_bits(method.rank, tuple(dense.shape), dtype.itemsize)
    note = f"residual of rank {method.rank}: {bits:.3g} more bits a weight"
    name = f"{result.method} + {method.name}"
    return replace(result, method=name, error=error, notes=(note, *result.notes)), factors


def no_residual(target: Target, rank: int, inputs: SplitMoments | None) -> str | None:
    """Why a layer can have no residual of a rank; None where it can."""
    layers = list(target.layers.values())
    if len(layers) != 1 or len(target.places) != 1 or type(layers[0]) is not nn.Linear:
        return "it is for the weight of one nn.Linear"
    rows, columns = target.parameter.shape
    if rank * (rows + columns) >= rows * columns:
        return f"its factors of rank {rank} would have no fewer elements than the {rows} x {columns} weight"
    return "no data to weigh errors by" if inputs is None else None


def _turned(right: torch.Tensor, length: int) -> torch.Tensor:
    """The factor for inputs as they come, of that for inputs in rotated blocks."""
    turned: torch.Tensor = fast.rotate(right, length, inverse=True) if length else right
    return turned


def _less(work: Work, dense: torch.Tensor, factors: Factors | None) -> torch.Tensor:
    """A weight without what its residual stands for, in float64: what is left for the quantized matrix to be."""
    if factors is None:
        return dense
    right = factors.right.to(torch.float32)
    right = fast.rotate(right, work.rotation, dtype=torch.float32) if work.rotation else right
    rest: torch.Tensor = dense.to(torch.float64) - factors.left.to(torch.float64) @ right.to(torch.float64)
    return rest


def _corrected(
    work: Work, index: int, q: Quantized, result: LayerResult, residual: Factors | None = None
) -> tuple[LayerResult, torch.Tensor | None]:
    """The result with a corrected bias, and what is added to that; None where there is no bias, or nothing is won."""
    target, inputs = work.stack.targets[index], work.inputs
    dense = _less(work, work.stack.dense[index], residual)
    layers = list(target.layers.values())
    bias = layers[0]._parameters.get("bias") if len(layers) == 1 else None
    if bias is None or inputs is None:
        note = (
            "it has no bias of its own to correct" if inputs is not None else "no data to correct a bias by"
        )
        return replace(result, notes=(*result.notes, note)), None
    shift = fast.correct_bias(dense, q, inputs.train.mean.to(dense.device)).to(torch.float64)
    # As it will be: what the bias' dtype takes of it.
    shift = (bias.detach().to(torch.float64) + shift).to(bias.dtype).to(torch.float64) - bias.detach().to(
        torch.float64
    )
    part = work.parts[index]
    error = output_error(
        dense, q, inputs, target.recipe.activation, part.input_scales, part.rows, shift=shift
    )
    if not error <= result.error:
        return replace(result, notes=(*result.notes, "a corrected bias would be worse")), None
    return replace(result, method=f"{result.method} + bias", error=error), shift
