"""The choice of options against all choices there are; its frontier against linear combinations; the score token by token."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import allocate, dequantize, layer_score, quantize
from tests.support.refusals import refused


def tables(seed, layers, options, *, whole=True):
    """Scores that fall with cost in the large, and costs of layers of unlike size."""
    rng = np.random.default_rng(seed)
    costs = np.sort(rng.integers(1, 12, (layers, options)), axis=1) * rng.integers(1, 5, (layers, 1))
    scores = rng.exponential(1.0, (layers, options)) / costs * rng.exponential(3.0, (layers, 1))
    return scores, costs if whole else costs * rng.uniform(0.5, 1.5, costs.shape)


def all_choices(scores, costs, groups=None):
    """(choice, score, cost) of each."""
    layers, options = scores.shape
    labels = list(range(layers)) if groups is None else groups
    names = list(dict.fromkeys(labels))
    rows = np.arange(layers)
    for picks in itertools.product(range(options), repeat=len(names)):
        choice = np.array([picks[names.index(label)] for label in labels])
        yield choice, scores[rows, choice].sum(), costs[rows, choice].sum()


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 4), st.booleans(), st.booleans())
def test_equals_all_choices(seed, layers, options, whole, tied):
    scores, costs = tables(seed, layers, options, whole=whole)
    rng = np.random.default_rng(seed)
    groups = [f"block{n}" for n in rng.integers(0, 3, layers)] if tied else None
    choices = list(all_choices(scores, costs, groups))
    least, most = min(c[2] for c in choices), max(c[2] for c in choices)
    for share in (0.0, 0.3, 0.7, 1.0):
        budget = least + share * (most - least)
        made = allocate(scores, costs, budget, groups)
        best = min(score for _, score, cost in choices if cost <= budget * (1 + 1e-12))
        np.testing.assert_allclose(made.score, best, rtol=1e-11)
        assert made.cost <= budget * (1 + 1e-11)
        assert made.exact
        rows = np.arange(layers)
        np.testing.assert_allclose(made.score, scores[rows, made.choice].sum(), rtol=1e-12)
        np.testing.assert_allclose(made.cost, costs[rows, made.choice].sum(), rtol=1e-12)
        if groups is not None:
            assert all(len({made.choice[j] for j in rows if groups[j] == name}) == 1 for name in groups)


def test_a_budget_of_exactly_the_least_cost_is_enough_in_any_order_of_its_sum():
    costs = np.asarray([[0.1], [0.2], [0.3], [1e-9]])
    sums = {sum(costs[list(order), 0]) for order in itertools.permutations(range(4))}
    assert len(sums) > 1
    for budget in sums:
        made = allocate(np.ones((4, 1)), costs, budget)
        assert made.bound == 4
        assert made.exact


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 4))
def test_the_frontier_is_the_hull_of_all_choices(seed, layers, options):
    """No choice lies below it, its points are choices, and the bound is the line between them."""
    scores, costs = tables(seed, layers, options)
    choices = list(all_choices(scores, costs))
    frontier = allocate(scores, costs, costs.max() * layers).frontier
    rows = np.arange(layers)
    for cost, score, choice in zip(*frontier, strict=True):
        np.testing.assert_allclose(scores[rows, choice].sum(), score, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(costs[rows, choice].sum(), cost, rtol=1e-9)
    assert (np.diff(frontier.costs) > 0).all()
    assert (np.diff(frontier.scores) < 0).all()
    for _, score, cost in choices:
        below = np.interp(cost, frontier.costs, frontier.scores)
        assert score >= below - 1e-9
    for budget in np.linspace(frontier.costs[0], frontier.costs[-1], 5):
        made = allocate(scores, costs, budget)
        np.testing.assert_allclose(made.bound, np.interp(budget, frontier.costs, frontier.scores), rtol=1e-9)
        assert made.bound <= made.score * (1 + 1e-9)
    np.testing.assert_allclose(frontier.scores[-1], min(score for _, score, _ in choices), rtol=1e-9)


def test_options_that_are_ruled_out():
    scores = np.array([[3.0, 1.0, np.inf], [np.inf, 2.0, 0.5]])
    costs = np.array([[1.0, 2, 3]] * 2)
    assert allocate(scores, costs, 100).choice.tolist() == [1, 2]
    assert allocate(scores, costs, 3).choice.tolist() == [0, 1]
    # A group has the options that all of its layers have.
    assert allocate(scores, costs, 100, ["a", "a"]).choice.tolist() == [1, 1]
    refused(
        ValueError, r"layers \[0, 1\] have no option", allocate, scores[:, [0, 2]], costs[:, :2], 9, [0, 0]
    )


def test_ties_take_the_cheaper_and_the_lower_option():
    made = allocate([[1.0, 1.0, 1.0]], [[2.0, 1.0, 1.0]], 5.0)
    assert (made.choice.tolist(), made.cost, made.bound) == ([1], 1.0, 1.0)
    assert len(made.frontier.costs) == 1


def test_a_large_problem_is_exact_and_near_its_bound():
    """300 layers by 8 options, as a large model has: within a tenth of a per cent of the relaxation."""
    rng = np.random.default_rng(0)
    bits = np.array([2.125, 2.5, 3.125, 3.5, 4.125, 4.5, 6.125, 8.125])
    sizes = rng.choice([4096 * 4096, 4096 * 14336, 1024 * 4096], 300)
    scores = np.exp(rng.standard_normal((300, 1))) * 4.0**-bits * np.exp(0.2 * rng.standard_normal((300, 8)))
    costs = sizes[:, None] * bits / 8
    for target in (2.5, 4.25, 5.0):
        made = allocate(scores, costs, sizes.sum() * target / 8)
        assert made.exact
        assert made.bound <= made.score <= made.bound * 1.001


def test_too_many_states_are_said(monkeypatch):
    """Then the most promising go on: still a choice within the budget, no worse than the frontier's."""
    from reference.calibration import allocate as module

    monkeypatch.setattr(module, "STATES", 8)
    costs = tables(5, 12, 6, whole=False)[1]
    scores = costs.max() - costs  # every choice lies on the line: the relaxation tells none from another
    made = allocate(scores, costs, costs.mean(axis=1).sum())
    assert made.cost <= costs.mean(axis=1).sum()
    steps = np.searchsorted(made.frontier.costs, made.cost * (1 + 1e-12), side="right") - 1
    assert made.score <= made.frontier.scores[steps] * (1 + 1e-12)
    assert not made.exact


