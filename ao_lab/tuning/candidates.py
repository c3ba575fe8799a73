"""The candidates of a layer, measured: functions for each product, and which products of a training step stay dense."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from numbers import Real

import torch

from ao_lab.gemm import select
from ao_lab.gemm.choices import SUBSETS, Candidate, Choice, Problem, problem_of
from ao_lab.gemm.dense import most_fused_rows
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.training.autograd import prepare, training_linear
from ao_lab.training.grouped.autograd import grouped_linear
from ao_lab.training.products import PRODUCTS as TRAINING
from ao_lab.training.products import has_fp8, product
from ao_lab.tuning.experts import GroupedProduct, products_of
from ao_lab.tuning.measure import (
    ERROR_ROWS,
    FIRST_DROP,
    LAUNCHES,
    Call,
    Pair,
    exact_product,
    pairs_of,
    relative_error,
    timings,
)
from ao_lab.tuning.samples import ExpertsSample, Sample, ServingSample, TrainingSample
from fast.gemm.families import FAMILIES
from reference.arrays.namespace import choice
from reference.training.recipe import PRODUCTS, Recipe

# Which of the measured candidates is chosen.

#: A candidate replaces the default only where it is quicker by this share: less is noise.
MARGIN = 0.02
#: The same for what of a training layer is dense: its bar is the time of the dense layer, so little is left to noise.
TRAINING_MARGIN = 0.005


@dataclass(frozen=True)
class Limits:
    """What bounds a choice, see `tune`. every: candidates are all timed, slow ones too, as a sum over layers may need them."""

    error: float | None = None
    time: float | None = None
    launches: str = "eager"
    every: bool = False

    def __post_init__(self) -> None:
        if self.error is not None and not (_is_number(self.error) and self.error > 0):
            raise ValueError(f"error_budget is a positive number or None, got {self.error!r}")
        if self.time is not None and not (_is_number(self.time) and self.time >= 1):
            raise ValueError(
                f"time_budget is a factor of the fastest time, 1 or more, or None; got {self.time!r}"
            )
        choice(self.launches, LAUNCHES, "launches")

    @property
    def slowest(self) -> float:
        """How many times the quickest one's time a candidate may take and is still timed: no less than the budget allows."""
        return inf if self.every else max(FIRST_DROP, float(self.time or 0.0))


def _is_number(value: object) -> bool:
    return isinstance(value, Real)


def measured(
    calls: Mapping[str, Call],
    errors: Callable[[str], float],
    refused: Mapping[str, str],
    device: torch.device,
    limits: Limits,
) -> tuple[Candidate, ...]:
    """A candidate of each call, the default first, then of each function that was refused, with its reason.

    errors: of the result of a call, by its name.
    """
    result = []
    times = timings(calls, device, limits.launches, limits.slowest)
    for name in (*calls, *refused):
        if name in refused:
            result.append(Candidate(name, reason=refused[name]))
            continue
        taken = times[name]
        error = errors(name)
        if isinstance(taken, str):
            result.append(Candidate(name, error=error, reason=taken))
        else:
            result.append(Candidate(name, taken.seconds, taken.spread, error, host=taken.host, gpu=taken.gpu))
    return tuple(result)


def best(candidates: Sequence[Candidate], limits: Limits, margin: float = MARGIN) -> str | None:
    """The choice among candidates, the default first; None where none is within the error budget.

    Without a time budget the quickest, but the default where that is slower by no more than `margin`. With one, the smallest
    error among those that take at most `limits.time` times as long as the quickest.
    """
    able = _within(candidates, limits.error)
    if not able:
        return None
    quickest = min(seconds(c) for c in able)
    if limits.time is not None:
        affordable = [c for c in able if seconds(c) <= quickest * limits.time]
        return min(affordable, key=lambda c: (c.error or 0.0, seconds(c))).kernel
    if seconds(able[0]) <= quickest * (1 + margin):
        return able[0].kernel
    return min(able, key=seconds).kernel


def _within(candidates: Sequence[Candidate], error: float | None) -> list[Candidate]:
    return [c for c in candidates if c.seconds is not None and (error is None or (c.error or 0.0) <= error)]


def seconds(candidate: Candidate) -> float:
    """Its time; of one that was measured."""
    return candidate.seconds or 0.0


