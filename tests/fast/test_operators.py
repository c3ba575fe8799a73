"""Operators by themselves: torch's own checks of their schemas, fakes and gradients; results are those of the functions."""

import pytest
import torch
from torch.autograd import forward_ad

import fast
import fast.layers.attention
import fast.layers.column_sums
import fast.layers.linear_gradients
import fast.matmul.cpu_ops  # registers cpu_linear, which layers import when they need it
import fast.quantize.rowwise_colwise
from tests.support.examples import normals

X, WIDE = normals(8, "cpu"), normals(64, "cpu", dtype=torch.bfloat16)
CODES = (torch.arange(8 * 64, dtype=torch.int32) % 100).to(torch.uint8).view(8, 64)
SCALE = torch.ones(())
STORED = fast.quantize(normals(64, "cpu"), "int4_g32", packed=True)
WEIGHT, ONE_ROW = (STORED.codes, STORED.scale, None, None), WIDE[:1].clone().requires_grad_()
MARKS = torch.full((len(WIDE), 8), 0x44, dtype=torch.uint8)
CALLS = {
    "choose_scales": (X, "nvfp4", -1),
    "encode": (X, "float8_e4m3fn", "nearest_even", "saturate", None),
    "decode": (CODES, "float8_e4m3fn"),
    "pack": (CODES, "int4"),
    "unpack": (CODES, "int3", [8, 170]),
    "quantize_both": (WIDE, "mxfp8_e4m3", False, [], False),
    "both_values": (WIDE, "mxfp8_e4m3"),
    "values_and_codes": (WIDE, "nvfp4"),
    "rms_norm": (X.clone().requires_grad_(), X.clone().requires_grad_(), X[0].clone().requires_grad_(), 1e-6),
    "rms_norm_quantize": (X, None, X[0].clone(), "int4_g32_asymmetric", 1e-6, True),
    "swiglu": (WIDE.clone().requires_grad_(), WIDE.clone().requires_grad_()),
    "swiglu_quantize": (WIDE, WIDE.clone(), "nvfp4", True),
    "column_sums": (WIDE.clone().view(2, -1, 64).requires_grad_(), torch.float16),
    "weight_and_bias_gradients": (WIDE.clone().requires_grad_(), WIDE[:, :32].clone().requires_grad_()),
    "rms_norm_vjp": (X, X.clone(), X[0].clone(), X.clone(), 1e-6),
    "swiglu_vjp": (WIDE, WIDE.clone(), WIDE.clone()),
    "rotary": (X.clone().view(2, 2, 2, 64).requires_grad_(), X[:2].clone(), X[:2].clone(), False),
    "matmul": (X, None, None, None, X.T, None, None, None, None, '[null, null, {"out_dtype": "bfloat16"}]'),
    "cpu_linear": (ONE_ROW, *WEIGHT, None, [64, 64], "int4_g32", True),
    "linear_pair": (ONE_ROW, *WEIGHT, *WEIGHT, [64, 64], "int4_g32", True),
    "linear_swiglu": (ONE_ROW, *WEIGHT, *WEIGHT, [64, 64], "int4_g32", True, "int4_g32", True),
    "prune": (X, None, "2:4"),
    "prune_transposable": (X, None, "exact"),
    "compress": (X, None, "2:4"),
    "compress_transposable": (X,),
    "quantize_compressed": (X, None, torch.ones(8, 1), None, None, "fp8_rowwise", "2:4"),
    "arrange_sparse_metadata": (MARKS, torch.int8),
    "linear_sparse": (WIDE, WIDE[:, :32].contiguous(), MARKS, None, SCALE, None, torch.float32, True),
    "decompress": (X[:, :32].contiguous(), torch.full((8, 8), 0x44, dtype=torch.uint8)),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_operator(name):
    operator = getattr(torch.ops.ao_lab, name)
    assert set(torch.library.opcheck(operator, CALLS[name]).values()) == {"SUCCESS"}


def test_operators_without_a_gradient_say_so():
    x = X.clone().requires_grad_()
    y = torch.ops.ao_lab.matmul(x, *CALLS["matmul"][1:])
    with pytest.raises(NotImplementedError, match="matmul has no gradient"):
        y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_layers_are_those_of_the_formulas(dtype):
    """Against autograd through torch's own operations in float32."""
    gate, up = (normals(8, "cpu", seed, dtype).requires_grad_() for seed in (0, 1))
    wide = [t.detach().float().requires_grad_() for t in (gate, up)]
    g = normals(8, "cpu", 2, dtype)
    fast.swiglu(gate, up).backward(g)
    (torch.nn.functional.silu(wide[0]) * wide[1]).backward(g.float())
    for one, other in zip((gate, up), wide, strict=True):
        assert torch.allclose(one.grad.float(), other.grad, rtol=2e-2, atol=2e-2)


def test_the_gradient_of_rms_norm_is_that_of_the_formula():
    x, residual, weight = (
        X.clone().requires_grad_(),
        normals(8, "cpu", 1).requires_grad_(),
        X[0].clone().requires_grad_(),
    )
    others = [t.detach().clone().requires_grad_() for t in (x, residual, weight)]
    g, g2 = normals(8, "cpu", 2), normals(8, "cpu", 3)
    y, h = fast.rms_norm(x, weight, residual=residual)
    torch.autograd.backward([y, h], [g, g2])
    total = others[0] + others[1]
    wanted = torch.nn.functional.rms_norm(total, (64,), others[2], eps=1e-6)
    torch.autograd.backward([wanted, total], [g, g2])
    for one, other in zip((x, residual, weight), others, strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["pack", "unpack"])
def test_an_operator_does_not_return_its_input(name):
    """Formats of 8 bits pack to themselves; an operator's result may not share memory with an operand."""
    shape = ([8, 64],) if name == "unpack" else ()
    made = getattr(torch.ops.ao_lab, name)(CODES, "float8_e4m3fn", *shape)
    assert torch.equal(made, CODES)
    assert made.data_ptr() != CODES.data_ptr()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_forward_mode_is_an_error_and_no_silent_zero():
    with forward_ad.dual_level():
        x = forward_ad.make_dual(X, X)
        for call in (lambda: fast.fake_quantize(x, "int8_rowwise"), lambda: fast.rms_norm(x, X[0])):
            with pytest.raises(NotImplementedError):
                call()


@pytest.mark.parametrize("grad", [False, True])
def test_given_scales_on_another_device_are_refused(grad):
    x = X.clone().requires_grad_(grad)
    with pytest.raises(ValueError, match="takes tensors on one device, got x on cpu and scale on meta"):
        fast.fake_quantize(x, "fp8_tensorwise", scales=SCALE.to("meta"))


def test_sparse_inputs_that_require_a_gradient_are_refused():
    with pytest.raises(TypeError, match="takes dense tensors"):
        fast.fake_quantize(X.clone().requires_grad_().to_sparse(), "int8_rowwise")


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_call_of_tensors_on_two_devices_is_refused(fullgraph):
    """Beside a meta tensor the dispatcher would run the fake: a result of uninitialized memory."""
    torch._dynamo.reset()
    program = torch.compile(lambda a, b: fast.swiglu(a, b), backend="aot_eager", fullgraph=fullgraph)
    with pytest.raises((ValueError, torch._dynamo.exc.Unsupported), match=r"one device|Observed exception"):
        program(WIDE, WIDE.to("meta"))


def second_derivative(f, x, v, transform):
    """The gradient of (the gradient of f's sum at x, times v)."""
    if transform:
        return torch.func.grad(lambda x: (torch.func.grad(lambda x: f(x).sum())(x) * v).sum())(x)
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(leaf).sum(), leaf, create_graph=True)
    return torch.autograd.grad((first * v).sum(), leaf)[0]


@pytest.mark.parametrize("transform", [True, False])
def test_second_derivatives_of_layers(transform):
    """By torch.func and by create_graph they are those of torch's operations."""
    generator = torch.Generator().manual_seed(0)
    x, v, weight = (torch.randn(shape, generator=generator) for shape in ((6, 32), (6, 32), (32,)))
    norm = second_derivative(lambda x: fast.rms_norm(x, weight)[0], x, v, transform)
    wanted = second_derivative(lambda x: torch.nn.functional.rms_norm(x, (32,), weight, 1e-6), x, v, False)
    # Sums of 32 products in float32, in another order; values are below 10.
    torch.testing.assert_close(norm, wanted, rtol=0, atol=10 * 32 * 2.0**-23)
    x, v = x.bfloat16(), v.bfloat16()
    found = second_derivative(lambda x: fast.swiglu(x, x), x, v, transform).float()
    wanted = second_derivative(lambda x: torch.nn.functional.silu(x) * x, x.float(), v.float(), False)
    # bfloat16 rounds the gradients of gate and up, their products with v and their sums.
    torch.testing.assert_close(found, wanted, rtol=2.0**-6, atol=2.0**-6)
