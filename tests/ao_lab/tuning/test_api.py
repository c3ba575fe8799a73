"""`tune` measures each product once, chooses within the budget, and changes nothing but the choices."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import ao_lab
from ao_lab.gemm import choices
from ao_lab.gemm.choices import Candidate, Choice, problem_of
from ao_lab.gemm.select import select_kernel
from ao_lab.training import autograd
from ao_lab.training.products import select_product
from ao_lab.tuning import api
from ao_lab.tuning.candidates import Limits, best
from ao_lab.tuning.measure import relative_error
from reference.training.recipe import RECIPES
from tests.support.distributed.ranks import check_on_ranks

ROWWISE = RECIPES["rowwise"]
X = torch.randn(40, 128, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.fixture(autouse=True)
def quick(no_choices, monkeypatch):
    monkeypatch.setattr("ao_lab.tuning.measure.SECONDS", 0.0)


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
    assert "fp8_rowwise_pow2 x fp8_rowwise_pow2, bfloat16: output 64x128, tokens <= 64: emulate (" in str(
        made
    )


def with_gradients(accumulation):
    name, gradients = f"rowwise_{accumulation}", ("input_grad", "weight_grad")
    changed = {one: replace(getattr(ROWWISE, one), accumulation=accumulation) for one in gradients}
    return replace(ROWWISE, name=name, **changed)


def test_recipes_that_accumulate_otherwise_are_told_apart():
    """Their schemes are equal, so are the lengths: each has its own choices, and gets these alone."""
    fast, precise = map(with_gradients, ("fast", "precise"))
    one, other = ao_lab.tune(model(fast), X).choices, ao_lab.tune(model(precise), X).choices
    shared = {c.problem for c in one} & {c.problem for c in other}
    assert {p.direction for p in shared} == {"output"}
    listed = {c for layer in ao_lab.explain(model(fast)).layers for c in layer.tuned}
    assert {c.problem for c in listed} == {c.problem for c in one}
    table = choices.choices_for(X.device)
    a, b = torch.randn(16, 64), torch.randn(32, 64)
    for record, name in ((fast, "emulate"), (precise, "dequantize")):
        accumulation = record.input_grad.accumulation
        table.add(Choice(problem_of("input_grad", "", "", (16, 32, 64), a.dtype, accumulation), name))
    for record, name in ((fast, "emulate"), (precise, "dequantize")):
        assert select_product("input_grad", a, b, a.dtype, record.input_grad) == name


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
    monkeypatch.setattr(autograd, "tuned", lambda *_: "input_grad")
    recipe = autograd.tuned_recipe(RECIPES["mxfp8"], X, torch.empty(64, 128))
    assert recipe.input_grad == RECIPES["mxfp8"].input_grad
    assert recipe.output == recipe.weight_grad == RECIPES["bf16"].output


def test_the_quickest_within_the_budgets():
    slow, quick, close = (
        Candidate("a", 1.0, 0.0, 0.01),
        Candidate("b", 0.5, 0.0, 0.1),
        Candidate("c", 0.99, 0.0, 0.01),
    )
    refused = Candidate("d", reason="no")
    assert best([slow, quick, refused], Limits()) == "b"
    assert best([slow, quick, refused], Limits(error=0.05)) == "a"
    assert best([slow, close], Limits()) == "a"  # less than the margin
    assert best([slow, close], Limits(), margin=0.001) == "c"
    assert best([refused], Limits()) is None
    assert best([quick], Limits(error=0.05)) is None
    assert best([slow, quick], Limits(time=1.9)) == "b"
    assert best([slow, quick], Limits(time=2.0)) == "a"
    assert best([slow, close], Limits(time=1.0)) == "c"


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
    with pytest.raises(ValueError, match=r"time_budget is a factor.*got 0\.5"):
        ao_lab.tune(model(), X, time_budget=0.5)
    with pytest.raises(ValueError, match="launches"):
        ao_lab.tune(model(), X, launches="cuda")
    with pytest.raises(ValueError, match="rows are positive integers, got 0"):
        ao_lab.tune(model(), X, rows=[0])
    with pytest.raises(ValueError, match="rows is a list of positive integers, got 5"):
        ao_lab.tune(model(), X, rows=5)
    for budget in ("error_budget", "time_budget"):
        with pytest.raises(ValueError, match=f"{budget} is a .*got 'a'"):
            ao_lab.tune(model(), X, **{budget: "a"})
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        ao_lab.tune("model", X)


def test_a_model_without_values_is_refused():
    for net in (model(), quantized()):
        with pytest.raises(ValueError, match="tune measures, and inputs of 0 are on the meta device"):
            ao_lab.tune(net.to("meta"), X.to("meta"))


@pytest.mark.parametrize("make", ["model", "quantized"])
def test_a_broken_file_is_replaced_by_tuning(make):
    """Its forward and backward run by the default rules, with one warning."""
    net = globals()[make]()
    path = choices.path_of(X.device)
    path.parent.mkdir(parents=True)
    path.write_text('{"format": 3, "device": "NVIDIA B200", "choices": []}')
    choices.forget()
    with pytest.warns(UserWarning, match=r"NVIDIA B200.*remove it, or call ao_lab\.tune"):
        net(X)
    made = ao_lab.tune(net, X)
    choices.forget()
    assert set(choices.choices_for(X.device)) == set(made.choices)
    net(X)


def test_further_rows():
    """Each layer once for each range, the sample's own (40: up to 64) among them."""
    made = ao_lab.tune(model().requires_grad_(False), X, rows=[16, 33, 64, 300])
    assert {(c.problem.rows, c.problem.n) for c in made.choices} == {
        (r, n) for r in (16, 64, 512) for n in (64, 128)
    }
    assert len(made.choices) == 6


