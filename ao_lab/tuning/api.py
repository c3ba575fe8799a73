"""`tune`: measures, for every layer of a model that trains in low precision, what its products take on this device.

Two things are chosen. For each product (output, input gradient, weight gradient) the function that computes it; then for the
layer which of its products run in low precision at all: casts may cost more than a small product gains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import nn

from ao_lab.gemm.choices import Candidate, Choice, Problem, choices_for, path_of, rows_range, save
from ao_lab.quantization.modules import check_model
from ao_lab.training.autograd import training_linear
from ao_lab.training.products import PRODUCTS as KERNELS
from ao_lab.training.products import has_fp8, product
from ao_lab.training.restricted import DENSE, restricted
from ao_lab.tuning.measure import exact_product, relative_error, release, seconds_of
from ao_lab.tuning.operands import Pair, pairs_of
from ao_lab.tuning.samples import Sample, SampleInput, record
from reference.schemes.record_text import record_of
from reference.training.recipe import PRODUCTS, Recipe

#: Told of each problem when it is measured: its layer, how many are, of how many.
Progress = Callable[[str, int, int], None]
#: A candidate replaces the default only where it is quicker by this share: less is noise.
MARGIN = 0.02
#: Rows of an operand that errors are measured on.
ERROR_ROWS = 256


@dataclass(frozen=True)
class Tuned:
    """What `tune` chose, and the file that holds it ("" where it was not saved)."""

    choices: tuple[Choice, ...]
    path: str = ""

    def __str__(self) -> str:
        lines = [f"{len(self.choices)} products tuned{f', saved in {self.path}' if self.path else ''}"]
        for choice in self.choices:
            p, best = choice.problem, next(c for c in choice.candidates if c.kernel == choice.kernel)
            kinds = " x ".join(scheme_name(key) for key in (p.a, p.b) if key)
            what = f"{p.direction:<11} N={p.n} K={p.k} M<={p.rows} {kinds}"
            took = (
                "not measured"
                if best.seconds is None
                else f"{best.seconds * 1e6:.1f} us, error {best.error:.2e}"
            )
            lines.append(f"  {what}: {choice.kernel} ({took}; of {len(choice.candidates)})")
        return "\n".join(lines)


def scheme_name(key: str) -> str:
    """The name of the scheme with a key; a recipe's name stays."""
    return record_of(key).name if key.startswith("{") else key


def tune(
    model: nn.Module,
    sample_input: SampleInput,
    *,
    error_budget: float | None = None,
    save_choices: bool = True,
    progress: Progress | None = None,
) -> Tuned:
    """Measure the products of a model's layers on this device, and choose; layers follow at once, and after a restart.

    sample_input: a tensor, a tuple or mapping of arguments, or a function of the model that returns a loss: of the sizes that
    training will see (a choice holds for rows up to the next power of two). error_budget: the largest error of a product, the
    norm of its difference over the exact product's norm; None: time alone decides. Candidates beyond it are not chosen; where
    all are, the product stays dense. save_choices: for later processes, per GPU and library versions (`ao_lab.gemm.choices`).
    With torch.distributed every rank gets rank 0's choices. Parameters, gradients and random generators are unchanged.
    Raises ValueError where no layer trains in low precision, for an error_budget that is not positive, and inside
    torch.compile or a CUDA graph's capture.
    """
    check_model(model)
    if torch.compiler.is_compiling() or (
        torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    ):
        raise ValueError("tune measures, which cannot be compiled or captured; call it before")
    if error_budget is not None and not error_budget > 0:
        raise ValueError(f"error_budget is a positive number or None, got {error_budget!r}")
    samples = distinct(record(model, sample_input))
    made: list[Choice] = []
    for done, sample in enumerate(samples, 1):
        made += choose(sample, error_budget)
        if progress is not None:
            progress(sample.name, done, len(samples))
    release()
    return publish(made, samples[0].x.device, save_choices)


def distinct(samples: Iterable[Sample]) -> list[Sample]:
    """One sample of each layer shape, recipe, range of rows and dtype."""
    found: dict[object, Sample] = {}
    for sample in samples:
        recipe = sample.layer.low_precision.recipe
        key = (recipe, tuple(sample.w.shape), rows_range(sample.x.shape[0]), sample.x.dtype, sample.g is None)
        found.setdefault(key, sample)
    return list(found.values())


