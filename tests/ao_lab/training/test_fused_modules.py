"""`convert_for_training_(fuse=True)`: which modules are fused, what they compute, and how all of it is undone; SwiGLU with the
linear layer behind it has the bits of the two parts."""

import copy
import functools
import inspect
import io
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ao_lab
import fast
from ao_lab.training import dequantized
from ao_lab.training.autograd import training_linear
from ao_lab.training.dequantized import dequantized_linear
from ao_lab.training.fused_modules import (
    SwiGLULinear,
    fuse_layers_,
    served_recipe,
    swiglu_linear,
    unfuse_layers_,
)
from experiments.models.llama import TINY_ONE_LAYER, Attention, rotary_tables, scaled_frequencies
from reference.training.recipe import RECIPES

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


@pytest.mark.parametrize("name", ["rowwise", "rowwise_with_gw_hp", "mxfp8"])
def test_nothing_is_kept_but_what_the_parts_keep_anyway(monkeypatch, name):
    monkeypatch.setattr(dequantized, "serves", lambda *call: name == "mxfp8")
    down, (gate, up) = layer(name), halves()
    y = swiglu_linear(gate, up, down)
    assert isinstance(y.grad_fn, SwiGLULinear._backward_cls)
    assert y.grad_fn.by_values == (name == "mxfp8")
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


BF16 = torch.bfloat16


class LaterNorm(nn.Module):
    """As Gemma's: the weight is one less."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(width)), 1e-6

    def forward(self, x):
        return nn.functional.rms_norm(x, x.shape[-1:], 1 + self.weight, self.eps)


class FeedForward(nn.Module):
    """SwiGLU, or with another activation."""

    def __init__(self, width=64, activation=functional.silu):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down_proj, self.activation = nn.Linear(2 * width, width, bias=False), activation

    def forward(self, x):
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


def block(width=64):
    torch.manual_seed(0)
    return nn.Sequential(nn.RMSNorm(width, eps=1e-5), FeedForward(width)).to(BF16)


def inputs():
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).to(BF16).requires_grad_()


def results(model, x):
    """Output and gradients of a step."""
    y = model(x)
    return [y, *torch.autograd.grad(y, [x, *model.parameters()], torch.ones_like(y))]


def test_what_is_fused_computes_what_fast_computes():
    model, x = block(), inputs()
    fuse_layers_(model)
    norm, mlp = model
    y, _ = fast.rms_norm(x, norm.weight, eps=1e-5)
    y = mlp.down_proj(fast.swiglu(mlp.gate_proj(y), mlp.up_proj(y)))
    wanted = [y, *torch.autograd.grad(y, [x, *model.parameters()], torch.ones_like(y))]
    assert all(map(torch.equal, results(model, x), wanted))


def test_it_is_close_to_the_modules_own():
    model, x = block(), inputs()
    own = results(model, x)
    fuse_layers_(model)
    for one, other in zip(results(model, x), own, strict=True):
        assert torch.allclose(
            one.float(), other.float(), rtol=0.05, atol=0.02 * other.float().abs().max().item()
        )


def test_others_are_left_with_the_reason():
    model = nn.ModuleDict(
        {
            "own": nn.RMSNorm(64), "later": LaterNorm(64), "plain": nn.LayerNorm(64),
            "gelu": FeedForward(activation=functional.gelu), "patched": FeedForward(), "good": FeedForward(),
        }
    )  # fmt: skip
    model["patched"].forward = lambda x: x
    fused, left = fuse_layers_(model)
    assert fused == ("good",)
    assert set(left) == {"own", "later", "gelu", "patched"}
    assert "epsilon is not a number" in left["own"]
    assert all("computes otherwise" in left[name] for name in ("later", "gelu"))
    assert "replaced on the module" in left["patched"]


def test_names_parameters_and_hooks_stay_and_it_is_undone():
    model, calls = block(), []
    state, kinds = model.state_dict(), [type(module) for module in model.modules()]
    model[1].register_forward_hook(lambda *_: calls.append(1))
    done = ao_lab.convert_for_training_(model, "rowwise", fuse=True)
    assert done.fused == ("0", "1")
    assert "2 of 2 norms, feed-forwards and attentions are fused" in str(done)
    assert isinstance(model[0], nn.RMSNorm)
    assert isinstance(model[1], FeedForward)
    model(inputs())
    assert calls == [1]
    assert all(
        model.state_dict()[name] is not None and torch.equal(model.state_dict()[name], state[name])
        for name in state
    )
    assert fuse_layers_(model) == ((), {"0": "it is fused already", "1": "it is fused already"})
    assert set(ao_lab.convert_from_training_(model)) >= {"0", "1"}
    assert [type(module) for module in model.modules()] == kinds
    assert not any("fused_names" in vars(module) for module in model.modules())


def test_kinds_are_chosen_by_name():
    model = block()
    assert ao_lab.convert_for_training_(model, "rowwise", fuse="norm").fused == ("0",)
    ao_lab.convert_from_training_(model)
    with pytest.raises(ValueError, match=r"fuse is one of norm, swiglu, rotary"):
        ao_lab.convert_for_training_(model, "rowwise", fuse=["norms"])
    assert [type(module) for module in model] == [nn.RMSNorm, FeedForward]


def test_copies_and_pickles():
    model, x = block(), inputs()
    fuse_layers_(model)
    stored = io.BytesIO()
    torch.save(copy.deepcopy(model), stored)
    stored.seek(0)
    # The class of a test is known to nobody else.
    loaded = torch.load(stored, weights_only=False)
    assert torch.equal(loaded(x), model(x))
    assert unfuse_layers_(loaded) == ("0", "1")


def test_checkpointing_and_compiling_give_the_same_bits():
    model, x = block(), inputs()
    fuse_layers_(model)
    wanted = results(model, x)
    y = checkpoint(model, x, use_reentrant=False)
    again = [y, *torch.autograd.grad(y, [x, *model.parameters()], torch.ones_like(y))]
    assert all(map(torch.equal, again, wanted))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    y = compiled(x)
    again = [y, *torch.autograd.grad(y, [x, *model.parameters()], torch.ones_like(y))]
    assert all(map(torch.equal, again, wanted))


def test_autocast_and_float32():
    """In float32 there is no silu of 16 bits: torch's operations; under autocast the products are 16-bit floats."""
    model, x = block().float(), inputs().detach().float()
    own = model(x)
    fuse_layers_(model)
    assert torch.allclose(model(x), own, rtol=1e-5, atol=1e-6)
    with torch.autocast("cpu", BF16):
        assert model(x).dtype is BF16


