"""SwiGLU with the linear layer behind it: the bits of the two parts, and what is kept for backward."""

import pytest
import torch
from torch import nn

import ao_lab
import fast
from ao_lab.training.autograd import training_linear
from ao_lab.training.fused.swiglu_linear import SwiGLULinear, served_recipe, swiglu_linear
from reference.training import RECIPES

M, K, N = 128, 256, 128
SERVED = ("tensorwise", "rowwise", "blockwise", "mxfp8")


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


def test_nothing_is_kept_but_what_the_parts_keep_anyway():
    down, (gate, up) = layer("rowwise"), halves()
    y = swiglu_linear(gate, up, down)
    assert isinstance(y.grad_fn, SwiGLULinear._backward_cls)
    assert [t.data_ptr() for t in y.grad_fn.saved_tensors] == [t.data_ptr() for t in (gate, up, down.weight)]


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "rowwise_with_gw_hp"])
def test_recipes_that_mix_draw_or_stay_dense_go_by_parts(name):
    assert served_recipe(*halves(), layer(name)) is None


@pytest.mark.parametrize(
    "why", ["hook", "forward", "plain", "no_grad", "gate alone", "autocast", "rows", "kernel"]
)
def test_layers_that_go_by_parts(why):
    down, (gate, up) = layer("blockwise"), halves()
    assert served_recipe(gate, up, down) is not None
    if why == "hook":
        down.register_forward_hook(lambda *_: None)
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
def test_compiled_in_one_graph():
    down, (gate, up) = layer("rowwise"), halves()
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
