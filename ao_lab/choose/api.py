"""`choose_`: which configuration each layer gets under a budget, by one pass over data, measured before it is returned.

Each layer and option has a score (`ao_lab.choose.scores`) and a cost (`ao_lab.choose.budgets`); `reference.allocate` finds
the choice of the least sum of scores within the budget. That scores add up is an assumption, so the choice is measured
(`ao_lab.choose.trials`): its KL divergence from the model as it is, on data that gave no score, beside that of each option for
all layers and of settings that a caller gives. Taken is the smallest divergence within the budget, so the result is never
worse, on these data, than one option for all.

The model is as before afterwards, the very parameters in their places: quantized weights are in it while data run, one setting
after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch import nn

from ao_lab.choose.budgets import Bits, Budget, Bytes, Microseconds
from ao_lab.choose.items import Candidates, Groups, checked_candidates, checked_options, items_of
from ao_lab.choose.result import Choice
from ao_lab.choose.trials import Job
from ao_lab.config.base import kind_of
from ao_lab.transforms.data import Call, calibrating, calls_of
from ao_lab.transforms.layers import check_model
from ao_lab.transforms.plan import Filter, Progress

FISHER = "fisher"
#: One of so many batches is held out to measure by.
SHARE = 4


@overload
def choose_(
    model: nn.Module, calibration: Iterable[Any], options: Mapping[str, Any], budget: Budget, *,
    filter_fn: Filter | None = None, score: str | Choice = FISHER, groups: Groups | None = None,
    measure: Iterable[Any] | None = None, candidates: Candidates | None = None, seed: int = 0,
    progress: Progress | None = None,
) -> Choice: ...  # fmt: skip


@overload
def choose_(
    model: nn.Module, calibration: Iterable[Any], options: Mapping[str, Any], budget: Sequence[Budget], *,
    filter_fn: Filter | None = None, score: str | Choice = FISHER, groups: Groups | None = None,
    measure: Iterable[Any] | None = None, candidates: Candidates | None = None, seed: int = 0,
    progress: Progress | None = None,
) -> tuple[Choice, ...]: ...  # fmt: skip


def choose_(
    model: nn.Module,
    calibration: Iterable[Any],
    options: Mapping[str, Any],
    budget: Budget | Sequence[Budget],
    *,
    filter_fn: Filter | None = None,
    score: str | Choice = FISHER,
    groups: Groups | None = None,
    measure: Iterable[Any] | None = None,
    candidates: Candidates | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Choice | tuple[Choice, ...]:
    """Mixed precision: choose one of `options` for each layer, so that the model's predictions change least within a budget.

    calibration: batches as for `quantize_`. options: configurations by name, or pairs (configuration, methods) with the same
    methods in each, which then quantize a copy of the model per option; None leaves layers unquantized. budget: `Bits(4.25)`
    (average stored bits per parameter), `Bytes(n)` or `Microseconds(t, rows=1)`, each for the selected layers only; or several
    of them, which share the pass over the data, the quantized weights and the measurements. filter_fn: selects layers, as for
    `quantize_`. score: "fisher", or an earlier `Choice` of the same model and options, whose scores are reused: another budget
    without another pass. groups: which layers share one option: labels by the full name of a weight, or a function of it; None
    ties layers that servers merge into one matrix and those of one parent that read the same tensor; {} ties none. measure:
    batches for evaluation; None holds out every fourth batch of the calibration data, or of a single batch's sequences.
    candidates: your own assignments by name, which are measured too and chosen if they are best, regardless of groups: each
    gives the option of a weight by its full name, as a mapping or a function. seed: of labels sampled from the model.
    progress(what, done, total) is called after each batch.

    The result's `plan` is a configuration for `quantize_`; several budgets give a tuple of results. The model is unchanged, bit
    for bit.

    Raises ValueError without batches, for options that apply to no layer, a budget out of the range of the options, layers that
    data do not reach, gradients that are not finite, groups without a common option, candidates with an option that a layer
    does not have, and unknown names of weights in either; TypeError for other kinds of arguments.
    """
    configs, methods = checked_options(options)
    budgets = _checked_budgets(budget)
    if score != FISHER and not isinstance(score, Choice):
        raise ValueError(f"score is {FISHER!r} or an earlier Choice, got {score!r:.60}")
    check_model(model)
    calls = list(calls_of(calibration))
    if not calls:
        raise ValueError("calibration has no batch; a generator that has run before is empty, give a list")
    held, notes = list(calls_of(measure)) if measure is not None else [], []
    if measure is not None and not held:
        raise ValueError("measure has no batch; leave it out to hold out some of calibration")
    if measure is None:
        calls, held, note = split(calls)
        notes.append(note)
    items = items_of(model, configs, filter_fn)
    by_hand = checked_candidates(items, candidates, configs)
    job = Job(model, items, tuple(configs), budgets, by_hand, progress, len(calls) + len(held))
    job.check_ranges(range(len(items)))
    if methods:
        job.weights.calibrate(model, configs, [kwargs or args for args, kwargs in calls], methods)
    with calibrating(model), frozen(model):
        if isinstance(score, Choice):
            job.take_scores(score)
        else:
            job.compute_scores(calls, seed, groups)
        job.choose(held)
    choices = job.results(configs, methods, notes)
    return choices if isinstance(budget, Sequence) else choices[0]


def _checked_budgets(budget: object) -> tuple[Budget, ...]:
    budgets = tuple(budget) if isinstance(budget, Sequence) and not isinstance(budget, str) else (budget,)
    for one in budgets:
        if not isinstance(one, (Bits, Bytes, Microseconds)):
            raise TypeError(
                f"budget is Bits(4.25), Bytes(n) or Microseconds(t, rows=1), or several of them, got {kind_of(one)}"
            )
    if not budgets:
        raise ValueError("budget has no element; give Bits(4.25), for instance")
    return budgets


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No parameter asks for a gradient inside."""
    asking = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in asking:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in asking:
            parameter.requires_grad_(True)


def split(calls: list[Call]) -> tuple[list[Call], list[Call], str]:
    """Batches for scores and batches to measure by, and what is to be said of them."""
    if len(calls) > 1:
        count = max(len(calls) // SHARE, 1)
        places = {len(calls) - 1 - i * len(calls) // count for i in range(count)}
        rest = [call for i, call in enumerate(calls) if i not in places]
        return (
            rest,
            [calls[i] for i in sorted(places)],
            f"measured on {count} of {len(calls)} batches, which gave no score",
        )
    size = _sequences(calls[0])
    if size < 2:
        return calls, calls, "measured on the batch that gave the scores: it is a single sequence, give more"
    cut = size - max(size // SHARE, 1)
    first, last = (_part(calls[0], slice(0, cut)), _part(calls[0], slice(cut, size)))
    return [first], [last], f"measured on {size - cut} of {size} sequences, which gave no score"


def _tensors(call: Call) -> list[torch.Tensor]:
    return [x for x in (*call[0], *call[1].values()) if isinstance(x, torch.Tensor)]


def _sequences(call: Call) -> int:
    """How many sequences a batch has by the first axis of all its tensors; 0 where they differ."""
    lengths = {len(x) if x.dim() else 0 for x in _tensors(call)}
    return lengths.pop() if len(lengths) == 1 else 0


def _part(call: Call, place: slice) -> Call:
    args, kwargs = call
    cut: Any = lambda x: x[place] if isinstance(x, torch.Tensor) else x  # noqa: E731
    return tuple(map(cut, args)), {name: cut(x) for name, x in kwargs.items()}


__all__ = ["choose_"]