def test_the_score_is_that_of_tokens_one_by_one():
    rng = np.random.default_rng(1)
    d, x, g = rng.standard_normal((5, 8)), rng.standard_normal((20, 8)), rng.standard_normal((20, 5))
    wanted = sum((g[t] @ (d @ x[t])) ** 2 for t in range(20)) / 20 / 2
    assert layer_score(d.astype(np.float32), x, g) == pytest.approx(
        sum((g[t] @ (d.astype(np.float32).astype(float) @ x[t])) ** 2 for t in range(20)) / 40, rel=1e-12
    )
    assert layer_score(d, x, g) == pytest.approx(wanted, rel=1e-12)


def test_the_score_is_the_curvature_of_the_divergence():
    """A linear softmax model: labels sampled from it, many of them, and a small change of its weights."""
    rng = np.random.default_rng(2)
    w, x = rng.standard_normal((4, 6)).astype(np.float32), rng.standard_normal((2000, 6))
    d = dequantize(quantize(np.pad(w, ((0, 0), (0, 26))), "int8_g32"))[:, :6].astype(float) - w

    def log_p(weights):
        z = x @ weights.T
        z -= z.max(axis=1, keepdims=True)
        return z - np.log(np.exp(z).sum(axis=1, keepdims=True))

    before, after = log_p(w.astype(float)), log_p(w + d)
    divergence = (np.exp(before) * (before - after)).sum(axis=1).mean()
    drawn = (np.exp(before).cumsum(axis=1) < rng.random((2000, 1))).sum(axis=1)
    g = np.exp(before) - np.eye(4)[np.minimum(drawn, 3)]
    assert layer_score(d, x, g) == pytest.approx(divergence, rel=0.1)


def test_refusals_name_the_way_out():
    scores, costs = tables(4, 3, 3)
    cases = [
        ({"scores": scores[0]}, r"one shape \(layers, options\), got \(3,\)"),
        ({"costs": costs[:2]}, r"got \(3, 3\) and \(2, 3\)"),
        ({"scores": scores[:0], "costs": costs[:0]}, "one shape"),
        ({"scores": scores * np.nan}, "got NaN"),
        ({"costs": -costs}, "finite and 0 or more"),
        ({"costs": costs * np.inf}, "score of infinity"),
        ({"budget": costs.min(axis=1).sum() - 1}, "more than the budget .*raise it"),
        ({"budget": float("nan")}, "more than the budget"),
        ({"groups": ["a"]}, "label for each of 3 layers, got 1"),
    ]
    for changed, said in cases:
        refused(ValueError, said, allocate, **{"scores": scores, "costs": costs, "budget": 1e9, **changed})
    d, x, g = np.ones((2, 3)), np.ones((4, 3)), np.ones((4, 2))
    refused(ValueError, r"got \(2, 3\), \(4, 2\)", layer_score, d, g, g)
    refused(ValueError, "T >= 1", layer_score, d, x[:0], g[:0])
    refused(ValueError, "look for NaN", layer_score, d, x * np.nan, g)
    refused(TypeError, "layer_score takes g as a NumPy array", layer_score, d, x, g.tolist())