def test_rotary_embedding_keeps_its_bits():
    """Forward and gradients of attention are torch's own, eager and traced; so are those of a second example of the class."""
    config = replace(TINY_ONE_LAYER, kv_heads=2)
    turns = rotary_tables(torch.arange(16.0), scaled_frequencies(config))
    torch.manual_seed(0)
    attention = Attention(config).to(BF16)
    x = torch.randn(2, 16, config.width).to(BF16).requires_grad_()

    def step(model):
        y = model(x, *turns)
        return [y, *torch.autograd.grad(y, [x, *attention.parameters()], torch.ones_like(y))]

    wanted = step(attention)
    assert fuse_layers_(attention) == (("",), {})
    assert all(map(torch.equal, step(attention), wanted))
    torch._dynamo.reset()
    assert "ao_lab.rotary" not in traced(attention, x, *turns)  # left to the compiler
    assert all(map(torch.equal, step(torch.compile(attention, backend="aot_eager", fullgraph=True)), wanted))
    unfuse_layers_(attention)
    assert type(attention) is Attention


def traced(model, *inputs):
    """The code of the graph that torch.compile makes."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph.code)
        return graph.forward

    torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    return "".join(graphs)


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("mistral", "qwen3"))]
)
def test_modules_of_transformers(name):
    modeling = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    config = {"llama": "Llama", "mistral": "Mistral", "qwen3": "Qwen3"}[name]
    sizes = getattr(modeling, f"{config}Config")(hidden_size=64, intermediate_size=128)
    layer = getattr(modeling, f"{config}DecoderLayer")(sizes, 0)
    fused, left = fuse_layers_(layer)
    assert {"input_layernorm", "mlp", "self_attn"} <= set(fused)
    assert left == {}


def renamed(forward):
    """As a decorator of transformers hands on an argument under its new name."""

    @functools.wraps(forward)
    def outer(self, x, *args, old=None, **named):
        return forward(self, x if old is None else old, *args, **named)

    return outer


class Decorated(Attention):
    """A forward of its own class, twice wrapped: once in silence."""

    forward = renamed((lambda inner: lambda *args, **named: inner(*args, **named))(Attention.forward))


class Hidden(Attention):
    """A forward behind an object, which is no function with cells."""

    forward = renamed(functools.partial(Attention.forward))
    forward.__wrapped__ = Attention.forward


def test_functions_around_a_forward_stay_around_it():
    config = replace(TINY_ONE_LAYER, kv_heads=2)
    turns = rotary_tables(torch.arange(16.0), scaled_frequencies(config))
    torch.manual_seed(0)
    attention = Decorated(config).to(BF16)
    x = torch.randn(2, 16, config.width).to(BF16)
    wanted, own = attention(x, *turns), Decorated.forward
    assert fuse_layers_(attention) == (("",), {})
    forward = type(attention).forward
    assert "ao_lab.rotary" in operations(lambda: attention(x, *turns))
    assert torch.equal(attention(None, *turns, old=x), wanted)
    assert forward.__wrapped__ is not own.__wrapped__
    assert inspect.signature(forward) == inspect.signature(own)
    assert Decorated.forward is own
    hidden = Hidden(config)
    assert "wrapped by something that cannot be copied" in fuse_layers_(hidden)[1][""]


def operations(run):
    """Names of the operations that run."""
    with Names() as names:
        run()
    return names.found


class Names(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found.add(f"{function.namespace}.{function.__name__.partition('.')[0]}")
        return function(*args, **(kwargs or {}))


def test_second_derivatives():
    """Where a gradient is differentiated again, the formula is; its value is near."""
    x, weight = torch.randn(4, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    (dx,) = torch.autograd.grad(fast.rms_norm(x, weight)[0].square().sum(), x, create_graph=True)
    (again,) = torch.autograd.grad(dx.sum(), x)
    y = functional.rms_norm(x, (8,), weight, 1e-6)
    (other,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (wanted,) = torch.autograd.grad(other.sum(), x)
    assert torch.allclose(again, wanted, rtol=1e-3, atol=1e-3)
