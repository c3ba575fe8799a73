"""SwiGLU with the linear layer behind it: the bits of the two parts, and what is kept for backward."""

import pytest
import torch
from torch import nn

import ao_lab
import fast
from ao_lab.training import dequantized
from ao_lab.training.autograd import training_linear
from ao_lab.training.dequantized import dequantized_linear
from ao_lab.training.fused_swiglu import SwiGLULinear, SwiGLUValuesLinear, served_recipe, swiglu_linear
from reference.training import RECIPES

M, K, N = 128, 256, 128
SERVED = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8")


def layer(recipe, bias=True):
    torch.manual_seed(0)
    down = nn.Sequential(nn.Linear(K, N, bias=bias, dtype=torch.bfloat16))
    ao_lab.convert_for_training_(down, recipe)
    return down[0]


def halves(shape=(2, M // 2, K)):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).bfloat16().requires_grad_() for _ in range(2)]


def step(run, leaves):
    y = run()
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    return [y.detach(), *torch.autograd.grad(y, leaves, g)]


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", SERVED)
def test_bits_of_the_two_parts(name, bias):
    down, (gate, up) = layer(name, bias), halves()
    leaves = [gate, up, down.weight, *([down.bias] if bias else [])]
    found = step(lambda: swiglu_linear(gate, up, down), leaves)
    parts = step(
        lambda: training_linear(fast.swiglu(gate, up), down.weight, down.bias, RECIPES[name]), leaves
    )
    assert all(torch.equal(a, b) for a, b in zip(found, parts, strict=True))


@pytest.fixture
def by_values(monkeypatch):
    """Products run on values, on a CPU too."""
    monkeypatch.setattr(dequantized, "serves", lambda *call: True)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp6"])
def test_bits_of_the_two_parts_by_values(by_values, name, bias):
    down, (gate, up) = layer(name, bias), halves()
    leaves = [gate, up, down.weight, *([down.bias] if bias else [])]
    found = step(lambda: swiglu_linear(gate, up, down), leaves)

    def by_parts():
        x = fast.swiglu(gate, up).reshape(M, K)
        return dequantized_linear(x, down.weight, down.bias, RECIPES[name], lambda recipe: None).view(
            2, -1, N
        )

    assert all(torch.equal(a, b) for a, b in zip(found, step(by_parts, leaves), strict=True))


def test_no_gradient_of_a_frozen_weight_by_values(by_values):
    down, (gate, up) = layer("mxfp8"), halves()
    whole = step(lambda: swiglu_linear(gate, up, down), [gate, up])
    down.weight.requires_grad_(False)
    found = step(lambda: swiglu_linear(gate, up, down), [gate, up])
    assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("rowwise", SwiGLULinear), ("rowwise_with_gw_hp", SwiGLULinear), ("mxfp8", SwiGLUValuesLinear)],
)
def test_nothing_is_kept_but_what_the_parts_keep_anyway(monkeypatch, name, kind):
    monkeypatch.setattr(dequantized, "serves", lambda *call: name == "mxfp8")
    down, (gate, up) = layer(name), halves()
    y = swiglu_linear(gate, up, down)
    assert isinstance(y.grad_fn, kind._backward_cls)
    assert [t.data_ptr() for t in y.grad_fn.saved_tensors] == [t.data_ptr() for t in (gate, up, down.weight)]


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "bf16"])
def test_recipes_that_mix_draw_or_stay_dense_go_by_parts(name):
    assert served_recipe(*halves(), layer(name)) is None


@pytest.mark.parametrize(
    "why", ["hook", "global hook", "forward", "plain", "no_grad", "gate alone", "autocast", "rows", "kernel"]
)
def test_layers_that_go_by_parts(why, request):
    down, (gate, up) = layer("blockwise"), halves()
    assert served_recipe(gate, up, down) is not None
    if why == "hook":
        down.register_forward_hook(lambda *_: None)
    if why == "global hook":
        request.addfinalizer(nn.modules.module.register_module_forward_hook(lambda *_: None).remove)
    if why == "forward":
        down.forward = down.forward
    if why == "plain":
        down = nn.Linear(K, N)
    if why == "gate alone":
        up = up.detach()
    if why == "rows":
        gate, up = (t[:, :5].detach().requires_grad_() for t in (gate, up))
    if why == "kernel":
        down = nn.Sequential(nn.Linear(K, N, dtype=torch.bfloat16))
        ao_lab.convert_for_training_(down, "blockwise", kernel="emulate")
        down = down[0]
    with torch.set_grad_enabled(why != "no_grad"), torch.autocast("cpu", enabled=why == "autocast"):
        assert served_recipe(gate, up, down) is None


def test_a_hook_is_called():
    down, seen = layer("rowwise"), []
    down.register_forward_hook(lambda module, given, y: seen.append(y.shape))
    swiglu_linear(*halves(), down)
    assert seen == [(2, M // 2, N)]


def test_no_gradient_of_a_weight_that_is_frozen():
    down, (gate, up) = layer("rowwise"), halves()
    down.weight.requires_grad_(False)
    d_gate, d_up = torch.autograd.grad(
        swiglu_linear(gate, up, down), (gate, up), torch.ones(2, M // 2, N).bfloat16()
    )
    wanted = torch.autograd.grad(down(fast.swiglu(gate, up)), (gate, up), torch.ones(2, M // 2, N).bfloat16())
    assert torch.equal(d_gate, wanted[0])
    assert torch.equal(d_up, wanted[1])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", ["rowwise", "rowwise_with_gw_hp", "mxfp8"])
def test_compiled_in_one_graph(monkeypatch, name):
    monkeypatch.setattr(dequantized, "serves", lambda *call: name == "mxfp8")
    down, (gate, up) = layer(name), halves()
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda gate, up: swiglu_linear(gate, up, down), backend="aot_eager", fullgraph=True
    )
    leaves = [gate, up, down.weight]
    results = [
        step(lambda run=run: run(gate, up), leaves)
        for run in (lambda gate, up: swiglu_linear(gate, up, down), compiled)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
