"""Policies: the knapsack against all choices, rules beside it, files, drift, and a small model from probe to conversion."""

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import ao_lab
from ao_lab.gemm.choices import choices_for
from ao_lab.policy.api import Policy, apply_policy_, confirmed, dispatch_, least_time, loka, uniform
from ao_lab.policy.options import LayerOptions, Option, layer_samples, measured_times
from ao_lab.training.layers import LowPrecisionLinear
from ao_lab.tuning import candidates, measure
from reference.training.recipe import recipe_of

ALL, OUT = ("output", "input_grad", "weight_grad"), ("output",)
RECIPES = ("rowwise", "tensorwise")


def layers(count=5, seed=0):
    """Layers whose options have times and variances drawn, some ruled out."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: float(torch.rand((), generator=generator))  # noqa: E731
    made = []
    for at in range(count):
        options = [Option("", (), 1.0 + draw())]
        for recipe, products in itertools.product(RECIPES, (ALL, OUT)):
            reason = "no" if draw() < 0.1 else ""
            options.append(Option(recipe, products, 0.4 + draw(), draw() * 1e-3, None, 0.4 * draw(), reason))
        made.append(LayerOptions(f"l{at}", (16, 16), tuple(options)))
    return made


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("room", [1e-9, 5e-4, 2e-3, 1.0])
def test_no_other_choice_within_the_budget_is_quicker(seed, room):
    made = layers(seed=seed)
    found = least_time(made, room)
    best = math.inf
    for options in itertools.product(*(one.options for one in made)):
        if not any(o.reason for o in options) and sum(o.variance for o in options) <= room:
            best = min(best, sum(o.seconds for o in options))
    assert found.seconds == pytest.approx(best)
    assert found.bound <= found.seconds + 1e-12
    assert found.variance <= room * (1 + 1e-9)
    assert found.fits
    for other in [uniform(made, name, room) for name in ("", *RECIPES)]:
        assert not other.fits or found.seconds <= other.seconds + 1e-12


def test_rules_beside():
    dense = Option("", (), 1.0)
    made = [
        LayerOptions("a", (1, 1), (dense, Option("rowwise", ALL, 0.9, 1.0, None, 0.1),
                                       Option("tensorwise", ALL, 0.8, 0, None, 0.3))),
        LayerOptions("b", (1, 1), (dense, Option("rowwise", ALL, 0.96, 1.0, None, 0.1),
                                       Option("rowwise", OUT, 0.5))),
    ]  # fmt: skip
    rule = loka(made, 1.5)
    # In a the quicker option errs by 0.3, in b none is quicker by 1.05 as a whole.
    assert [one.name for one in rule.options.values()] == ["rowwise", "dense"]
    assert rule.fits
    whole = uniform(made, "rowwise", 1.5)
    assert not whole.fits
    assert "beyond the budget" in str(whole)
    assert [one.name for one in uniform(made, "tensorwise", 1.5).options.values()] == ["tensorwise", "dense"]
    assert least_time(made, 1.5).options["b"].name == "rowwise (output)"
    for given, message in ((([], 1.0), "no layer was both"), ((made, 0.0), "is positive")):
        with pytest.raises(ValueError, match=message):
            least_time(*given)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 1))


X = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def report():
    """Of the two layers that are wide enough."""
    return ao_lab.probe_(
        net(), [X[:32], X[32:]], list(RECIPES), filter_fn=lambda m, n: n in ("0", "2"), measure=False
    )


def times(dense=1.0, rowwise=0.5, tensorwise=0.6):
    """A measurement that a GPU could give."""

    def measure(model, sample_input, recipes, names, launches):
        by = {"rowwise": rowwise, "tensorwise": tensorwise}
        one = {("rowwise", "dense"): dense, ("tensorwise", "dense"): dense}
        one |= {(r.name, "output+input_grad+weight_grad"): by[r.name] for r in recipes}
        return dict.fromkeys(names, one)

    return measure


def test_a_model_from_probe_to_training(report, tmp_path):
    model = net()
    policy = dispatch_(model, X, report, budget=10.0, measure=times())
    kinds = [type(module) is LowPrecisionLinear for module in model]
    assert kinds == [True, False, True, False, False]
    assert model[0].low_precision.recipe.key == recipe_of("rowwise").key
    assert policy.decision.seconds == 1.0
    text = str(policy)
    assert "least time: 1000000.0 us" in text
    assert "uniform rowwise" in text
    assert "LoKA (error < 0.2, speedup > 1.05)" in text
    model(X).sum().backward()
    assert {*ao_lab.convert_from_training_(model)} == {"0", "2"}
    policy.save(tmp_path / "policy.json")
    again = Policy.load(tmp_path / "policy.json", model)
    assert again.decision == policy.decision
    assert again.others == policy.others
    assert apply_policy_(model, again) == ("0", "2")


def test_a_small_budget_leaves_layers_dense(report):
    """Within the room of the least layer alone that layer takes low precision; with none, none does."""
    variances = {line.name: line.candidates["rowwise"].variance.value for line in report.sites}
    least = min(variances, key=variances.get)
    outputs = report.models["rowwise"].outputs
    budget = (1.01 * variances[least]) ** 0.5 / outputs
    policy = dispatch_(net(), X, report, recipes=["rowwise"], budget=budget, measure=times())
    assert [name for name, option in policy.decision.options.items() if option.recipe] == [least]
    assert not policy.others[1].fits
    none = dispatch_(net(), X, report, budget=1e-9, measure=times())
    assert not any(option.recipe for option in none.decision.options.values())


def test_low_precision_that_is_slower_is_not_taken(report):
    model = net()
    policy = dispatch_(model, X, report, budget=10.0, measure=times(dense=0.3))
    assert policy.decision.seconds == policy.others[0].seconds == 0.6
    assert not any(isinstance(module, LowPrecisionLinear) for module in model)


def test_noisy_gradients_are_ruled_out(report):
    from dataclasses import replace

    from reference.probe.estimates import Estimate

    noisy = Estimate(0.5, 0.1, 0.4, 0.6, 10)
    sites = tuple(
        replace(line, candidates={n: replace(e, noise=noisy) for n, e in line.candidates.items()}) for line in report.sites
    )  # fmt: skip
    policy = dispatch_(net(), X, replace(report, sites=sites), budget=10.0, measure=times())
    assert not any(option.recipe for option in policy.decision.options.values())
    assert not policy.others[1].fits
    quiet = dispatch_(net(), X, report, budget=10.0, measure=times())
    assert quiet.drifted(report) == ()
    assert "0: its gradient's error is 0.5 of the batch's noise" in quiet.drifted(
        replace(report, sites=sites)
    )
    tight = replace(quiet, decision=replace(quiet.decision, room=1e-12))
    assert "outputs move by" in tight.drifted(report)[0]


def test_whole_steps_decide_where_they_are_timed(report):
    """A step in which uniform tensorwise turns out quickest."""
    model = net()
    policy = dispatch_(model, X, report, budget=10.0, measure=times(), apply=False)

    def timed(model, sample_input):
        kinds = [m.low_precision.recipe.name for m in model if isinstance(m, LowPrecisionLinear)]
        return {"rowwise": 2.0, "tensorwise": 1.0}.get(*kinds[:1], 3.0) if kinds else 3.0

    found = confirmed(model, X, policy, timed)
    assert found.decision.name == "uniform tensorwise"
    assert len(found.others) == len(policy.others)
    assert not any(isinstance(module, LowPrecisionLinear) for module in model)
    assert confirmed(model, X, policy).decision.fits


def test_samples_are_of_each_layer_and_leave_the_model(report):
    model = net()
    samples = layer_samples(model, X, ["0", "2"])
    assert [tuple(one.w.shape) for one in samples.values()] == [(64, 32), (32, 64)]
    assert all(one.g is not None for one in samples.values())
    assert not any(isinstance(module, LowPrecisionLinear) for module in model)
    assert all(p.grad is None for p in model.parameters())
    table = choices_for(torch.device("cpu"))
    table.clear()
    found = measured_times(model, X, [recipe_of("rowwise")], ["0"], "eager")
    # Functions for products are chosen, but not which products of a recipe are dense: a uniform policy has all of them.
    assert {one.problem.direction for one in table} == {"output", "input_grad", "weight_grad"}
    table.clear()
    assert {subset for _, subset in found["0"]} >= {"output+input_grad+weight_grad"}


def test_dense_layers_are_timed_however_slow_they_are(monkeypatch):
    """Low precision that is 3 times as fast leaves the dense layer in the choice: sums over layers need its time."""
    monkeypatch.setattr(candidates, "has_fp8", lambda device: True)
    monkeypatch.setattr(candidates, "_step", lambda sample, x, w, recipe: lambda: recipe.is_dense)
    seconds = lambda call, *_: 0.3 if call() is True else 0.1  # noqa: E731
    monkeypatch.setattr(measure, "host_seconds", seconds)
    monkeypatch.setattr(measure, "reading", seconds)
    found = measured_times(net(), X, [recipe_of("rowwise")], ["0"], "graph")
    assert found["0"]["rowwise", "dense"] == 0.3
    assert found["0"]["rowwise", "output+input_grad+weight_grad"] == 0.1
    # So does a time budget that allows it.
    calls = {"low": lambda: False, "dense": lambda: True}
    for limits, kept in ((candidates.Limits(), False), (candidates.Limits(time=4.0), True)):
        low, dense = candidates.measured(calls, lambda name: 0.0, {}, torch.device("cpu"), limits)
        assert (low.seconds, dense.seconds) == (0.1, 0.3 if kept else None)


def test_a_layer_without_a_dense_time_stays_dense(report):
    """And the others are dispatched."""
    timed = times()(None, None, [recipe_of("rowwise")], ["0", "2"], "graph")
    timed["0"] = {key: value for key, value in timed["0"].items() if key[1] != "dense"}
    with pytest.warns(UserWarning, match="^0: there is no time of the dense layer, so it stays dense"):
        policy = dispatch_(net(), X, report, recipes=["rowwise"], budget=10.0, measure=lambda *_: timed)
    assert {name: one.recipe for name, one in policy.decision.options.items()} == {"2": "rowwise"}


def test_what_is_refused(report, tmp_path):
    model, path = net(), tmp_path / "policy.json"
    for changes, message in (
        ({"budget": 0.0}, "are positive"),
        ({"recipes": ["mxfp8"]}, "the report has no errors of mxfp8"),
    ):
        with pytest.raises(ValueError, match=message):
            dispatch_(model, X, report, measure=times(), **changes)
    with pytest.raises(ValueError, match="without FP8 units"):
        dispatch_(model, X, report)
    only = {("rowwise", "output+input_grad+weight_grad"): 0.5}
    with pytest.raises(ValueError, match="0, 2: there is no time of the dense layer"):
        dispatch_(model, X, report, measure=lambda m, x, r, names, launches: dict.fromkeys(names, only))
    line = report.sites[0]
    moved = replace(
        report, sites=(replace(line, shape=(line.shape[0], 2 * line.shape[1])), *report.sites[1:])
    )
    with pytest.raises(ValueError, match="the report is of another model: 0 is"):
        dispatch_(model, X, moved, measure=times())
    policy = dispatch_(model, X, report, budget=10.0, measure=times())
    with pytest.raises(ValueError, match="0: it trains with recipe 'rowwise' already"):
        dispatch_(model, X, report, measure=times())
    policy.save(path)
    other = nn.Sequential(nn.Linear(8, 8))
    for call in (lambda: Policy.load(path, other), lambda: apply_policy_(other, policy)):
        with pytest.raises(ValueError, match="policy of another model"):
            call()
    told = json.loads(path.read_text())
    for change, message in (
        ({"ao_lab_policy": 9}, "another version"),
        ({"recipes": {"rowwise": "{}"}}, "other records of rowwise"),
    ):
        path.write_text(json.dumps(told | change))
        with pytest.raises(ValueError, match=message):
            Policy.load(path, model)


def test_layers_that_train_already_are_refused_and_stay(report):
    """A dense layer of the policy that trains by a recipe is no dense one; an error leaves all as they were."""
    model = net()
    policy = dispatch_(model, X, report, budget=10.0, measure=times())
    dense = dispatch_(net(), X, report, budget=10.0, measure=times(dense=0.3))
    for one in (policy, dense):
        with pytest.raises(ValueError, match="0: it trains with recipe 'rowwise' already"):
            apply_policy_(model, one)
        assert isinstance(model[0], LowPrecisionLinear)
    # A layer that the report has not, and that trains by a recipe.
    other = net()
    ao_lab.convert_for_training_(other, "rowwise", lambda module, name: name == "4", pad=True)
    confirmed(
        other, X, dispatch_(other, X, report, budget=10.0, measure=times(), apply=False), lambda *_: 1.0
    )
    assert [isinstance(module, LowPrecisionLinear) for module in other] == [False, False, False, False, True]


class Pooled(nn.Module):
    """Two layers of one shape, one of which sees a token a sequence."""

    def __init__(self):
        super().__init__()
        self.each, self.pooled = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return self.pooled(self.each(x).mean(1))


def test_samples_of_layers_have_their_tokens():
    samples = layer_samples(Pooled(), torch.randn(4, 64, 32), ["each", "pooled"])
    assert {name: len(one.x) for name, one in samples.items()} == {"each": 256, "pooled": 4}
