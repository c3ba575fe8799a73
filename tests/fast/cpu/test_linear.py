"""One row of inputs times a stored weight on a CPU: inside the bound, exact on integers, the same compiled."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import ao_lab
import reference
from ao_lab.config.recipe import Recipe, named
from ao_lab.gemm.select import PRODUCTS, select_kernel
from ao_lab.tensor.quantized_tensor import quantized
from fast.cpu import linear
from fast.cpu import linear as cpu
from tests.fast.cpu.test_linear_rows import within
from tests.support.record_samples import STRUCTURES, sampled

# Integer sums on a CPU are exact, with and without VNNI.

ROOT = Path(__file__).resolve().parents[3]
LIMITED = """
import torch
from fast.cpu.linear import integer_sums
a, b = torch.full((32, 2048), 127, dtype=torch.int8), torch.full((2048, 48), 127, dtype=torch.int8)
print(bool((integer_sums(a, b) == 2048 * 127 * 127).all()))
"""


def bytes_of(*shape, seed):
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


@pytest.mark.parametrize("has_vnni", [linear.HAS_VNNI, False])
@pytest.mark.parametrize("shape", [(1, 8, 3), (9, 1024, 16), (32, 1025, 48), (5, 4096, 7), (3, 0, 2)])
def test_sums_are_exact(has_vnni, shape, monkeypatch):
    monkeypatch.setattr(linear, "HAS_VNNI", has_vnni)
    rows, length, columns = shape
    lowest = [torch.full(part, -128, dtype=torch.int8) for part in ((rows, length), (length, columns))]
    for a, b in ((bytes_of(rows, length, seed=1), bytes_of(length, columns, seed=2)), lowest):
        got = linear.integer_sums(a, b)
        assert got.dtype == torch.int32
        assert torch.equal(got.to(torch.float64), a.double() @ b.double())


@pytest.mark.parametrize(
    "isa", ["AVX2", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("SSE41", "AVX512_CORE"))]
)
def test_sums_are_exact_where_users_take_vnni_away(isa):
    """Then `torch._int_mm` saturates, and torch does not say so."""
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout == "True\n", done.stderr


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Rows and lengths that no block, group or tile divides, and some that all do.
SHAPES = ((5, 256), (33, 768), (7, 250), (1, 66), (64, 256))
SOME = (
    "int8_rowwise",
    "int8_g32_asymmetric",
    "int4_g32",
    "int4_g128_asymmetric",
    "fp8_rowwise",
    "mxfp4",
    "nvfp4",
    "nf4",
)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stored(scheme, shape):
    try:
        return reference.quantize(normal(*shape), scheme, packed=True)
    except ValueError:
        return None  # blocks that do not divide this shape


@pytest.mark.parametrize("scheme", sampled(STRUCTURES))
def test_inside_the_bound(scheme):
    seen = 0
    for shape in SHAPES:
        w = stored(scheme, shape)
        if w is None:
            continue
        exact = reference.dequantize(w).double()
        for dtype in DTYPES:
            x, bias = normal(1, shape[1], seed=1).to(dtype), normal(shape[0], seed=2).to(dtype)
            if not cpu.takes(w.scheme, shape, dtype):
                assert w.scheme.scale.flat_size
                continue
            got = cpu.linear_of_one_row(x, w, bias)
            assert (got.dtype, got.shape) == (dtype, (1, shape[0]))
            error = (got.double() - x.double() @ exact.t() - bias.double()).abs()
            assert (error <= reference.linear_error_bound(x, w, bias)).all(), (shape, dtype)
            seen += 1
    assert seen


@pytest.mark.parametrize("scheme", sampled(STRUCTURES))
def test_integers_are_exact(scheme):
    """Codes and scales that are integers or powers of two, sums below 2**24: every order of summation gives one result."""
    w = stored(scheme, (64, 256))
    power = w.scheme.scale.storage in ("float32", "float8_e8m0fnu")
    value = w.scheme.zero is not None and w.scheme.zero.rule == "value"
    if w.scheme.format.kind == "codebook" or w.scheme.outer is not None or value or not power:
        pytest.skip("its numbers are no small multiples of a power of two")
    if w.scheme.scale.storage == "float32":
        w.scale.copy_(2.0 ** torch.arange(w.scale.numel()).remainder(4).reshape(w.scale.shape))
    else:
        w.scale.copy_(torch.arange(w.scale.numel()).remainder(4).reshape(w.scale.shape) + 125)
    x = normal(1, 256, seed=3).mul(2).round()
    want = x.double() @ reference.dequantize(w).double().t()
    assert torch.equal(cpu.linear_of_one_row(x, w).double(), want)


def test_no_output_keeps_what_memory_held(monkeypatch):
    """Every new tensor is poisoned: what is not written would be NaN."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        made = empty(*args, **kwargs)
        return made.fill_(float("nan") if made.is_floating_point() else 127)

    monkeypatch.setattr(torch, "empty", poisoned)
    for scheme in ("int3_g32", "int4_g32_asymmetric", "int8_rowwise", "mxfp6_e2m3", "mxfp4", "fp8_128x128"):
        w, x = stored(scheme, (130, 256)), normal(1, 256, seed=5)
        got = cpu.linear_of_one_row(x, w).double()
        exact = x.double() @ reference.dequantize(w).double().t()
        assert ((got - exact).abs() <= reference.linear_error_bound(x, w)).all(), scheme


