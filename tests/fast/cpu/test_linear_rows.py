"""Several rows of inputs by a stored weight on a CPU: inside the bound, in every way that a layer is called."""

import pytest
import torch
from torch.nn import functional

import ao_lab
import reference
from ao_lab.config.recipe import Recipe, named
from ao_lab.gemm.select import select_kernel
from ao_lab.tensor.quantized_tensor import quantized
from fast.cpu import dequantize, linear
from fast.cpu.linear import linear_of_rows
from tests.fast.cpu.test_dequantize import normal, stored

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Outputs and inputs.
N, K = 256, 512
BF16 = torch.bfloat16


def layer_of(scheme, dtype=torch.float32, **options):
    layer = torch.nn.Linear(K, N).to(dtype).requires_grad_(False)
    recipe = Recipe(weight=named(scheme), **options)
    layer.weight = torch.nn.Parameter(quantized(normal(N, K).to(dtype), recipe), requires_grad=False)
    return layer


def within(got, x, w, bias):
    """Inside `linear_error_bound`; or, in bfloat16, of all products and as many sums of the weight rounded to it (2**-24 each),
    and one rounding: CPUs that multiply bfloat16 take that."""
    exact = x.double() @ reference.dequantize(w).double().t() + bias.double()
    if bool(((got.double() - exact).abs() <= reference.linear_error_bound(x, w, bias)).all()):
        return True
    dense = reference.dequantize(w, "bfloat16").double()
    exact = x.double() @ dense.t() + bias.double()
    size = x.double().abs() @ dense.t().abs() + bias.double().abs()
    bound = 2 * x.shape[1] * 2.0**-24 * size + 2.0**-8 * exact.abs()
    return got.dtype == BF16 and bool(((got.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", ["int8_rowwise", "int4_g32"])
def test_inside_the_bound(scheme, dtype, few, monkeypatch):
    """By the loop, and by torch of decoded tiles of some rows and a rest."""
    if not few:
        monkeypatch.setattr(linear, "_loop_rows", lambda dtype: 0)
        monkeypatch.setattr(linear, "KEPT", 100 * K * 4)
    w, bias = stored(scheme, (N, K)), normal(N, seed=2).to(dtype)
    for count in (2, 5):
        x = normal(count, K, seed=count).to(dtype)
        got = linear_of_rows(x, w, bias)
        assert (got.dtype, got.shape) == (dtype, (count, N))
        assert within(got, x, w, bias)
    nothing = linear_of_rows(normal(0, K).to(dtype), w, bias)
    assert (nothing.dtype, nothing.shape) == (dtype, (0, N))


def test_without_products_of_bfloat16_operands_are_float32(monkeypatch):
    """The weight keeps the bits that bfloat16 has not: inside `linear_error_bound`."""
    monkeypatch.setattr(linear, "_operands", lambda x: torch.float32)
    w, x = stored("int8_rowwise", (N, K)), normal(3, K).to(BF16)
    exact = x.double() @ reference.dequantize(w).double().t()
    assert ((linear_of_rows(x, w).double() - exact).abs() <= reference.linear_error_bound(x, w)).all()


@pytest.mark.parametrize("missing", ["numba", "covered"])
def test_what_the_loop_leaves_is_dequantized(missing, monkeypatch):
    w, x = stored("int8_rowwise", (N, K)), normal(3, K)
    if missing == "numba":
        monkeypatch.setattr(dequantize, "numba_missing", lambda: "No module named 'numba'")
        monkeypatch.setattr(linear, "numba_missing", lambda: "No module named 'numba'")
    else:
        w.scale[3] = float("inf")
    want = functional.linear(x, reference.dequantize(w))
    torch.testing.assert_close(linear_of_rows(x, w), want, rtol=0, atol=0, equal_nan=True)


def test_what_does_not_go_together_is_refused():
    w = stored("int8_rowwise", (4, 64))
    with pytest.raises(ValueError, match="last axes must be the same"):
        linear_of_rows(normal(2, 32), w)
    with pytest.raises(ValueError, match="one number for each output"):
        linear_of_rows(normal(2, 64), w, torch.ones(3))
    with pytest.raises(ValueError, match="in float32, bfloat16 or float16"):
        linear_of_rows(normal(2, 64).double(), w)


def test_layers_take_it():
    layer = layer_of("int8_rowwise")
    assert ao_lab.explain(torch.nn.Sequential(layer)).layers[0].kernel == "fused"
    x = normal(2, 3, 2 * K, seed=5)[..., ::2]
    want = linear_of_rows(x.reshape(6, K), layer.weight.quantized, layer.bias).view(2, 3, N)
    assert torch.equal(layer(x), want)
    named_ = layer_of("int8_rowwise", kernel="dequantize")
    assert torch.equal(named_(x), functional.linear(x, named_.weight.dequantize(), named_.bias))


@pytest.mark.parametrize("scheme", ["int8_rowwise", "fp8_rowwise"])
def test_inputs_in_a_scheme_are_rounded_first(scheme):
    """int8 by int8 has a kernel of its own."""
    layer = layer_of("int4_g32", activation=reference.SCHEMES[scheme])
    assert select_kernel(layer.weight.transposed(), torch.float32) == "fused"
    for count in (1, 3):
        x = normal(count, K, seed=6)
        seen = reference.fake_quantize(x, scheme)
        assert within(layer(x), seen, layer.weight.quantized, layer.bias)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_layers_give_the_bits_of_eager_ones(dynamic):
    layer = layer_of("int8_rowwise", BF16)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    with torch.no_grad():
        for count in (3, 4):
            x = normal(count, K, seed=9).to(BF16)
            assert torch.equal(compiled(x), layer(x))


def test_an_exported_layer_takes_any_number_of_rows():
    layer = layer_of("int8_rowwise")
    program = torch.export.export(
        layer, (normal(3, K),), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},)
    )
    x = normal(5, K, seed=7)
    assert torch.equal(program.module()(x), layer(x))


def test_gradients_of_the_input_flow():
    layer, x = layer_of("int8_rowwise"), normal(3, K, seed=8).requires_grad_(True)
    layer(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(3, N) @ layer.weight.dequantize())
