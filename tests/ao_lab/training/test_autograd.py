"""Training linears have the operands of the specification, and its outputs and gradients within derived bounds: under
autograd, torch.func, modes and tracers, and at edges of inputs."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import ao_lab
import reference
from ao_lab.testing.strategies import assert_same_quantized
from ao_lab.training import autograd, casts
from ao_lab.training.autograd import training_linear
from ao_lab.training.casts import STREAMS, quantize_one, quantize_two
from fast.layers import column_sums
from reference import Quantized
from reference.matmul.linear import transposed
from reference.training.linear import operands
from reference.training.recipe import RECIPES, recipe_of, saving_codes
from tests.ao_lab.training.grouped.test_experts import GroupedExperts, Layer
from tests.support.refusals import refused


def support_layer(name, outputs=32):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, outputs))
    ao_lab.convert_for_training_(net, name, pad=True)
    return net


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torch_jit_trace_is_refused():
    """The reference computes with values that a trace would keep as constants."""
    net, x = support_layer("rowwise"), torch.randn(4, 64)
    with pytest.raises(
        ValueError, match=r"LowPrecisionLinear\(in_features=64, out_features=32\): torch.jit.trace"
    ):
        torch.jit.trace(net, (x,))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_experts_are_refused():
    """By transforms of torch.func as by torch.jit.trace, whichever forward they have."""
    for net, given in ((Layer(), ()), (GroupedExperts("batch"), (torch.full((4,), 2),))):
        ao_lab.convert_for_training_(net, "rowwise")
        x = torch.randn(8, 32)
        with pytest.raises(NotImplementedError, match=r"4 experts of \(\d+, \d+\) .* torch.func"):
            torch.func.grad(lambda x, net=net, given=given: net(x, *given).sum())(x)
        refused(ValueError, r"4 experts of .*torch.jit.trace", torch.jit.trace, net, (x, *given))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_dual_numbers_are_refused():
    net = support_layer("rowwise")
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=r"in_features=64.*forward-mode"):
        net(forward_ad.make_dual(torch.randn(4, 64), torch.randn(4, 64)))


@pytest.mark.parametrize(
    "name", ["mxfp4", *(pytest.param(one, marks=pytest.mark.nightly) for one in RECIPES if one != "mxfp4")]
)
def test_fake_tensors(name):
    """Shapes of outputs and gradients, without a value."""
    with FakeTensorMode():
        net, x = support_layer(name), torch.randn(7, 64, requires_grad=True)
        y = net(x)
        y.sum().backward()
    assert (y.shape, x.grad.shape, net[0].weight.grad.shape) == ((7, 32), (7, 64), (32, 64))


@pytest.mark.parametrize("name", ["nvfp4", pytest.param("mxfp4", marks=pytest.mark.nightly)])
def test_seeds_do_not_know_the_default_device(name):
    net, x = support_layer(name), torch.randn(32, 64)
    grads = []
    for device in ("cpu", "meta"):
        net.zero_grad()
        torch.manual_seed(3)
        with torch.device(device):
            net(x).sum().backward()
        grads.append(net[0].weight.grad.clone())
    assert torch.equal(*grads)


def test_only_bytes_are_transposed_as_bytes():
    """On every device: a kernel for bytes reads other elements as twice or four times as many of them."""
    codes = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
    assert torch.equal(casts.transposed(codes), codes.t())
    with pytest.raises(
        TypeError, match=r"one-byte codes, got torch\.bfloat16 of shape \(3, 4\); use x\.t\(\)"
    ):
        casts.transposed(codes.to(torch.bfloat16))


@pytest.mark.parametrize("name", ["rowwise", pytest.param("mxfp4", marks=pytest.mark.nightly)])
def test_layers_without_outputs(name):
    """Gradients of zeros, as of nn.Linear."""
    with pytest.warns(UserWarning, match="zero-element"):
        net = support_layer(name, outputs=0)
    x = torch.randn(4, 64, requires_grad=True)
    y = net(x)
    y.sum().backward()
    assert y.shape == (4, 0)
    assert torch.equal(x.grad, torch.zeros(4, 64))
    assert net[0].weight.grad.shape == (0, 64)


def test_inputs_without_an_axis():
    with pytest.raises(ValueError, match=r"inputs are at least 1D; got shape \(\)"):
        support_layer("rowwise")(torch.tensor(1.0))


@pytest.mark.parametrize("name", ["rowwise", pytest.param("mxfp4", marks=pytest.mark.nightly)])
def test_autocast_leaves_float64(name):
    """As torch's layers do."""
    net = support_layer(name).double()
    x = torch.randn(4, 64, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        y = net(x)
    assert y.dtype == torch.float64
    assert torch.equal(y, net(x))


@pytest.mark.parametrize("name", ["nvfp4", pytest.param("mxfp4", marks=pytest.mark.nightly)])
def test_evaluation_draws_nothing(name):
    """Nor makes it the copy for the weight gradient; a forward of training without gradients draws as one with them, as
    recomputation counts on."""
    net, x = support_layer(name), torch.randn(32, 64)
    state = torch.get_rng_state()
    with torch.no_grad():
        net.eval()(x)
    assert torch.equal(torch.get_rng_state(), state)
    routed = Layer()
    ao_lab.convert_for_training_(routed, name)
    state = torch.get_rng_state()
    with torch.no_grad():
        routed.eval()(torch.randn(32, 32, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), state)
    after = []
    for grad in (True, False):
        torch.set_rng_state(state)
        with torch.set_grad_enabled(grad):
            net.train()(x)
        after.append(torch.get_rng_state())
    assert torch.equal(*after)
    assert not torch.equal(after[0], state)


def test_recomputed_layers_draw_other_bits():
    """Reentrant checkpointing: the generator goes on from one layer to the next."""
    torch.manual_seed(0)
    seen, net = [], nn.Sequential(*(nn.Linear(64, 64) for _ in range(2)))
    ao_lab.convert_for_training_(net, "mxfp4")
    x = torch.randn(32, 64, requires_grad=True)
    for one in net:
        checkpoint(lambda x, one=one: one(x), x, use_reentrant=True)
        seen.append(torch.get_rng_state())
    assert not torch.equal(*seen)


@pytest.mark.parametrize("name", ["rowwise", pytest.param("mxfp8", marks=pytest.mark.nightly)])
def test_evaluation_casts_once(name, monkeypatch):
    """Not along both axes, as nothing is kept."""
    monkeypatch.setattr(casts.fast, "quantize_both", None)
    net = support_layer(name)
    with torch.no_grad():
        net(torch.randn(32, 64))
    refused(TypeError, "not callable", net, torch.randn(32, 64))


def layer(name, inputs=64):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(inputs, 32))
    ao_lab.convert_for_training_(net, name, pad=True)
    return net, dict(net.named_parameters())