def test_what_it_does_not_take_is_refused():
    w = stored("int4_g32", (4, 64))
    with pytest.raises(ValueError, match="one row"):
        cpu.linear_of_one_row(normal(2, 64), w)
    with pytest.raises(ValueError, match="last axes must be the same"):
        cpu.linear_of_one_row(normal(1, 32), w)
    assert not cpu.takes(w.scheme, (4, 64), torch.float64)
    assert not cpu.takes(w.scheme, (2, 4, 64), torch.float32)


def layer_of(scheme, dtype=torch.float32, shape=(48, 128), bias=True, **options):
    layer = torch.nn.Linear(shape[1], shape[0], bias=bias).to(dtype).requires_grad_(False)
    recipe = Recipe(weight=named(scheme), **options)
    layer.weight = torch.nn.Parameter(quantized(normal(*shape).to(dtype), recipe), requires_grad=False)
    return layer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SOME)
def test_layers_take_it_for_any_number_of_rows(scheme, dtype):
    """Within the bound, or that of the weight rounded to bfloat16."""
    layer = layer_of(scheme, dtype)
    assert select_kernel(layer.weight.transposed(), dtype) == "fused"
    w = layer.weight.quantized
    for rows in (1, 2, 17):
        x = normal(rows, 128, seed=6).to(dtype)
        got = layer(x)
        assert within(got, x, w, layer.bias)
        assert torch.equal(layer(x[None]), got[None])
        if rows == 1:
            assert torch.equal(layer(x[0]), got[0])


def test_a_named_kernel_keeps_the_bits_of_the_dense_product():
    layer = layer_of("int4_g32", kernel="dequantize")
    x = normal(1, 128, seed=7)
    assert torch.equal(layer(x), functional.linear(x, layer.weight.dequantize(), layer.bias))


def test_the_report_names_it_for_all_rows():
    model = torch.nn.Sequential(torch.nn.Linear(128, 64))
    ao_lab.quantize_(model, ao_lab.Int8WeightOnlyConfig())
    assert "int8_rowwise (fused):" in str(ao_lab.explain(model))


def test_gradients_of_the_input_flow():
    layer, x = layer_of("int8_rowwise"), normal(1, 128, seed=8).requires_grad_(True)
    layer(x).sum().backward()
    ones = torch.ones(1, 48)
    # 48 products and 47 sums in an order that is not stated: 95 roundings of 2**-24 of the sum of magnitudes.
    exact, size = ones @ layer.weight.dequantize(), ones @ layer.weight.dequantize().abs()
    assert ((x.grad - exact).abs() <= 95 * 2.0**-24 * size).all()


# Inductor imports modules of torch that torch itself calls deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("scheme", "backend"),
    [("int4_g128_asymmetric", "inductor"), ("int8_rowwise", "aot_eager"), ("nvfp4", "aot_eager")],
)
def test_compiled_layers_give_the_bits_of_eager_ones(scheme, backend):
    layer = layer_of(scheme, torch.bfloat16)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend=backend)
    with torch.no_grad():
        for rows in (1, 3):
            x = normal(rows, 128, seed=9).to(torch.bfloat16)
            assert torch.equal(compiled(x), layer(x))


def test_inputs_that_are_not_finite_make_no_finite_result():
    w, x = stored("int8_rowwise", (4, 64)), normal(1, 64)
    for bad in (math.nan, math.inf):
        x[0, 3] = bad
        assert not cpu.linear_of_one_row(x, w).isfinite().any()


def test_a_transposed_layer_takes_the_dense_product():
    """transformers' Conv1D stores (in, out): x @ w."""
    w = quantized(normal(64, 48), "int8_g32", axis=0)
    x = normal(1, 64, seed=1)
    assert PRODUCTS["fused"].unsupported_reason(w, torch.float32) is not None
    assert torch.equal(x @ w, x @ w.dequantize())
