"""`tune` measures each product once, chooses within the budget, and changes nothing but the choices."""

import copy

import pytest
import torch
from torch import nn

import ao_lab
from ao_lab.gemm import choices
from ao_lab.gemm.choices import Candidate
from ao_lab.training import restricted
from ao_lab.tuning import api
from ao_lab.tuning.api import best
from ao_lab.tuning.measure import relative_error
from reference.training import RECIPES

X = torch.randn(40, 128, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    monkeypatch.setenv("AO_LAB_CACHE", str(tmp_path))
    monkeypatch.setattr("ao_lab.tuning.measure.SECONDS", 0.0)
    choices.forget()
    yield
    choices.forget()


def model(recipe="rowwise"):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(128, 64), nn.Dropout(0.5), nn.Linear(64, 128), nn.Linear(128, 64)
    ).bfloat16()
    ao_lab.convert_for_training_(net, recipe)
    return net


def test_each_product_once():
    """Two of the three layers are alike."""
    made = ao_lab.tune(model(), X)
    directions = [(c.problem.direction, c.problem.n, c.problem.k) for c in made.choices]
    assert len(directions) == len(set(directions)) == 8
    assert {c.kernel for c in made.choices if c.problem.direction != "training"} == {"emulate"}
    assert all(c.error is not None for one in made.choices for c in one.candidates if c.kernel == one.kernel)
    assert "fp8_rowwise_pow2 x fp8_rowwise_pow2: emulate" in str(made)


def test_nothing_else_changes():
    net = model()
    net(X).float().sum().backward()
    grads = [p.grad.clone() for p in net.parameters()]
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    ao_lab.tune(net, X)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), grads, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), before.values(), strict=True))


def test_a_later_process_finds_the_choices():
    made = ao_lab.tune(model(), X)
    choices.forget()
    assert set(choices.choices_for(X.device)) == set(made.choices)
    ao_lab.tune(model("mxfp8"), X, save_choices=False)
    choices.forget()
    assert set(choices.choices_for(X.device)) == set(made.choices)


@pytest.mark.parametrize("sample", [(X,), {"input": X}, lambda net: net(X).float().mean()])
def test_forms_of_the_sample(sample):
    assert len(ao_lab.tune(model(), sample).choices) == 8


def test_without_gradients_only_outputs():
    net = model().requires_grad_(False)
    assert {c.problem.direction for c in ao_lab.tune(net, X).choices} == {"output"}


def test_a_budget_that_nothing_meets_leaves_products_dense():
    net = model()
    made = ao_lab.tune(net, X, error_budget=1e-3)
    chosen = [c.kernel for c in made.choices if c.problem.direction == "training"]
    assert chosen == ["dense", "dense"]
    dense = copy.deepcopy(net)
    ao_lab.convert_from_training_(dense)
    net.eval(), dense.eval()
    assert torch.equal(net(X), dense(X))


def test_a_subset_is_followed(monkeypatch):
    """Whatever `tune` chose for a layer, its products are those."""
    monkeypatch.setattr(restricted, "tuned", lambda *_: "input_grad")
    recipe = restricted.tuned_recipe(RECIPES["mxfp8"], X, torch.empty(64, 128))
    assert recipe.input_grad == RECIPES["mxfp8"].input_grad
    assert recipe.output == recipe.weight_grad == RECIPES["bf16"].output


def test_the_quickest_within_the_budget():
    slow, quick, close = (
        Candidate("a", 1.0, 0.0, 0.01),
        Candidate("b", 0.5, 0.0, 0.1),
        Candidate("c", 0.99, 0.0, 0.01),
    )
    refused = Candidate("d", reason="no")
    assert best([slow, quick, refused], None) == "b"
    assert best([slow, quick, refused], 0.05) == "a"
    assert best([slow, close], None) == "a"  # less than the margin
    assert best([refused], None) is None
    assert best([quick], 0.05) is None


def test_errors_by_norm():
    x = torch.tensor([3.0, 4.0])
    assert relative_error(x, x) == 0.0
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_error(x + torch.tensor([0.0, 0.5]), x) == pytest.approx(0.1)
    assert relative_error(x, torch.zeros(2)) == float("inf")


def test_wrong_calls():
    with pytest.raises(ValueError, match="convert_for_training_ first"):
        ao_lab.tune(nn.Linear(32, 32), torch.randn(2, 32))
    with pytest.raises(ValueError, match="error_budget is a positive number or None, got 0"):
        ao_lab.tune(model(), X, error_budget=0)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        ao_lab.tune("model", X)


def test_every_rank_gets_the_choices_of_rank_0(monkeypatch):
    made = ao_lab.tune(model(), X).choices[:2]
    choices.forget()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)

    def broadcast(box, src):
        assert src == 0
        box[0] = list(made)

    monkeypatch.setattr(torch.distributed, "broadcast_object_list", broadcast)
    assert api.publish([], X.device, False).choices == made
    assert set(choices.choices_for(X.device)) >= set(made)
