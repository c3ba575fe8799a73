"""Which option each layer takes: scores of options, and the choice of least score within a budget.

**Score.** A change D of one layer's weights moves its outputs by D x. With g the gradient of the model's negative log
likelihood of a label *sampled from the model*, the mean over tokens of (g . D x)^2 / 2 is the second-order change of the KL
divergence to the model as it was (the Fisher information in the direction of D): one backward pass, one product an option.

**Choice.** Layers take one option each, so that the sum of scores is least and the sum of costs at most the budget: a
multiple-choice knapsack. Layers of one group take the same option and count as one item.

* *Frontier*: of each item the lower convex hull of (cost, score). From the cheapest options on, the steps of all hulls are
  taken by falling gain per cost: each prefix is the best choice for its own cost, for some Lagrange multiplier.
* *Bound*: that path with its last step taken in part is the linear relaxation: no choice within the budget scores less.
* *Exact*: partial choices item by item, without those that another one dominates in cost and score, and without those whose
  relaxation is no better than the best choice known (completions along the frontier give it). Exact but for ties within 1e-12;
  should more than `STATES` remain, the most promising go on and the result says that it is not exact.

Source: Kellerer, Pferschy and Pisinger, "Knapsack Problems" (2004), chapter 11; Dudzinski and Walukiewicz (1987) for the
relaxation; Nemhauser and Ullmann (1969) for lists of undominated states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reference.calibration.inputs import Matrix, float_array

Indices = npt.NDArray[np.intp]
#: Partial choices that are kept at most.
STATES = 1 << 17
TIE = 1e-12


class Frontier(NamedTuple):
    """The choices of all budgets on the convex hull, by rising cost: `costs` (P,), `scores` (P,) float64, `choices` (P, L)."""

    costs: Matrix
    scores: Matrix
    choices: Indices


class Allocation(NamedTuple):
    """What `allocate` gives.

    choice: (L,) integers, the option of each layer. score, cost: the sums over layers. frontier: that of all budgets. bound:
    the relaxation at this budget: no choice scores less. exact: whether the choice is known to be the best.
    """

    choice: Indices
    score: float
    cost: float
    frontier: Frontier
    bound: float
    exact: bool


def layer_score(d: Any, x: Any, g: Any) -> float:
    """The mean over tokens of (g . D x)^2 / 2, in float64.

    d: the change of the weights (N, K); x: inputs (T, K); g: gradients at the outputs (T, N), those of a sum over tokens, not
    of a mean. Finite float arrays of NumPy. Raises TypeError for other arrays, ValueError for shapes that do not fit, no tokens
    and values that are not finite.
    """
    d, x, g = (
        float_array(array, "layer_score", name).astype(np.float64)
        for array, name in ((d, "d"), (x, "x"), (g, "g"))
    )
    fits = d.ndim == x.ndim == g.ndim == 2 and (x.shape[1], g.shape[1]) == (d.shape[1], d.shape[0])
    if not fits or len(x) != len(g) or not len(x):
        raise ValueError(
            f"layer_score takes d (N, K), x (T, K) and g (T, N) with T >= 1, got {d.shape}, {x.shape} and {g.shape}"
        )
    moved = ((x @ d.T) * g).sum(axis=1)
    if not np.isfinite(moved).all():
        raise ValueError(
            "layer_score takes finite values, and some product is not; look for NaN in x, g and d"
        )
    return float((moved**2).mean() / 2)


def allocate(scores: Any, costs: Any, budget: float, groups: Any = None) -> Allocation:
    """The choice of one option a layer with the least sum of scores whose sum of costs is at most the budget.

    scores, costs: numbers (L, O), NumPy arrays or nested sequences; costs finite and not negative; a score of infinity rules an
    option out, for its whole group. budget: a number. groups: None, or L labels; layers with the same label take one option.

    Raises ValueError for shapes that do not fit, NaN, a group without an option, and a budget below the least cost.
    """
    score, cost = _checked_tables(scores, costs)
    members = _members(groups, len(score))
    items = [Item.of(score[layers].sum(axis=0), cost[layers].sum(axis=0), layers) for layers in members]
    path = Path.of(items)
    # Sums of costs in another order may differ in their last bits.
    allowed = float(budget) * (1 + TIE)
    if not allowed >= path.costs[0]:
        raise ValueError(
            f"the cheapest options cost {path.costs[0]:g} in all, more than the budget {budget:g}; raise it or add options"
        )
    picks, exact = _best(items, path, allowed)
    choice = np.empty(len(score), np.intp)
    for item, pick in zip(items, picks, strict=True):
        choice[item.members] = item.options[pick]
    rows = np.arange(len(score))
    bound = float(path.relaxed(np.array([allowed]))[0])
    totals = float(score[rows, choice].sum()), float(cost[rows, choice].sum())
    return Allocation(choice, *totals, path.frontier(items, len(score)), bound, exact)


@dataclass(frozen=True)
class Item:
    """The undominated options of a group by rising cost and falling score, and which of them lie on the convex hull."""

    members: Indices
    options: Indices
    costs: Matrix
    scores: Matrix
    hull: Indices

    @classmethod
    def of(cls, score: Matrix, cost: Matrix, members: Indices) -> Item:
        order = [j for j in np.lexsort((score, cost)) if score[j] < np.inf]
        if not order:
            raise ValueError(f"layers {members.tolist()} have no option with a finite score; add one")
        undominated = [order[0]]
        for j in order[1:]:
            if score[j] < score[undominated[-1]]:
                undominated.append(j)
        options = np.array(undominated, np.intp)
        return cls(members, options, cost[options], score[options], _hull(cost[options], score[options]))


def _ends(items: list[Item]) -> list[tuple[Matrix, Matrix]]:
    """(costs, scores) of items, and zeros so that there is one."""
    return [(item.costs, item.scores) for item in items] + [(np.zeros(1), np.zeros(1))]


def _hull(costs: Matrix, scores: Matrix) -> Indices:
    """Indices of the lower convex hull of points by rising cost and falling score."""
    hull: list[int] = []
    for j in range(len(costs)):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            # b stays where the gain per cost up to it is larger than beyond it.
            first = (scores[a] - scores[b]) * (costs[j] - costs[b])
            if first > (scores[b] - scores[j]) * (costs[b] - costs[a]):
                break
            hull.pop()
        hull.append(j)
    return np.array(hull, np.intp)


@dataclass(frozen=True)
class Path:
    """The steps of the hulls of items, by falling gain per cost, and the sums along them.

    item, pick: (P - 1,) which item each step moves, to which of its options. more, less: (P - 1,) its cost and gain. costs,
    scores: (P,) sums before each step and after the last.
    """

    item: Indices
    pick: Indices
    more: Matrix
    less: Matrix
    costs: Matrix
    scores: Matrix

    @classmethod
    def of(cls, items: list[Item]) -> Path:
        steps = [
            (i, b, item.costs[b] - item.costs[a], item.scores[a] - item.scores[b])
            for i, item in enumerate(items)
            for a, b in zip(item.hull[:-1], item.hull[1:], strict=True)
        ]
        table = np.array(steps, np.float64).reshape(-1, 4)
        # Of two gains alike the lower item goes first; gains of one item fall along its hull.
        table = table[np.argsort(-table[:, 3] / table[:, 2], kind="stable")]
        return cls._from(table, items)

    @classmethod
    def _from(cls, table: Matrix, items: list[Item]) -> Path:
        item, pick, more, less = table.T
        cost, score = (sum(float(part[0]) for part in parts) for parts in zip(*_ends(items), strict=True))
        costs = cost + np.concatenate([[0.0], np.cumsum(more)])
        scores = score - np.concatenate([[0.0], np.cumsum(less)])
        return cls(item.astype(np.intp), pick.astype(np.intp), more, less, costs, scores)

    def after(self, i: int, items: list[Item]) -> Path:
        """The path of the items behind item i."""
        steps = self.item > i
        table = np.stack([self.item, self.pick, self.more, self.less], axis=1)[steps]
        return Path._from(table, items[i + 1 :])

    def relaxed(self, budgets: Matrix) -> Matrix:
        """The least score of the linear relaxation at each budget; infinity below the least cost."""
        return np.where(budgets < self.costs[0], np.inf, np.interp(budgets, self.costs, self.scores))

    def reached(self, budgets: Matrix) -> Indices:
        """How many steps each budget pays for; -1 below the least cost."""
        return np.searchsorted(self.costs, budgets, side="right") - 1

    def picks(self, steps: int, count: int) -> Indices:
        """The option of each of `count` items after so many steps."""
        picks = np.zeros(count, np.intp)
        picks[self.item[:steps]] = self.pick[:steps]
        return picks

    def frontier(self, items: list[Item], layers: int) -> Frontier:
        choices = np.empty((len(self.costs), layers), np.intp)
        for i, item in enumerate(items):
            steps = np.flatnonzero(self.item == i)
            picked = np.zeros(len(self.costs), np.intp)
            for step in steps:
                picked[step + 1 :] = self.pick[step]
            choices[:, item.members] = item.options[picked][:, None]
        return Frontier(self.costs, self.scores, choices)


def _best(items: list[Item], path: Path, budget: float) -> tuple[Indices, bool]:
    """(the option of each item, whether no other choice is better)."""
    steps = int(path.reached(np.array([budget]))[0])
    best, picks, exact = float(path.scores[steps]), path.picks(steps, len(items)), True
    states = (np.zeros(1), np.zeros(1))
    trail: list[tuple[Indices, Indices]] = []
    for i, item in enumerate(items):
        rest = path.after(i, items)
        states, origin, cut = _extended(states, item, rest, budget, best)
        exact = exact and not cut
        trail.append(origin)
        cost, score = states
        if not len(cost):
            break
        reached = rest.reached(budget - cost)
        totals = score + rest.scores[reached]
        if totals.min() < best:
            state = int(totals.argmin())
            best, picks = float(totals[state]), rest.picks(int(reached[state]), len(items))
            for back in range(i, -1, -1):
                parents, chosen = trail[back]
                picks[back], state = chosen[state], int(parents[state])
    return picks, exact


def _extended(
    states: tuple[Matrix, Matrix], item: Item, rest: Path, budget: float, best: float
) -> tuple[tuple[Matrix, Matrix], tuple[Indices, Indices], bool]:
    """((cost, score) of the states with one more item, (state before, option) of each, whether promising ones were left)."""
    before = len(states[0])
    parents = np.repeat(np.arange(before), len(item.costs))
    chosen = np.tile(np.arange(len(item.costs)), before)
    cost, score = states[0][parents] + item.costs[chosen], states[1][parents] + item.scores[chosen]
    relaxed = score + rest.relaxed(budget - cost)
    promising = np.flatnonzero(relaxed < best - TIE * abs(best))
    promising = promising[_undominated(cost[promising], score[promising])]
    cut = len(promising) > STATES
    if cut:
        promising = promising[np.sort(np.argsort(relaxed[promising], kind="stable")[:STATES])]
    return (cost[promising], score[promising]), (parents[promising], chosen[promising]), cut


def _undominated(cost: Matrix, score: Matrix) -> Indices:
    """Indices of the states that no other one matches in cost and score, by rising cost."""
    order = np.lexsort((score, cost))
    least = np.minimum.accumulate(score[order])
    first = np.ones(len(order), bool)
    first[1:] = score[order][1:] < least[:-1]
    return order[first]


def _checked_tables(scores: Any, costs: Any) -> tuple[Matrix, Matrix]:
    """Both tables in float64; the errors of `allocate`."""
    score, cost = np.asarray(scores, np.float64), np.asarray(costs, np.float64)
    if score.ndim != 2 or score.shape != cost.shape or not score.size:
        raise ValueError(
            f"allocate takes scores and costs of one shape (layers, options), got {score.shape} and {cost.shape}"
        )
    if np.isnan(score).any() or (score == -np.inf).any():
        raise ValueError(
            "scores are numbers, or infinity for an option that is ruled out; got NaN or -infinity"
        )
    if not np.isfinite(cost).all() or (cost < 0).any():
        raise ValueError(
            "costs are finite and 0 or more; give an option that is ruled out a score of infinity"
        )
    return score, cost


def _members(groups: Any, layers: int) -> list[Indices]:
    """The layers of each group, in the order in which groups appear."""
    labels = list(range(layers)) if groups is None else list(groups)
    if len(labels) != layers:
        raise ValueError(f"groups has a label for each of {layers} layers, got {len(labels)}")
    layers_of: dict[Any, list[int]] = {}
    for layer, label in enumerate(labels):
        layers_of.setdefault(label, []).append(layer)
    return [np.array(members, np.intp) for members in layers_of.values()]


__all__ = ["Allocation", "Frontier", "allocate", "layer_score"]
