"""`choose_`: which configuration each layer gets under a budget, by one pass over data, measured before it is returned.

Each layer and option has a score (`ao_lab.choose.scores`) and a cost (`ao_lab.choose.budgets`); `reference.allocate` finds
the choice of the least sum of scores within the budget. That scores add up is an assumption, so the choice is measured: its
KL divergence from the model as it is, on data that gave no score, beside that of each option for all layers and of settings
that a caller gives. Taken is the smallest divergence within the budget, so the result is never worse, on these data, than one
option for all.

The model is as before afterwards, the very parameters in their places: quantized weights are in it while data run, one setting
after the other.

First measured are each option for all layers, a caller's own settings, and the choice by scores of each budget, in one pass
over data. What an option measures over what its scores predict corrects its scores once, for a second choice, which is
measured too. A setting that was measured is not measured again, whichever budget asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, overload

import torch
from torch import nn

import reference
from ao_lab.calibration.methods import Method
from ao_lab.choose.budgets import Bits, Budget, Bytes, Meter, Microseconds
from ao_lab.choose.items import (
    CORRECTED,
    MIXED,
    Candidates,
    Groups,
    Item,
    check_groups,
    checked_candidates,
    checked_options,
    items_of,
    labels,
)
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
    progress(what, done, total) is called after each batch, and before that, where options have methods, for each weight.

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
        data = [kwargs or args for args, kwargs in calls]
        job.weights.calibrate(model, configs, data, methods, job.tell)
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


#: The option of each item, in their order: what a setting is known by.
Key = tuple[str | None, ...]


@dataclass
class Job:
    """One call of `choose_`."""

    model: nn.Module
    items: list[Item]
    options: tuple[str, ...]
    budgets: tuple[Budget, ...]
    #: Settings of the caller's own.
    by_hand: Mapping[str, Setting] = field(default_factory=dict)
    progress: Progress | None = None
    total: int = 0
    done: int = 0
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    groups: list[object] = field(default_factory=list)
    #: The divergence of each setting that was measured.
    divergences: dict[Key, float] = field(default_factory=dict)
    weights: Weights = field(init=False)
    searches: list[Search] = field(init=False)

    def __post_init__(self) -> None:
        self.weights = Weights(self.items)
        self.searches = [Search(self, budget, budget.meter()) for budget in self.budgets]

    def step(self, what: str) -> None:
        """A batch has run."""
        self.done += 1
        self.tell(what)

    def tell(self, what: str) -> None:
        """Say what is under way, and how many batches have run."""
        if self.progress is not None:
            self.progress(what, self.done, self.total)

    def check_ranges(self, groups: Iterable[object]) -> None:
        """ValueError for a budget that no choice, or every choice, is within. groups: a label of each item."""
        groups = list(groups)
        for search in self.searches:
            search.check_range(groups)

    def compute_scores(self, calls: Sequence[Call], seed: int, groups: Any) -> None:
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

    def choose(self, held: Sequence[Call]) -> None:
        """The choices of all budgets, and what is measured of them."""
        check_groups(self.items, self.groups)
        self.check_ranges(self.groups)
        uniform = {option: self.uniform(option) for option in self.options if self.changes(option)}
        for search in self.searches:
            search.settings = {MIXED: search.setting(search.allocate({})), **uniform, **self.by_hand}
        self.measure(held)
        factors = self.factors(uniform)
        for search in self.searches:
            corrected = search.setting(search.allocate(factors))
            if corrected not in search.settings.values():
                search.settings[CORRECTED] = corrected
        self.measure(held)

    def changes(self, option: str) -> bool:
        """Whether an option changes anything."""
        return any(item.changes.get(option) is not None for item in self.items)

    def uniform(self, option: str) -> Setting:
        """One option wherever it can be, the others dense."""
        return {item.name: option if option in item.changes else None for item in self.items}

    def key(self, setting: Setting) -> Key:
        """What a setting is known by."""
        return tuple(setting[item.name] for item in self.items)

    def measure(self, held: Sequence[Call]) -> None:
        """The divergences of all settings that are not known."""
        wanted = {self.key(one): one for search in self.searches for one in search.settings.values()}
        new = {key: one for key, one in wanted.items() if key not in self.divergences}
        if new:
            self.total += len(held) * (self.divergences != {})
            kls = divergences(
                self.model, held, self.weights, list(new.values()), lambda: self.step("measured")
            )
            self.divergences.update(zip(new, kls, strict=True))

    def predicted(self, setting: Setting) -> float:
        """The sum of a setting's scores."""
        return sum(self.scores[item.name].get(setting[item.name] or "", 0.0) for item in self.items)

    def factors(self, uniform: Mapping[str, Setting]) -> dict[str, float]:
        """What each option for all layers measures over what its scores predict, where both are usual numbers."""
        pairs = {
            name: (self.divergences[self.key(one)], self.predicted(one)) for name, one in uniform.items()
        }
        factors = {name: kl / predicted for name, (kl, predicted) in pairs.items() if predicted > 0}
        return {name: factor for name, factor in factors.items() if 0 < factor < math.inf}

    def results(
        self, configs: Mapping[str, Config | None], methods: tuple[Method, ...], notes: Sequence[str]
    ) -> tuple[Choice, ...]:
        """The record of each budget's best setting."""
        return tuple(search.result(configs, methods, list(notes)) for search in self.searches)