def choose(sample: Sample, budget: float | None) -> list[Choice]:
    """The choices of one layer: its products first, as the layer is timed with them."""
    made = []
    for pair in pairs_of(sample):
        made.append(choose_product(pair, budget))
        choices_for(sample.x.device).add(made[-1])
    if sample.g is not None:
        made.append(choose_training(sample, made, budget))
        choices_for(sample.x.device).add(made[-1])
    return made


def choose_product(pair: Pair, budget: float | None) -> Choice:
    """The function for one product."""
    problem = pair.problem
    candidates = [_measured(name, pair) for name in KERNELS]
    return Choice(
        problem,
        best(candidates, budget) or best(candidates, None) or candidates[-1].kernel,
        tuple(candidates),
    )


def _measured(name: str, pair: Pair) -> Candidate:
    reason = KERNELS[name].unsupported_reason(pair.a, pair.b)
    if reason is not None:
        return Candidate(name, reason=reason)

    def call() -> torch.Tensor:
        return product(pair.problem.direction, pair.a, pair.b, pair.record, pair.dtype, kernel=name)

    found = call()[:ERROR_ROWS]
    error = relative_error(found, exact_product(pair.dense_a[:ERROR_ROWS], pair.dense_b))
    seconds, spread = seconds_of(call, pair.dense_a.device)
    return Candidate(name, seconds, spread, error)


def best(candidates: Sequence[Candidate], budget: float | None) -> str | None:
    """The quickest within the budget; the first of them where it is slower by no more than `MARGIN`. None where none is."""
    able = [c for c in candidates if c.seconds is not None and (budget is None or (c.error or 0.0) <= budget)]
    if not able:
        return None
    quickest = min(able, key=lambda c: c.seconds or 0.0)
    first = able[0]
    return (
        first.kernel
        if (first.seconds or 0.0) <= (quickest.seconds or 0.0) * (1 + MARGIN)
        else quickest.kernel
    )


def choose_training(sample: Sample, products: Sequence[Choice], budget: float | None) -> Choice:
    """Which products of a layer run in low precision, by the time of a forward and a backward.

    All that the budget allows where they are emulated: that is done for the numbers, not for the time.
    """
    recipe = sample.layer.low_precision.recipe
    within = {c.problem.direction: _error(c) for c in products if budget is None or _error(c) <= budget}
    low = [name for name in PRODUCTS if name in within]
    fewest = 0 if has_fp8(sample.x.device) else len(low)
    sets = [subset for count in range(len(low), fewest - 1, -1) for subset in combinations(low, count)]
    candidates = []
    for subset in sets:
        seconds, spread = seconds_of(_step(sample, restricted(recipe, subset)), sample.x.device)
        error = max((within[name] for name in subset), default=0.0)
        candidates.append(Candidate("+".join(subset) or DENSE, seconds, spread, error))
    (m, k), n = tuple(sample.x.shape), sample.w.shape[0]
    problem = Problem("training", recipe.name, "", n, k, rows_range(m), str(sample.x.dtype))
    return Choice(problem, best(candidates, None) or DENSE, tuple(candidates))


def _error(choice: Choice) -> float:
    """The error of the function that was chosen."""
    return next(c.error or 0.0 for c in choice.candidates if c.kernel == choice.kernel)


def _step(sample: Sample, recipe: Recipe) -> Callable[[], object]:
    """A forward and a backward of a layer's products."""
    x = sample.x.clone().requires_grad_()
    w = sample.w.clone().requires_grad_()
    g = sample.g

    def step() -> None:
        training_linear(x, w, None, recipe, tuned=False).backward(g)  # type: ignore[no-untyped-call]
        x.grad = w.grad = None

    return step


def publish(made: Sequence[Choice], device: torch.device, keep: bool) -> Tuned:
    """Rank 0's choices on all ranks, saved by it."""
    rank = 0
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, box = torch.distributed.get_rank(), [list(made)]
        torch.distributed.broadcast_object_list(box, src=0)
        made = box[0]
    choices = choices_for(device)
    for choice in made:
        choices.add(choice)
    path = path_of(device)
    if keep and rank == 0:
        save(choices, path)
    return Tuned(tuple(made), str(path) if keep else "")


__all__ = ["Tuned", "tune"]
