"""Training linears have the operands of the specification, and its outputs and gradients within derived bounds."""

import pytest
import torch

import reference
import reference.training
from ao_lab.testing.strategies import assert_same_quantized
from ao_lab.training import autograd
from ao_lab.training.autograd import training_linear
from ao_lab.training.casts import STREAMS, quantize_one, quantize_two
from fast.layers import column_sums
from reference import Quantized
from reference.matmul.linear import transposed
from reference.training import RECIPES
from reference.training.linear import operands
from reference.training.recipe import recipe_of, saving_codes

M, K, N = 128, 384, 256


def tensors(dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(M, K, generator=generator).to(dtype)
    w = (torch.randn(N, K, generator=generator) / 20).to(dtype)
    g = (torch.randn(M, N, generator=generator) / 1000).to(dtype)
    return x, w, g


@pytest.fixture
def fixed_seed(monkeypatch):
    monkeypatch.setattr(autograd, "new_seed", lambda recipe: 7)
    return 7


def bound_of(which, recipe, dtype, bias=None, **tensors):
    """How far float32 sums in any order may lie from the correctly rounded result: both lie within a bound of the real sum."""
    a, b = operands(which, recipe, **tensors)
    b = transposed(b) if isinstance(b, Quantized) else b.T
    return sum(
        reference.matmul_error_bound(a, b, accumulation=tier, out_dtype=dtype, bias=bias)
        for tier in ("blocked", "exact")
    )


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_output_and_gradients(name, dtype, fixed_seed):
    """float32 sums of the operands of the reference."""
    assert_step(name, dtype, fixed_seed)


@pytest.mark.parametrize("name", ["mxfp8_codes", "mxfp4", "nvfp4"])
def test_products_of_values(name, fixed_seed, monkeypatch):
    """The same, where operands are values in their tensor's layout: nothing of it depends on a device."""
    recipe = saving_codes(RECIPES["mxfp8"]) if name == "mxfp8_codes" else RECIPES[name]
    monkeypatch.setattr(autograd, "serves", lambda *call: True)
    # bfloat16 rounds what two levels of scales make.
    assert_step(recipe, "float32" if name == "nvfp4" else "bfloat16", fixed_seed)


def assert_step(name, dtype, fixed_seed):
    recipe = recipe_of(name)
    x, w, g = tensors(getattr(torch, dtype))
    bias = torch.linspace(-1, 1, N).to(x.dtype)
    leaves = [t.clone().requires_grad_() for t in (x, w, bias)]
    y = training_linear(*leaves, recipe)
    y.backward(g)
    dx, dw, _ = reference.training.training_linear_vjp(g, x, w, name, seed=fixed_seed)
    named = {"x": x, "w": w, "g": g, "seed": fixed_seed}
    for which, found, truth in (
        ("output", y, reference.training.training_linear(x, w, name, bias)),
        ("input_grad", leaves[0].grad, dx),
        ("weight_grad", leaves[1].grad, dw),
    ):
        assert found.dtype == truth.dtype == x.dtype
        bound = bound_of(which, name, dtype, bias if which == "output" else None, **named)
        assert bool(((found.double() - truth.double()).abs() <= bound).all())


@pytest.mark.parametrize("shape", [(2, 64, K), (128, 1, K), (K,), (0, 16, K)])
def test_inputs_of_any_rank(shape):
    """As the matrix of all rows; the output is no view, which hooks of FSDP2 would lose."""
    x, w = torch.randn(shape).bfloat16(), tensors()[1]
    flat, recipe = x.reshape(x.numel() // K, K), RECIPES["rowwise"]
    leaves = [t.clone().requires_grad_() for t in (x, flat)]
    y, truth = (training_linear(leaf, w, None, recipe) for leaf in leaves)
    assert not y._is_view()
    assert torch.equal(y, truth.reshape(*shape[:-1], N))
    for out in (y, truth):
        out.sum().backward()
    assert torch.equal(leaves[0].grad, leaves[1].grad.reshape(shape))


def test_products_of_values_are_no_views(monkeypatch):
    """Neither is the output of the way that runs on a GPU alone; here torch's own layer stands in for it."""
    monkeypatch.setattr(autograd, "serves", lambda *_: True)
    monkeypatch.setattr(
        autograd, "dequantized_linear", lambda x, w, bias, *_: torch.nn.functional.linear(x, w, bias)
    )
    x, w = torch.randn(2, 64, K).bfloat16().requires_grad_(), tensors()[1]
    y = training_linear(x, w, None, RECIPES["mxfp8"])
    assert (y.shape, y._is_view()) == ((2, 64, N), False)
    y.sum().backward()
    assert x.grad.shape == x.shape


def test_the_gradient_of_the_bias():
    """The sum of g's rows in g's dtype; exact where the sum is."""
    x, w, _ = tensors()
    g = torch.arange(M * N).reshape(M, N).remainder(3).to(x.dtype)
    bias = torch.zeros(N, dtype=x.dtype, requires_grad=True)
    training_linear(x, w, bias, RECIPES["rowwise"]).backward(g)
    assert torch.equal(bias.grad, reference.training.training_linear_vjp(g, x, w, "rowwise")[2])


def test_the_gradient_of_the_bias_is_summed_by_column_sums(monkeypatch):
    x, w, g = tensors()
    monkeypatch.setattr(column_sums, "summed", lambda g, dtype: 2 * g[0])
    bias = torch.zeros(N, dtype=x.dtype, requires_grad=True)
    training_linear(x, w, bias, RECIPES["rowwise"]).backward(g)
    assert torch.equal(bias.grad, 2 * g[0])


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "bf16"])
def test_operands_have_the_bits_of_the_reference(name, fixed_seed):
    x, w, g = tensors()
    recipe = RECIPES[name]
    named = {"x": x, "w": w, "g": g, "seed": fixed_seed}
    truth = [
        operand
        for which in ("output", "input_grad", "weight_grad")
        for operand in operands(which, recipe, **named)
    ]
    places = STREAMS["x"], STREAMS["x.T"]
    x_rows, x_columns = quantize_two(x, recipe.output.a, recipe.weight_grad.b, fixed_seed, places)
    w_columns = autograd.weight_columns_of(w, recipe, None, fixed_seed)
    g_rows, g_columns = autograd.gradient_operands(g, recipe, True, True, fixed_seed)
    made = [x_rows, quantize_one(w, recipe.output.b), g_rows, w_columns, g_columns, x_columns]
    for found, want in zip(made, truth, strict=True):
        if isinstance(want, Quantized):
            assert_same_quantized(found, want)
        else:
            assert torch.equal(found, want)


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_only_gradients_that_are_wanted(wanted):
    x, w, g = tensors()
    x, w = (t.requires_grad_(flag) for t, flag in zip((x, w), wanted, strict=True))
    y = training_linear(x, w, None, RECIPES["rowwise"])
    if any(wanted):
        y.backward(g)
    assert [t.grad is not None for t in (x, w)] == list(wanted)


