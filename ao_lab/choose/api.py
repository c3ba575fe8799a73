"""`choose_`: which configuration each layer gets under a budget, by one pass over data, measured before it is returned.

Each layer and option has a score (`ao_lab.choose.scores`) and a cost (`ao_lab.choose.budgets`); `reference.allocate` finds
the choice of the least sum of scores within the budget. That scores add up is an assumption, so the choice is measured: its
KL divergence from the model as it is, on data that gave no score, beside that of each option for all layers. What these
measure over what their scores predict corrects the scores once, for a second choice. Taken is the smallest divergence
within the budget, so the result is never worse, on these data, than one option for all.

The model is as before afterwards, the very parameters in their places: quantized weights are in it while data run, one setting
after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import reference
from ao_lab.calibration.methods import Method
from ao_lab.choose.budgets import Bits, Budget, Bytes, Meter, Microseconds
from ao_lab.choose.items import Groups, Item, check_groups, checked_options, items_of, labels
from ao_lab.choose.result import Choice, ChosenLayer, Trial
from ao_lab.choose.scores import Scoring, divergences
from ao_lab.choose.weights import Setting, Weights
from ao_lab.config.base import Config, kind_of
from ao_lab.transforms.data import Call, calibrating, calls_of
from ao_lab.transforms.layers import check_model
from ao_lab.transforms.plan import Filter, Progress
from reference.calibration.allocate import Allocation

FISHER = "fisher"
#: One of so many batches is held out to measure by.
SHARE = 4
MIXED, CORRECTED = "mixed", "mixed, corrected"


def choose_(
    model: nn.Module,
    calibration: Iterable[Any],
    options: Mapping[str, Any],
    budget: Budget,
    *,
    filter_fn: Filter | None = None,
    score: str | Choice = FISHER,
    groups: Groups | None = None,
    measure: Iterable[Any] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Choice:
    """Choose one of `options` for each layer, so that the model's predictions change least within a budget.

    calibration: batches as `quantize_` takes them. options: configurations by name, or pairs (configuration, methods) with
    the same methods in each, which then quantize a copy of the model per option; None leaves layers dense. budget:
    `Bits(4.25)` (stored bits a parameter, all counted), `Bytes(n)` or `Microseconds(t, rows=1)`, each of the layers that
    are chosen for alone. filter_fn: which layers, as for `quantize_`. score: "fisher", or an earlier `Choice` of the same
    model and options, whose scores are taken: another budget without another pass. groups: which layers take one option:
    labels by full name of a weight, or a function of it; None ties layers that are joined into one matrix where a model is
    served and those of one parent that read one tensor; {} ties none. measure: batches to measure by; None holds out every
    fourth of the calibration's, or of a single batch's sequences. seed: of the labels that are drawn. progress(what, done,
    total) is called after each batch.

    The result's `plan` is what `quantize_` takes. The model stays as it is, bit for bit.

    Raises ValueError without batches, for options that no layer takes, a budget out of the range of the options, layers
    that data do not reach, gradients that are not finite, and groups without a common option; TypeError for other kinds of
    arguments.
    """
    configs, methods = checked_options(options)
    if not isinstance(budget, (Bits, Bytes, Microseconds)):
        raise TypeError(f"budget is Bits(4.25), Bytes(n) or Microseconds(t, rows=1), got {kind_of(budget)}")
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
        calls, held, told = split(calls)
        notes.append(told)
    items = items_of(model, configs, filter_fn)
    job = Job(
        model, items, tuple(configs), budget, budget.meter(), progress=progress, total=len(calls) + len(held)
    )
    job.check_range(range(len(items)))
    if methods:
        job.weights.calibrate(model, configs, filter_fn, [kwargs or args for args, kwargs in calls], methods)
    with calibrating(model), frozen(model):
        if isinstance(score, Choice):
            job.take_scores(score)
        else:
            job.find_scores(calls, seed, groups)
        found = job.chosen(held)
    return job.result(configs, methods, found, notes)


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


@dataclass
class Job:
    """One call."""

    model: nn.Module
    items: list[Item]
    options: tuple[str, ...]
    budget: Budget
    meter: Meter
    progress: Progress | None = None
    total: int = 0
    done: int = 0
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    groups: list[object] = field(default_factory=list)
    weights: Weights = field(init=False)
    #: Of each item: its cost under each option, infinity where that is not for it, and as it is.
    costs: list[dict[str, float]] = field(init=False)

    def __post_init__(self) -> None:
        self.weights = Weights(self.items)
        self.costs = [
            {
                one: self.meter(item, item.changes[one]) if one in item.changes else math.inf
                for one in self.options
            }
            for item in self.items
        ]

    def step(self, what: str) -> None:
        """A batch has run."""
        self.done += 1
        if self.progress is not None:
            self.progress(what, self.done, self.total)

    def check_range(self, groups: Iterable[object]) -> None:
        """ValueError for a budget that no choice, or every choice, is within. groups: a label of each item."""
        sums: dict[object, list[float]] = {}
        for label, costs in zip(groups, self.costs, strict=True):
            before = sums.setdefault(label, [0.0] * len(self.options))
            sums[label] = [a + costs[one] for a, one in zip(before, self.options, strict=True)]
        finite = [[cost for cost in one if cost < math.inf] for one in sums.values()]
        least, most = (sum(extreme(one) for one in finite if one) for extreme in (min, max))
        limit = self.budget.limit(self.items)
        if not least <= limit <= most:
            raise ValueError(
                f"the budget is {self.told(limit)}, and these options take {self.told(least)} to {self.told(most)} of "
                f"{len(self.items)} layers; give one between, or {'a smaller' if limit < least else 'a larger'} option"
            )

    def told(self, cost: float) -> str:
        """A cost in the budget's unit."""
        return self.budget.told(cost, self.items)

    def find_scores(self, calls: Sequence[Call], seed: int, groups: Groups | None) -> None:
        """One pass over data."""
        generator = torch.Generator().manual_seed(seed)
        scoring = Scoring(self.items, self.options, self.weights, generator)
        for call in calls:
            scoring.run(self.model, call)
            self.step("scores")
        self.scores = scoring.means()
        self.groups = labels(self.items, groups, scoring.reads)

    def take_scores(self, known: Choice) -> None:
        """Those of an earlier choice."""
        self.scores = {layer.names[0]: dict(layer.scores) for layer in known.layers}
        numbers = {layer.names[0]: layer.group for layer in known.layers}
        for item in self.items:
            missing = set(item.changes) - set(self.scores.get(item.name, ()))
            if missing:
                raise ValueError(
                    f"score: the earlier choice has no score of {item.name} for {', '.join(sorted(missing))}; it is of another "
                    f"model or other options, give 'fisher'"
                )
        self.groups = [numbers[item.name] for item in self.items]

    def chosen(self, held: Sequence[Call]) -> Found:
        """The best of what was measured."""
        check_groups(self.items, self.groups)
        self.check_range(self.groups)
        allocation = self.allocate(dict.fromkeys(self.options, 1.0))
        uniform = {option: self.uniform(option) for option in self.options if self.scored(option)}
        settings = {MIXED: self.setting(allocation), **uniform}
        trials = self.measured(settings, held)
        factors = {
            one.name: one.measured / one.predicted
            for one in trials
            if one.name in uniform and one.predicted > 0
        }
        usable = {name: factor for name, factor in factors.items() if 0 < factor < math.inf}
        corrected = self.setting(self.allocate({**dict.fromkeys(self.options, 1.0), **usable}))
        if corrected not in settings.values():
            settings[CORRECTED] = corrected
            trials += self.measured({CORRECTED: corrected}, held)
        return Found(allocation, settings, trials)

    def scored(self, option: str) -> bool:
        """Whether an option changes anything."""
        return any(item.changes.get(option) is not None for item in self.items)

    def allocate(self, factors: Mapping[str, float]) -> Allocation:
        """The best choice by scores, each option's times a factor."""
        scores = [
            [self.scores[item.name].get(one, math.inf) * factors[one] for one in self.options]
            for item in self.items
        ]
        # An option that is ruled out has a score of infinity, and some cost.
        costs = [[cost if cost < math.inf else 0.0 for cost in one.values()] for one in self.costs]
        return reference.allocate(scores, costs, self.budget.limit(self.items), self.groups)

    def setting(self, allocation: Allocation) -> Setting:
        """The option of each item."""
        return {
            item.name: self.options[int(i)] for item, i in zip(self.items, allocation.choice, strict=True)
        }

    def uniform(self, option: str) -> Setting:
        """One option wherever it can be, the others dense."""
        return {item.name: option if option in item.changes else None for item in self.items}

    def cost(self, item: Item, option: str | None) -> float:
        """What an item costs."""
        return self.meter(item, None if option is None else item.changes[option])

    def measured(self, settings: Mapping[str, Setting], held: Sequence[Call]) -> list[Trial]:
        """Trials of these settings."""
        found = divergences(
            self.model, held, self.weights, list(settings.values()), lambda: self.step("measured")
        )
        self.total += len(held)
        limit = self.budget.limit(self.items)
        result = []
        for (name, setting), kl in zip(settings.items(), found, strict=True):
            cost = sum(self.cost(item, setting[item.name]) for item in self.items)
            predicted = sum(self.scores[item.name].get(setting[item.name] or "", 0.0) for item in self.items)
            result.append(Trial(name, cost, predicted, kl, cost <= limit * (1 + 1e-12)))
        return result

    def result(
        self,
        configs: Mapping[str, Config | None],
        methods: tuple[Method, ...],
        found: Found,
        notes: list[str],
    ) -> Choice:
        """The record of the best trial."""
        best = found.best
        setting, numbers = (
            found.settings[best.name],
            {label: i for i, label in enumerate(dict.fromkeys(self.groups))},
        )
        layers = tuple(
            ChosenLayer(
                tuple(item.places), setting[item.name], self.cost(item, setting[item.name]), self.scores[item.name],
                numbers[label],
            )
            for item, label in zip(self.items, self.groups, strict=True)
        )  # fmt: skip
        if best.name not in (MIXED, CORRECTED):
            notes.append(
                f"{best.name} for all layers was no worse than what the scores chose, so it is the result"
            )
        front = found.allocation.frontier
        return Choice(
            configs, layers, best.name, self.told(self.budget.limit(self.items)), self.told(best.cost), found.allocation.bound,
            tuple(found.trials), tuple(zip(front.costs.tolist(), front.scores.tolist(), strict=True)), methods,
            tuple(notes),
        )  # fmt: skip


@dataclass
class Found:
    """The choice by scores, and all that was measured."""

    allocation: Allocation
    settings: dict[str, Setting]
    trials: list[Trial]

    @property
    def best(self) -> Trial:
        """The smallest divergence within the budget; of two alike the first, and mixed ones are."""
        fitting = [one for one in self.trials if one.fits]
        return min(fitting, key=lambda one: one.measured if one.measured == one.measured else math.inf)


__all__ = ["choose_"]