#: The function that takes everything, and is never the quickest where another one does.
EMULATION = "emulate"


def choices_of(sample: Sample, limits: Limits) -> Iterator[Choice]:
    """The choices of a layer. Each is to be in the device's table before the next is asked for: a step is timed with them."""
    if isinstance(sample, ServingSample):
        yield serving_choice(sample, limits)
        return
    result = []
    for one in _product_choices(sample, limits):
        result.append(one)
        yield one
    if sample.g is not None:
        yield training_choice(sample, result, limits)


def _product_choices(sample: TrainingSample | ExpertsSample, limits: Limits) -> Iterator[Choice]:
    if isinstance(sample, ExpertsSample):
        yield from (grouped_choice(one, sample.x.device, limits) for one in products_of(sample))
    else:
        yield from (product_choice(pair, limits) for pair in pairs_of(sample))


def grouped_choice(one: GroupedProduct, device: torch.device, limits: Limits) -> Choice:
    """The function for one product of experts."""
    calls: dict[str, Call] = dict(one.calls)
    errors = _errors(calls, one.exact, one.part)
    return _quickest(one.problem, measured(calls, errors, one.refused, device, limits), limits)


def product_choice(pair: Pair, limits: Limits) -> Choice:
    """The function for one product of a training step."""
    reasons = {name: one.unsupported_reason(pair.a, pair.b) for name, one in TRAINING.items()}
    if any(reason is None for name, reason in reasons.items() if name != EMULATION):
        reasons[EMULATION] = "float32 of the same operands is for devices where no other kernel supports them"

    def call_of(name: str) -> Call:
        return lambda: product(pair.problem.direction, pair.a, pair.b, pair.record, pair.dtype, kernel=name)

    calls = {name: call_of(name) for name, reason in reasons.items() if reason is None}
    errors = _errors(calls, lambda: exact_product(pair.dense_a[:ERROR_ROWS], pair.dense_b))
    refused = {name: reason for name, reason in reasons.items() if reason is not None}
    return _quickest(pair.problem, measured(calls, errors, refused, pair.dense_a.device, limits), limits)


def _quickest(problem: Problem, found: tuple[Candidate, ...], limits: Limits) -> Choice:
    """The best within the budgets, else the best: `training_choice` makes a product dense that is not within."""
    unlimited = Limits(launches=limits.launches)
    return Choice(problem, best(found, limits) or best(found, unlimited) or found[0].kernel, found)


def training_choice(sample: TrainingSample | ExpertsSample, products: list[Choice], limits: Limits) -> Choice:
    """Which products of a layer run in low precision, by the time of its forward and backward, casts included.

    Candidates are all products that the error budget allows, and every subset of them down to none. Where they are emulated
    that is done for the numbers, not for the time: all that the budget allows. So it is for experts in another dtype than
    bfloat16, the one in which GPUs multiply groups of dense operands.
    """
    allowed = {
        c.problem.direction: c.candidate.error or 0.0
        for c in products
        if limits.error is None or (c.candidate.error or 0.0) <= limits.error
    }
    names = [name for name in SUBSETS if set(_low(name)) <= set(allowed)]
    experts = sample.w.shape[0] if isinstance(sample, ExpertsSample) else 0
    is_timed = has_fp8(sample.x.device) and (not experts or sample.x.dtype == torch.bfloat16)
    names = names if is_timed else names[:1]
    cut = prepare(sample.recipe)
    x, w = (t.detach().clone().requires_grad_() for t in (sample.x, sample.w))
    calls = {name: _step(sample, x, w, cut[name]) for name in names}

    def error_of(name: str) -> float:
        return max((allowed[low] for low in _low(name)), default=0.0)

    result = measured(calls, error_of, {}, sample.x.device, limits)
    (m, k), n = tuple(sample.x.shape), sample.w.shape[-2]
    problem = problem_of("training", sample.recipe.key, "", (m, n, k), sample.x.dtype, "", experts)
    return Choice(problem, best(result, limits, TRAINING_MARGIN) or names[0], result)


def _low(name: str) -> list[str]:
    """The products that a candidate for "training" runs in low precision."""
    return [product for product in name.split("+") if product in PRODUCTS]