def test_inputs_are_kept_as_codes():
    """A byte an element, and nothing in 16 bits beside the weight."""
    x, w, _ = tensors()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        training_linear(x.requires_grad_(), w.requires_grad_(), None, RECIPES["rowwise"])
    sizes = {(tuple(t.shape), t.dtype) for t in kept if t is not None}
    assert ((K, M), torch.uint8) in sizes
    assert not any(shape in ((M, K), (K, M)) and dtype == torch.bfloat16 for shape, dtype in sizes)


@pytest.mark.parametrize("name", RECIPES)
def test_zero_gradients_give_zeros(name):
    x, w, g = tensors()
    x.requires_grad_(), w.requires_grad_()
    training_linear(x, w, None, RECIPES[name]).backward(torch.zeros_like(g))
    assert not x.grad.any()
    assert not w.grad.any()


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_stay_so(name, bad):
    """The row of the input's gradient and the row of the weight's that the element takes part in."""
    x, w, g = tensors()
    g[3, 5] = bad
    x.requires_grad_(), w.requires_grad_()
    training_linear(x, w, None, RECIPES[name]).backward(g)
    assert not x.grad[3].isfinite().any()
    assert not w.grad[5].isfinite().any()


def test_random_bits_differ_from_step_to_step():
    x, w, g = tensors()
    grads = []
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        training_linear(leaf, w, None, RECIPES["mxfp4"]).backward(g)
        grads.append(leaf.grad)
    assert not torch.equal(*grads)


def test_a_seed_fixes_them():
    grads = []
    x, w, g = tensors()
    for _ in range(2):
        torch.manual_seed(3)
        leaf = x.clone().requires_grad_()
        training_linear(leaf, w, None, RECIPES["mxfp4"]).backward(g)
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def test_checkpointing_repeats_the_same_bits():
    x, w, g = tensors()
    results = []
    for checkpoint in (False, True):
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        if checkpoint:
            y = torch.utils.checkpoint.checkpoint(
                training_linear, *leaves, None, RECIPES["mxfp8"], use_reentrant=False
            )
        else:
            y = training_linear(*leaves, None, RECIPES["mxfp8"])
        y.backward(g)
        results.append([leaf.grad for leaf in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", ["rowwise", "rowwise_with_gw_hp"])
def test_gradients_have_none_of_their_own(name):
    """A penalty on gradients raises, and does not train as if it were a constant."""
    x, w = torch.randn(32, 64).requires_grad_(), torch.randn(32, 64).requires_grad_()
    y = training_linear(x, w, None, RECIPES[name])
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivatives"):
        dx.square().sum().backward()


# Dynamo makes an object of each autograd function that it meets, and torch warns of that.
TRACED = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@TRACED
@pytest.mark.parametrize("name", ["tensorwise", "mxfp8"])
def test_a_traced_layer_of_a_matrix_returns_a_tensor_of_its_own(name):
    """An operation that converts nothing gives back what it got: torch 2.11 then sends the gradient to another tensor."""
    graphs, (x, w, _) = [], tensors(torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, w: training_linear(x, w, None, RECIPES[name]),
        backend=lambda graph, _: graphs.append(graph) or graph,
        fullgraph=True,
    )
    compiled(x.requires_grad_(), w.requires_grad_())
    (returned, *_), _ = graphs[0].fwd_body_0.graph.output_node().args[0]
    assert returned.target is torch.ops.aten._unsafe_view


@TRACED
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_compiled_programs_leave_steps_that_draw_to_eager(name, fixed_seed):
    results, given = [], tensors()
    torch._dynamo.reset()
    for run in (training_linear, torch.compile(training_linear, backend="aot_eager")):
        x, w = (t.detach().clone().requires_grad_() for t in given[:2])
        y = run(x, w, None, RECIPES[name])
        results.append([y, *torch.autograd.grad(y, (x, w), given[2])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    torch._dynamo.reset()
    whole = torch.compile(training_linear, backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="reason: ao_lab: this training recipe rounds stochastically"):
        whole(x, w, None, RECIPES[name])