@dataclass
class Search:
    """One budget."""

    job: Job
    budget: Budget
    meter: Meter
    #: What is measured, by name.
    settings: dict[str, Setting] = field(default_factory=dict)
    #: The choice by scores as they are.
    allocation: Allocation | None = None
    #: Of each item: its cost under each option, infinity where that is not for it.
    costs: list[dict[str, float]] = field(init=False)

    def __post_init__(self) -> None:
        self.costs = [
            {
                one: self.meter(item, item.changes[one]) if one in item.changes else math.inf
                for one in self.job.options
            }
            for item in self.job.items
        ]

    @property
    def limit(self) -> float:
        """The budget in the unit of the costs."""
        return self.budget.limit(self.job.items)

    def text(self, cost: float) -> str:
        """A cost in the budget's unit."""
        return self.budget.text(cost, self.job.items)

    def check_range(self, groups: Sequence[object]) -> None:
        """ValueError for a budget that no choice, or every choice, is within."""
        sums: dict[object, list[float]] = {}
        for label, costs in zip(groups, self.costs, strict=True):
            before = sums.setdefault(label, [0.0] * len(costs))
            sums[label] = [a + b for a, b in zip(before, costs.values(), strict=True)]
        finite = [[cost for cost in one if cost < math.inf] for one in sums.values()]
        least, most = (sum(extreme(one) for one in finite if one) for extreme in (min, max))
        limit = self.limit
        if not least <= limit <= most:
            raise ValueError(
                f"the budget is {self.text(limit)}, and these options take {self.text(least)} to {self.text(most)} of "
                f"{len(self.job.items)} layers; give one between, or {'a smaller' if limit < least else 'a larger'} option"
            )

    def allocate(self, factors: Mapping[str, float]) -> Allocation:
        """The best choice by scores, each option's times a factor."""
        job = self.job
        scores = [
            [job.scores[item.name].get(one, math.inf) * factors.get(one, 1.0) for one in job.options]
            for item in job.items
        ]
        # An option that is ruled out has a score of infinity, and some cost.
        costs = [[cost if cost < math.inf else 0.0 for cost in one.values()] for one in self.costs]
        allocation = reference.allocate(scores, costs, self.limit, job.groups)
        self.allocation = self.allocation or allocation
        return allocation

    def setting(self, allocation: Allocation) -> Setting:
        """The option of each item."""
        choice = zip(self.job.items, allocation.choice, strict=True)
        return {item.name: self.job.options[int(i)] for item, i in choice}

    def cost(self, item: Item, option: str | None) -> float:
        """What an item costs."""
        return self.meter(item, None if option is None else item.changes[option])

    def trials(self) -> list[Trial]:
        """What was measured of the settings."""
        result = []
        for name, setting in self.settings.items():
            cost = sum(self.cost(item, setting[item.name]) for item in self.job.items)
            kl = self.job.divergences[self.job.key(setting)]
            result.append(
                Trial(name, cost, self.job.predicted(setting), kl, cost <= self.limit * (1 + 1e-12))
            )
        return result

    def result(
        self, configs: Mapping[str, Config | None], methods: tuple[Method, ...], notes: list[str]
    ) -> Choice:
        """The record of the best trial: the smallest divergence within the budget, of two alike the first."""
        trials, allocation = self.trials(), self.allocation
        assert allocation is not None
        fitting = [one for one in trials if one.fits]
        best = min(fitting, key=lambda one: one.measured if one.measured == one.measured else math.inf)
        setting = self.settings[best.name]
        numbers = {label: i for i, label in enumerate(dict.fromkeys(self.job.groups))}
        layers = tuple(
            ChosenLayer(
                tuple(item.places), setting[item.name], self.cost(item, setting[item.name]),
                self.job.scores[item.name], numbers[label],
            )
            for item, label in zip(self.job.items, self.job.groups, strict=True)
        )  # fmt: skip
        if best.name not in (MIXED, CORRECTED):
            what = best.name if best.name in self.job.by_hand else f"{best.name} for all layers"
            notes.append(f"{what} was no worse than what the scores chose, so it is the result")
        front = allocation.frontier
        return Choice(
            configs, layers, best.name, self.text(self.limit), self.text(best.cost), allocation.bound, tuple(trials),
            tuple(zip(front.costs.tolist(), front.scores.tolist(), strict=True)), methods, tuple(notes),
        )  # fmt: skip


__all__ = ["Job", "Search", "choose_"]