def loss(net):
    return lambda parameters, x: functional_call(net, parameters, (x,)).square().mean()


def by_autograd(net, x):
    net.zero_grad()
    net(x).square().mean().backward()
    return {name: p.grad.clone() for name, p in net.named_parameters()}


@pytest.mark.parametrize(
    "name",
    ["rowwise", *(pytest.param(one, marks=pytest.mark.nightly) for one in RECIPES if one != "rowwise")],
)
def test_gradients_are_those_of_autograd(name):
    """Of parameters and of inputs, padded and not; under one seed the same random bits."""
    for inputs in (64, 40):
        net, parameters = layer(name, inputs)
        x = torch.randn(32, inputs)
        torch.manual_seed(1)
        found = torch.func.grad(loss(net))(parameters, x)
        torch.manual_seed(1)
        for key, truth in by_autograd(net, x).items():
            torch.testing.assert_close(found[key], truth)
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        net(leaf).square().mean().backward()
        torch.manual_seed(1)
        torch.testing.assert_close(torch.func.grad(loss(net), 1)(parameters, x), leaf.grad)


@pytest.mark.parametrize("name", ["tensorwise", pytest.param("blockwise", marks=pytest.mark.nightly)])
def test_each_example_has_scales_of_its_own(name):
    """Outputs and gradients of vmap are those of a loop, whatever else is in the batch."""
    net, parameters = layer(name)
    x = torch.randn(3, 32, 64) * torch.tensor([1e-3, 1, 1e3])[:, None, None]
    assert torch.equal(torch.vmap(net)(x), torch.stack([net(one) for one in x]))
    found = torch.vmap(torch.func.grad(loss(net)), (None, 0))(parameters, x)
    for at in range(3):
        for key, truth in by_autograd(net, x[at]).items():
            assert torch.equal(found[key][at], truth)


def test_jacobians():
    """A row of the Jacobian is the gradient of one output."""
    net, _ = layer("rowwise")
    x = torch.randn(2, 64)
    found = torch.func.jacrev(net)(x)
    leaf = x.clone().requires_grad_()
    net(leaf)[1, 3].backward()
    assert torch.equal(found[1, 3], leaf.grad)


@pytest.mark.parametrize("name", ["mxfp4", pytest.param("nvfp4", marks=pytest.mark.nightly)])
def test_random_bits(name):
    """Examples that are equal are rounded otherwise, unless vmap is told that they are not."""
    net, parameters = layer(name)
    x = torch.randn(1, 32, 64).expand(2, 32, 64)
    for randomness, same in (("different", False), ("same", True)):
        grads = torch.vmap(torch.func.grad(loss(net)), (None, 0), randomness=randomness)(parameters, x)
        weight = grads["0.weight"]
        assert torch.equal(weight[0], weight[1]) == same


# torch's forward mode compiles decompositions by torch.jit.script when it is first used.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("transform", "named"),
    [
        (lambda f, x: torch.func.jvp(f, (x,), (x,)), "tangents"),
        (lambda f, x: torch.func.jacfwd(f)(x), "tangents"),
        (lambda f, x: torch.func.hessian(f)(x), "gradients"),
        (lambda f, x: torch.func.grad(lambda x: torch.func.grad(f)(x).sum())(x), "gradients"),
    ],
)
def test_what_is_not_defined_says_so(transform, named):
    net, _ = layer("rowwise")
    with pytest.raises(NotImplementedError, match=f"LowPrecisionLinear trains with a recipe.*{named}"):
        transform(lambda x: net(x[None]).square().sum(), torch.randn(64))


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
    dx, dw, _ = reference.training_linear_vjp(g, x, w, name, seed=fixed_seed)
    named = {"x": x, "w": w, "g": g, "seed": fixed_seed}
    for which, found, truth in (
        ("output", y, reference.training_linear(x, w, name, bias)),
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
    assert torch.equal(bias.grad, reference.training_linear_vjp(g, x, w, "rowwise")[2])


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
    for again in (False, True):
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        if again:
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
    refused(RuntimeError, "has no second derivatives", dx.square().sum().backward)


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