def test_nothing_is_measured_when_layers_run(monkeypatch):
    net = model()
    ao_lab.tune(net, X)
    monkeypatch.setattr("ao_lab.tuning.measure.reading", None)
    monkeypatch.setattr("ao_lab.tuning.measure.host_seconds", None)
    net(X[:7]).float().sum().backward()


def test_no_tune_within_another():
    def sample(net):
        return ao_lab.tune(net, X)

    with pytest.raises(ValueError, match="called while tune measures"):
        ao_lab.tune(model(), sample)
    ao_lab.tune(model(), X)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_a_compiled_layer_keeps_its_choice():
    """What stands when it is traced, for its range of rows, without a break; in the compiled program nothing is looked up."""
    net = nn.Sequential(nn.Linear(128, 64)).bfloat16()
    ao_lab.convert_for_training_(net, "rowwise")
    many = X.repeat(20, 1)
    low, far = net(X), net(many)
    ao_lab.tune(net, X, error_budget=1e-3, save_choices=False)
    dense = net(X)
    assert not torch.equal(low, dense)
    assert torch.equal(net(many), far)  # of a range that is too far
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True, dynamic=True)
    assert torch.equal(compiled(X), dense)
    assert torch.equal(compiled(many), far)
    choices.forget()
    assert torch.equal(compiled(X[:36]), dense[:36])
    assert torch.equal(net(X), low)


def quantized():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 128)).bfloat16()
    ao_lab.quantize_(net, ao_lab.Int8DynamicActivationInt8WeightConfig())
    return net


def test_serving_is_tuned_and_followed():
    net = quantized()
    with torch.no_grad():
        default = net(X)
        made = ao_lab.tune(net, X, rows=[1])
        assert {c.problem.direction for c in made.choices} == {"inference"}
        assert {(c.problem.rows, c.problem.n) for c in made.choices} == {
            (1, 64),
            (1, 128),
            (64, 64),
            (64, 128),
        }
        for choice in made.choices:
            table = choices.choices_for(X.device)
            table.add(replace(choice, kernel="dequantize"))
        other = net(X)
        assert not torch.equal(other, default)  # integer sums have other bits
        assert torch.equal(net[0](X), X @ net[0].weight.dequantize().t() + net[0].bias) is False
        torch.use_deterministic_algorithms(True)
        try:
            assert torch.equal(net(X), default)
        finally:
            torch.use_deterministic_algorithms(False)
        choices.choices_for(X.device).found.clear()
        choices.changed()
        assert torch.equal(net(X), default)


def test_serving_errors_and_reasons():
    made = ao_lab.tune(quantized(), X, error_budget=1e-9)
    for choice in made.choices:
        errors = {c.kernel: c.error for c in choice.candidates if c.error is not None}
        assert choice.kernel == min(errors, key=errors.get)
        assert "recipes that name it" in next(c.reason for c in choice.candidates if c.kernel == "reference")


def test_a_choice_of_several_rows_is_not_one_of_a_single_row():
    """What was measured for 4 rows says nothing of one: that stays the default."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(128, 64)).bfloat16()
    ao_lab.quantize_(net, ao_lab.SchemeConfig(scheme="int4_g32"))
    with torch.no_grad():
        default = net(X[:1])
        (choice,) = ao_lab.tune(net, X[:4]).choices
        assert torch.equal(net(X[:1]), default)
    weight = net[0].weight.transposed()
    chosen = choice.kernel
    assert [select_kernel(weight, X.dtype, rows) for rows in (1, 4)] == ["fused", chosen]


def test_a_named_kernel_is_not_tuned():
    net = quantized()
    net[0].weight = nn.Parameter(net[0].weight.with_recipe(kernel="dequantize"), requires_grad=False)
    assert {c.problem.n for c in ao_lab.tune(net, X).choices} == {128}


def test_explain_lists_the_choices():
    net = model()
    assert all(not layer.tuned for layer in ao_lab.explain(net).layers)
    made = ao_lab.tune(net, X)
    layers = {layer.name: layer.tuned for layer in ao_lab.explain(net).layers}
    assert {c.problem.direction for c in layers["0.weight"]} == {
        "training",
        "output",
        "input_grad",
        "weight_grad",
    }
    assert set(layers["0.weight"]) | set(layers["2.weight"]) == set(made.choices)
    assert "tuned: weight_grad 128x64, tokens <= 64: emulate (" in str(ao_lab.explain(net))
    served = quantized()
    ao_lab.tune(served, X, rows=[1])
    assert [len(layer.tuned) for layer in ao_lab.explain(served).layers] == [2, 2]


def test_every_rank_gets_the_choices_of_the_lowest_that_has_them(monkeypatch):
    made = ao_lab.tune(model(), X).choices
    mine = [replace(choice, kernel="mine") for choice in made[1:]]
    merged = api.merged([[], made[:3], mine])
    assert [c.problem for c in merged] == [c.problem for c in made]
    assert [c.kernel for c in merged] == [c.kernel for c in made[:3]] + ["mine"] * (len(made) - 3)


@pytest.mark.nightly
def test_two_ranks_have_the_same_choices(tmp_path):
    check_on_ranks("tensors.tuned", tmp_path)