def _step(sample: TrainingSample | ExpertsSample, x: torch.Tensor, w: torch.Tensor, recipe: Recipe) -> Call:
    """A forward and a backward of a layer's products."""

    def step() -> object:
        with torch.enable_grad():
            if isinstance(sample, ExpertsSample):
                y = grouped_linear(x, w, sample.offsets, recipe, tuned=False)
            else:
                y = training_linear(x, w, None, recipe, tuned=False)
        return torch.autograd.grad(y, (x, w), sample.g)

    return step


def serving_choice(sample: ServingSample, limits: Limits) -> Choice:
    """The function for the product of a layer with a quantized weight, its input's cast included."""
    x, w = sample.x, sample.w.transposed()
    names = select.candidates(w, x.dtype, x.shape[0])
    reasons = {name: _serving_reason(one, w, x) for name, one in names.items()}

    def call_of(name: str) -> Call:
        return lambda: select.runner(names[name])(x, w, None)

    calls = {name: call_of(name) for name, reason in reasons.items() if reason is None}
    errors = _errors(calls, lambda: x[:ERROR_ROWS].double() @ w.dequantize(torch.float32).double())
    refused = {name: reason for name, reason in reasons.items() if reason is not None}
    with torch.no_grad():
        result = measured(calls, errors, refused, x.device, limits)
    result = tuple(replace(c, most_rows=_most_rows(names[c.kernel], w, x)) for c in result)
    shape = (x.shape[0], w.shape[1], w.shape[0])
    problem = problem_of("inference", *select.inference_keys(w), shape, x.dtype)
    chosen = best(result, limits, MARGIN)
    return Choice(problem, chosen or min(result[: len(calls)], key=lambda c: c.error or 0.0).kernel, result)


def _serving_reason(one: select.Selected, w: QuantizedTensor, x: torch.Tensor) -> str | None:
    """Why a function is no candidate for a weight (K, N) and an input; None where it is."""
    name = one.kernel
    if name == "reference":
        return "it runs on the host, for recipes that name it"
    if name == "fused" and _is_beyond_fused(w, x):
        return f"for more than {most_fused_rows(w, x.dtype)} tokens it uses dequantize"
    reason = select.PRODUCTS[name].unsupported_reason(w, x.dtype)
    if reason is not None or not one.family:
        return reason
    p = select.problem_of(w, x.dtype, x.shape[0])
    if FAMILIES[one.family].refusal(p) is None:
        select.runner(one)(x, w, None)  # loads it
    return FAMILIES[one.family].refusal(p) or FAMILIES[one.family].failure(p, w.codes.get_device())


def _most_rows(one: select.Selected, w: QuantizedTensor, x: torch.Tensor) -> int | None:
    """The most rows that a candidate takes, where these are more."""
    if one.family:
        most = max(
            takes.rows for takes in FAMILIES[one.family].takes if not takes.experts and takes.products == 1
        )
        return most if x.shape[0] > most else None
    return most_fused_rows(w, x.dtype) if one.kernel == "fused" and _is_beyond_fused(w, x) else None


def _is_beyond_fused(w: QuantizedTensor, x: torch.Tensor) -> bool:
    """Whether "fused" takes a weight (K, N), and fewer rows than these."""
    able = select.PRODUCTS["fused"].unsupported_reason(w, x.dtype) is None
    return able and x.shape[0] > most_fused_rows(w, x.dtype)


def _errors(
    calls: dict[str, Call],
    exact: Callable[[], torch.Tensor],
    part: Callable[[torch.Tensor], torch.Tensor] = lambda y: y[:ERROR_ROWS],
) -> Callable[[str], float]:
    """What gives the error of each call's first rows; the exact product is computed once, when it is asked for."""
    kept: list[torch.Tensor] = []

    def error_of(name: str) -> float:
        if not kept:
            kept.append(exact())
        result = calls[name]()
        if not isinstance(result, torch.Tensor):
            raise TypeError(f"{name} gives {type(result).__name__}, not a tensor")
        return relative_error(part(result), kept[0])

    return error_of


__all__ = [
    "Limits",
    "best",
    "choices_of",
    "grouped_choice",
    "measured",
    "product_choice",
    "serving_choice",
    "training_choice",
]
