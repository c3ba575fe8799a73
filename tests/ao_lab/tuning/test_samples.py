"""What a step on a sample writes to a model is put back, whatever holds it.

Experts are tuned as layers are: their products on sorted tokens, and which of them run in low precision.

What a choice goes by, of times of the host and of the GPU.
"""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

import ao_lab
from ao_lab.gemm import choices
from ao_lab.gemm.choices import Choice, problem_of
from ao_lab.training.grouped import products
from ao_lab.training.grouped.autograd import grouped_linear
from ao_lab.tuning import experts
from ao_lab.tuning.measure import HOST_MARGIN, _timing, relative_error
from ao_lab.tuning.samples import ExpertsSample, untouched
from reference.training.recipe import RECIPES
from tests.ao_lab.training.grouped.test_experts import F, GroupedExperts, TransformersLike
from tests.support.grouped_cases import OFFSETS, E, K, N, T, offsets_of, tensors


class Writes(nn.Module):
    """Buffers, a codebook of moving averages, caches and counters that a forward writes to."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(64), nn.Linear(64, 64)
        self.register_buffer("codebook", torch.ones(4))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("late", None)
        self.generator = torch.Generator().manual_seed(3)
        self.cache, self.calls, self.last, self.by_name = [torch.zeros(2)], 0, None, {"a": torch.ones(1)}

    def forward(self, x):
        with torch.no_grad():
            self.codebook.mul_(0.5)
            self.cache[0].add_(1)
        self.replaced, self.late, self.last = self.replaced + 1, torch.ones(1), x.detach()
        self.cache.append(x.detach())
        self.by_name["b"], self.made = x, torch.ones(3)
        self.calls += 1
        torch.rand(1, generator=self.generator)
        np.random.rand(random.randrange(1, 3))  # noqa: NPY002
        return self.linear(self.norm(x))


def state(module):
    return {
        **module.state_dict(), "cache": list(module.cache), "calls": module.calls, "last": module.last, "late": module.late,
        "by_name": dict(module.by_name), "made": getattr(module, "made", None), "drawn": module.generator.get_state(),
        "random": random.getstate(), "torch": torch.get_rng_state(), "numpy": np.random.get_state()[1],  # noqa: NPY002
        "modes": [m.training for m in module.modules()],
    }  # fmt: skip


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_same(value, other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert np.array_equal(one, other)


@pytest.fixture(autouse=True)
def quick(no_choices, monkeypatch):
    monkeypatch.setattr("ao_lab.tuning.measure.SECONDS", 0.0)


def test_tuning_leaves_no_state():
    model = Writes()
    ao_lab.convert_for_training_(model, "rowwise")
    x = torch.randn(40, 64, requires_grad=True)
    model(x.detach())
    held, buffers = {name: id(b) for name, b in model.named_buffers()}, model.cache[0]
    before = copy.deepcopy(state(model))

    def run(model):
        model.eval()
        model.train()
        model.norm.eval()
        return model(x).square().mean()

    for sample in (run, x, (x,), {"x": x}):
        ao_lab.tune(model, sample)
        assert_same(state(model), before)
    assert {name: id(b) for name, b in model.named_buffers()} == held
    assert model.cache[0] is buffers
    assert all(p.grad is None for p in model.parameters())


def test_gradients_of_the_sample_are_as_they_were():
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    for given, call in ((x, layer), ((x,), lambda t: layer(*t)), ({"input": x}, lambda t: layer(**t))):
        with untouched(layer, given):
            call(given).sum().backward()
        assert x.grad is None
    x.grad = torch.ones(2, 4)
    with untouched(layer, x):
        x.grad = None
    assert torch.equal(x.grad, torch.ones(2, 4))


def test_optimizers_inside_of_backward_do_not_step():
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)

    def step(parameter):
        optimizer.step()
        parameter.grad = None

    for parameter in layer.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    weight = layer.weight.detach().clone()
    with untouched(layer):
        layer(torch.ones(2, 4)).sum().backward()
    assert torch.equal(layer.weight, weight)
    layer(torch.ones(2, 4)).sum().backward()
    assert not torch.equal(layer.weight, weight)


def test_parameters_that_are_written_to_are_told_of():
    layer = nn.Linear(4, 4)

    def write():
        with untouched(layer):
            layer.bias.detach().add_(1)

    with pytest.warns(UserWarning, match=r"wrote to 1 parameters, which tune does not put back: bias;"):
        write()


def test_all_comes_back_after_an_error():
    model = Writes()
    before = copy.deepcopy(state(model))

    def fail():
        with untouched(model):
            model(torch.randn(3, 64))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert_same(state(model), before)


CPU = torch.device("cpu")
TOKENS, WIDTH = 24, 32
DIRECTIONS = {"output", "input_grad", "weight_grad", "training"}


def model(**kind):
    torch.manual_seed(0)
    net = TransformersLike(**kind).bfloat16()
    ao_lab.convert_for_training_(net, "rowwise")
    return net


def inputs():
    """Each of the tokens goes to two experts."""
    torch.manual_seed(1)
    x = torch.randn(TOKENS, WIDTH).bfloat16()
    return x, torch.rand(TOKENS, 4).topk(2).indices, torch.rand(TOKENS, 2).bfloat16()


def test_both_projections_in_all_directions():
    net = model(transposed=True)
    grads, before = [p.grad for p in net.parameters()], copy.deepcopy(net.state_dict())
    made = ao_lab.tune(net, inputs(), rows=[300]).choices
    assert {(c.problem.direction, c.problem.experts, c.problem.rows) for c in made} == {
        (direction, 4, rows) for direction in DIRECTIONS for rows in (64, 512)
    }
    assert len(made) == 16
    assert {c.kernel for c in made if c.problem.direction != "training"} == {"emulate"}
    assert all(0 < c.candidate.error < 0.05 for c in made)
    listed = {layer.name: layer.tuned for layer in ao_lab.explain(net).layers}
    assert set(listed["gate_up_proj"]) | set(listed["down_proj"]) == set(made)
    assert [len(found) for found in listed.values()] == [8, 8]
    assert "tuned: output of 4 experts 128x32, tokens <= 64: emulate (" in str(ao_lab.explain(net))
    assert [p.grad for p in net.parameters()] == grads
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), before.values(), strict=True))


def test_a_budget_that_nothing_meets_leaves_experts_dense():
    net, (x, *routes) = model(), inputs()
    low = net(x, *routes)
    made = ao_lab.tune(net, (x, *routes), error_budget=1e-3)
    assert {c.kernel for c in made.choices if c.problem.direction == "training"} == {"dense"}
    plain = copy.deepcopy(net)
    ao_lab.convert_from_training_(plain)
    ao_lab.convert_for_training_(plain, "bf16")
    assert torch.equal(net(x, *routes), plain(x, *routes))
    assert not torch.equal(net(x, *routes), low)
    with choices.default_choices():
        assert torch.equal(net(x, *routes), low)


def test_experts_that_their_module_multiplies_one_by_one():
    net = GroupedExperts("loop").bfloat16()
    ao_lab.convert_for_training_(net, "rowwise")
    made = ao_lab.tune(net, (inputs()[0], torch.tensor([6, 6, 6, 6]))).choices
    assert {(c.problem.experts, c.problem.n) for c in made if c.problem.direction == "output"} == {
        (1, F), (1, WIDTH), (0, WIDTH)
    }  # fmt: skip
    assert all(len(layer.tuned) == 4 for layer in ao_lab.explain(net).layers)


@pytest.mark.parametrize("direction", ["output", "input_grad", "weight_grad"])
def test_a_chosen_function_is_followed(direction, monkeypatch):
    """For its direction, number of experts and range of rows alone."""
    asked = []
    monkeypatch.setattr(products, "_select", lambda ends, kernel, scaled: asked.append(kernel) or "emulate")
    x, w, g = tensors()
    record, offsets = getattr(RECIPES["rowwise"], direction), offsets_of("uneven")
    shape = {"output": (T, N, K), "input_grad": (T, K, N), "weight_grad": (N, K, T)}[direction]
    keys = record.a.scheme.key, record.b.scheme.key
    problem = problem_of(direction, *keys, shape, x.dtype, record.accumulation, E)
    choices.choices_for(CPU).add(Choice(problem, "grouped_mm"))

    def step(x, w, offsets, g):
        asked.clear()
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        grouped_linear(*leaves, offsets, RECIPES["rowwise"]).backward(g)
        return list(asked)

    names = ["output", "input_grad", "weight_grad"]
    assert step(x, w, offsets, g) == ["dequantize" if name == direction else "auto" for name in names]
    assert step(x, w[:2], offsets[:2], g) == ["auto"] * 3
    few = step(x[:7], w, offsets.clamp(max=7), g[:7])
    assert few == ["auto"] * 3


@pytest.mark.parametrize("situation", OFFSETS)
def test_errors_are_those_of_exact_products(situation):
    """Of dense operands in float32 next to none, whatever groups there are."""
    x, w, g = tensors(torch.float32)
    for one in experts.products_of(ExpertsSample("", RECIPES["bf16"], offsets_of(situation), x, w, g)):
        assert one.exact().dtype == torch.float64
        assert relative_error(one.part(one.run("emulate")), one.exact()) < 1e-6


@pytest.mark.parametrize(
    ("default", "candidates"),
    [
        ("emulate", ["emulate"]),
        ("grouped_mm", ["grouped_mm"]),
        ("scaled_grouped_mm", ["scaled_grouped_mm", "grouped_mm"]),
    ],
)
def test_candidates_of_each_device(default, candidates, monkeypatch):
    monkeypatch.setattr(products, "_select", lambda ends, kernel, scaled: default)
    x, w, g = tensors()
    made = list(experts.products_of(ExpertsSample("", RECIPES["rowwise"], offsets_of("uneven"), x, w, g)))
    assert [one.problem.direction for one in made] == ["output", "input_grad", "weight_grad"]
    assert all(list(one.calls) == candidates for one in made)
    assert all(sorted([*one.calls, *one.refused]) == sorted(products.PRODUCTS) for one in made)


def test_more_rows_have_the_shares_of_the_sample():
    x, w, g = tensors()
    one = ExpertsSample("", RECIPES["rowwise"], offsets_of("uneven"), x, w, g).of_rows(2 * T)
    assert one.offsets.tolist() == [14, 14, 120, 166]
    assert one.offsets.dtype == torch.int32
    assert (one.x.shape[0], one.g.shape[0]) == (2 * T, 2 * T)
    assert torch.equal(one.x[T:], x)


GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("host", "launches", "seconds"),
    [
        (1e-4, "eager", 3e-4), (1.9e-4, "eager", 3e-4), (2.1e-4, "eager", 2.1e-4 * HOST_MARGIN), (4e-4, "eager", 6e-4),
        (4e-4, "graph", 3e-4),
    ],
)  # fmt: skip
def test_a_choice_for_eager_mode_bears_a_busy_host(host, launches, seconds):
    """Host times are of an idle machine: they count with a margin; of a graph they count not at all."""
    made = _timing([3e-4] * 5, host, GPU, launches)
    assert made.seconds == pytest.approx(seconds, rel=1e-12)
    assert (made.host, made.gpu) == (host, 3e-4)
