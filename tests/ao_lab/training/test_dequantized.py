"""Products of values: which recipes take this way by themselves, what is read once, and that tracers change no bit."""

import types
from dataclasses import replace

import pytest
import torch

from ao_lab.training import autograd, dequantized
from ao_lab.training.autograd import training_linear
from reference.training.recipe import RECIPES, saving_codes

M, K, N = 64, 128, 192
BY_VALUES = ["mxfp8", "mxfp6", "mxfp4", "nvfp4"]


@pytest.fixture
def by_values(monkeypatch):
    """Every layer takes this way, on a CPU too."""
    monkeypatch.setattr(autograd, "serves", lambda *call: True)


def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in ((M, K), (N, K), (M, N))]


def step(function, recipe, bias=None):
    """y, dx and dw."""
    x, w, g = tensors()
    x, w = x.requires_grad_(), w.requires_grad_()
    torch.manual_seed(3)
    y = function(x, w, bias, recipe)
    return [y.detach(), *torch.autograd.grad(y, (x, w), g)]


def serves(recipe, kernel="auto", dtype=torch.bfloat16):
    x, w, _ = (t.to(dtype) for t in tensors())
    return dequantized.serves(x, w, None, recipe, kernel)


@pytest.mark.parametrize("fp8", [True, False])
def test_recipes_that_no_product_of_codes_serves(monkeypatch, fp8):
    """Blocks of 32 and 16 by themselves; all quantized ones where it is asked for; none without FP8 units, which emulate."""
    monkeypatch.setattr(dequantized, "has_kernels", lambda x: True)
    monkeypatch.setattr(dequantized, "has_fp8", lambda device: fp8)
    assert [name for name in RECIPES if serves(RECIPES[name])] == (BY_VALUES if fp8 else [])
    assert serves(saving_codes(RECIPES["mxfp8"])) == fp8
    quantized = [name for name in RECIPES if name not in ("bf16", "rowwise_with_gw_hp")]
    assert [name for name in RECIPES if serves(RECIPES[name], "dequantize")] == quantized
    assert not serves(RECIPES["mxfp8"], "emulate")
    assert not serves(RECIPES["mxfp8"], dtype=torch.float32)


def test_on_a_cpu_none():
    assert not any(serves(recipe, kernel) for recipe in RECIPES.values() for kernel in ("auto", "dequantize"))


@pytest.mark.parametrize(
    ("name", "once"), [("mxfp8", 2), ("mxfp8_codes", 1), ("mxfp6", 2), ("mxfp4", 0), ("nvfp4", 0)]
)
def test_what_is_quantized_alike_along_both_axes_is_read_once(by_values, monkeypatch, name, once):
    """x of the same scheme for the output and the weight gradient, and the output's gradient."""
    recipe, calls = saving_codes(RECIPES["mxfp8"]) if name == "mxfp8_codes" else RECIPES[name], []
    for function in ("both_values", "values_and_codes"):
        real = getattr(dequantized, function)
        monkeypatch.setattr(
            dequantized, function, lambda *given, real=real: calls.append(real.__name__) or real(*given)
        )
    step(training_linear, recipe)
    assert len(calls) == once


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_one_gradient_alone(by_values, wanted):
    """It is the one of both, and the other tensor of values is not made."""
    x, w, g = tensors()
    whole = step(training_linear, RECIPES["mxfp8"])
    leaves = [t.requires_grad_(flag) for t, flag in zip((x, w), wanted, strict=True)]
    y = training_linear(x, w, None, RECIPES["mxfp8"])
    y.backward(g)
    for leaf, flag, truth in zip(leaves, wanted, whole[1:], strict=True):
        assert torch.equal(leaf.grad, truth) if flag else leaf.grad is None


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_codes", "mxfp6", "hadamard"])
def test_compiled_in_one_graph(by_values, name):
    """The same bits; what is mixed and not drawn among it."""
    recipe = RECIPES["mxfp8" if name == "mxfp8_codes" else "mxfp6" if name == "hadamard" else name]
    if name == "mxfp8_codes":
        recipe = saving_codes(recipe)
    if name == "hadamard":
        product = recipe.weight_grad
        mixed = {side: replace(getattr(product, side), hadamard=32) for side in "ab"}
        recipe = replace(recipe, name="mixed", weight_grad=replace(product, **mixed))
    torch._dynamo.reset()
    compiled = torch.compile(training_linear, backend="aot_eager", fullgraph=True)
    for found, wanted in zip(step(compiled, recipe), step(training_linear, recipe), strict=True):
        assert torch.equal(found, wanted)


# Dynamo looks at the output where it goes on after the break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_steps_that_draw_are_left_to_eager(by_values, name):
    """A compiled program breaks there, and draws the same seed."""
    torch._dynamo.reset()
    compiled = torch.compile(training_linear, backend="aot_eager")
    for found, wanted in zip(
        step(compiled, RECIPES[name]), step(training_linear, RECIPES[name]), strict=True
    ):
        assert torch.equal(found, wanted)


def test_under_a_tracer_devices_decide(monkeypatch):
    """The same recipes as in eager, those that draw among them."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(dequantized, "has_fp8", lambda device: True)
    x, w = (
        types.SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device=torch.device("cuda")),
        torch.empty(N, K, dtype=torch.bfloat16),
    )
    assert [name for name in RECIPES if dequantized.serves(x, w, None, RECIPES[name], "auto")] == BY_VALUES
