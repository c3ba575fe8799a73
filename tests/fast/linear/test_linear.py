"""`linear`: the product with a stored weight, its arguments and errors; the operator; and which kernel takes which weight."""

import platform
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings

import fast
import reference
from ao_lab import testing
from ao_lab.config.recipe import named
from fast.matmul.cpu_ops import linear as cpu_linear
from reference import SCHEMES, Scheme
from reference.arrays.bridges import to_numpy
from reference.matmul.linear import transposed
from reference.schemes.schemes import scheme_of
from tests.support.family_times import launch_for, rows_fused

# One of each kind: rows, tensor, groups, rectangles, zero points as codes and values, two levels, flat blocks, odd bits.
KINDS = ("int8_rowwise", "int8_tensorwise", "int8_rowwise_asymmetric", "int4_g32", "int4_g32_asymmetric", "int3_g32",
         "fp8_rowwise_e5m2", "fp8_128x128", "te.nvfp4_16x16", "mxfp8_e4m3", "mxfp6_e2m3", "mxfp4", "mxint8", "nvfp4", "nf4",
         "torchao.int4_g32_tinygemm", "torchao.fp8_rowwise_training", "compressed_tensors.nvfp4")  # fmt: skip
SQUARE = SCHEMES["fp8_128x128"]
OBLONG = replace(SQUARE, name="oblong", scale=replace(SQUARE.scale, block=(16, 32)))


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def same(a, b):
    """The same bits, dtype and shape."""
    testing.assert_same_bits(np.asarray(to_numpy(a)), np.asarray(to_numpy(b)))
    assert str(a.dtype) == str(b.dtype)


@pytest.mark.parametrize("scheme", [*KINDS, OBLONG], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_it_is_the_product_with_what_the_weight_stands_for(scheme, packed):
    w, x, bias = (
        reference.quantize(numbers(48, 128), scheme, packed=packed),
        numbers(5, 128, seed=1),
        numbers(48, seed=2),
    )
    dense = np.ascontiguousarray(reference.dequantize(w).T)
    for added in (None, bias):
        same(reference.linear(x, w, added), reference.matmul(x, dense, bias=added))
    same(
        reference.linear(x, w, bias, out_dtype="bfloat16"),
        reference.matmul(x, dense, bias=bias, out_dtype="bfloat16"),
    )


@pytest.mark.parametrize("tier", ["blocked", "hopper_fp8"])
def test_it_has_the_tiers_of_matmul(tier):
    w = reference.quantize(numbers(48, 128), "fp8_1x128")
    x = reference.quantize(numbers(5, 128, seed=1), "fp8_1x128")
    whole = reference.matmul(x, transposed(w), accumulation=tier, block=64)
    same(reference.linear(x, w, accumulation=tier, block=64), whole)
    assert (np.asarray(whole) != np.asarray(reference.linear(x, w))).any()


def test_scales_in_tiles():
    plain, tiled = (
        reference.quantize(numbers(48, 128), "mxfp8_e4m3", tiled=tiled) for tiled in (False, True)
    )
    same(reference.linear(numbers(5, 128), tiled), reference.linear(numbers(5, 128), plain))


@pytest.mark.parametrize("shape", [(128,), (1, 128), (2, 3, 128), (0, 128), (2, 0, 128)])
def test_shapes_of_inputs(shape):
    """Each row is a product of its own, whatever lies around it; a vector makes a vector."""
    w, x, bias = reference.quantize(numbers(6, 128), "int4_g32"), numbers(*shape), numbers(6, seed=2)
    made = reference.linear(x, w, bias)
    assert made.shape == (*shape[:-1], 6)
    for index in np.ndindex(shape[:-1]):
        same(made[index], reference.linear(x[index][None], w, bias)[0])
    same(fast.linear(torch.from_numpy(x), fast.quantize(torch.from_numpy(numbers(6, 128)), "int4_g32")),
         torch.from_numpy(np.array(reference.linear(x, w))))  # fmt: skip


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_libraries_agree_and_keep_their_dtype(name):
    """NumPy, torch and JAX; the result is in the input's dtype, and in its library."""
    dense, x, bias = (
        numbers(48, 128),
        torch.from_numpy(numbers(5, 128, seed=1)).to(getattr(torch, name)),
        numbers(48, seed=2),
    )
    array = np.asarray(to_numpy(x))
    wanted = reference.linear(array, reference.quantize(dense, "mxfp4"), bias)
    made = fast.linear(x, fast.quantize(torch.from_numpy(dense), "mxfp4"), torch.from_numpy(bias))
    assert (made.dtype, str(wanted.dtype)) == (x.dtype, name)
    testing.assert_same_bits(made, wanted)
    there = reference.linear(
        jnp.asarray(array), reference.quantize(jnp.asarray(dense), "mxfp4"), jnp.asarray(bias)
    )
    assert there.dtype == name
    testing.assert_same_bits(np.asarray(there), wanted)


def test_inputs_of_other_dtypes_make_float32():
    w = reference.quantize(numbers(48, 128), "int8_rowwise")
    for x in (reference.quantize(numbers(5, 128), "fp8_rowwise"), np.ones((5, 128), np.int8)):
        assert reference.linear(x, w).dtype == np.float32


W = reference.quantize(numbers(48, 128), "int4_g32")


@pytest.mark.parametrize(
    ("x", "w", "bias", "error", "text"),
    [
        (numbers(5, 128), numbers(48, 128), None, TypeError, "Quantized weight, got ndarray"),
        (numbers(5, 64), W, None, ValueError, "the last axes must be the same"),
        (np.float32(1), W, None, ValueError, "the last axes must be the same"),
        (numbers(5, 128), W, numbers(5, 48), ValueError, r"bias has shape \(5, 48\), the weight asks for \(48,\)"),
        (numbers(5, 128), W, numbers(1), ValueError, "bias has shape"),
        (numbers(5, 128), reference.quantize(numbers(64, 128), "int4_g32", axis=0), None, ValueError, "along axis 1"),
        (numbers(5, 128), reference.quantize(numbers(2, 64, 128), "int4_g32"), None, ValueError, "along axis 1"),
        (numbers(128), reference.quantize(numbers(128), "int4_g32"), None, ValueError, "along axis 1"),
        (numbers(5, 128).astype(np.float64), W, None, TypeError, "got float64"),
        ([[1.0] * 128], W, None, TypeError, "got float64"),
        (torch.ones(5, 128), W, None, TypeError, "one library"),
    ],
)  # fmt: skip
def test_errors(x, w, bias, error, text):
    with pytest.raises(error, match=text):
        reference.linear(x, w, bias)


def test_errors_of_fast():
    """Those of the reference, and other libraries' arrays are none of its."""
    x, w = torch.ones(5, 128), fast.quantize(torch.ones(48, 128), "int4_g32")
    for call, error, text in (
        (lambda: fast.linear(x.numpy(), w), TypeError, "those of `reference` take NumPy"),
        (lambda: fast.linear(x, W), TypeError, "fast.linear takes weights of torch tensors, got ndarray"),
        (lambda: fast.linear(x, x), TypeError, "Quantized weight"),
        (lambda: fast.linear(x[:, 1:], w), ValueError, "last axes"),
        (lambda: fast.linear(x, w, x), ValueError, "bias has shape"),
    ):
        with pytest.raises(error, match=text):
            call()


@settings(max_examples=25, deadline=None)
@given(weight=testing.blocks("mxfp4", shape=(4, 64)), x=testing.float_arrays("bfloat16", (3, 64)))
def test_blocks_and_inputs_that_break_kernels(weight, x):
    """NaN, infinities, subnormals: the bits of the product with the dequantized weight, from every entrance."""
    w = reference.quantize(weight, "mxfp4", packed=True)
    dense = np.ascontiguousarray(reference.dequantize(w).T)
    wanted = reference.matmul(x, dense, out_dtype="bfloat16")
    testing.assert_same_bits(reference.linear(x, w), wanted)
    inputs = torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    testing.assert_same_bits(fast.linear(inputs, fast.quantize(torch.from_numpy(weight), "mxfp4")), wanted)


@pytest.mark.parametrize("scheme", ["int4_g32_asymmetric", "nvfp4", "nf4", "int8_rowwise"])
@pytest.mark.parametrize("bias", [None, torch.ones(48)])
def test_the_operator(scheme, bias):
    """Fake tensors, meta tensors and compiled programs know its result's shape and dtype."""
    x, dense = torch.from_numpy(numbers(2, 5, 128)).to(torch.float16), torch.from_numpy(numbers(48, 128))
    w = fast.quantize(dense, scheme, packed=scheme != "int8_rowwise")
    given = (x, w.codes, w.scale, w.outer, w.zero, bias, [48, 128], w.scheme.key, w.packed)
    wanted = set(torch.library.opcheck(torch.ops.ao_lab.linear, given).values())
    assert wanted == {"SUCCESS"}
    assert torch.equal(torch.ops.ao_lab.linear(*given), fast.linear(x, w, bias))
    compiled = torch.compile(lambda x: fast.linear(x, w, bias), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), fast.linear(x, w, bias))
    moved = {
        part: t.to("meta")
        for part in ("codes", "scale", "outer", "zero")
        if (t := getattr(w, part)) is not None
    }
    there = fast.linear(x.to("meta"), replace(w, **moved), None if bias is None else bias.to("meta"))
    assert (there.shape, there.dtype, there.is_meta) == ((2, 5, 48), torch.float16, True)


def test_the_operator_takes_scales_in_tiles():
    x, dense = torch.from_numpy(numbers(3, 128)), torch.from_numpy(numbers(48, 128))
    w = fast.quantize(dense, "mxfp8_e4m3", tiled=True)
    compiled = torch.compile(lambda x: fast.linear(x, w), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), fast.linear(x, w))


def test_inputs_and_bias_have_gradients():
    """Those of a product with the dequantized weight."""
    x, bias = torch.from_numpy(numbers(2, 5, 128)).requires_grad_(), torch.ones(48, requires_grad=True)
    w = fast.quantize(torch.from_numpy(numbers(48, 128)), "int4_g32")
    g = torch.from_numpy(numbers(2, 5, 48))
    fast.linear(x, w, bias).backward(g)
    assert torch.equal(x.grad, g @ fast.dequantize(w))
    assert torch.allclose(bias.grad, g.sum((0, 1)), rtol=1e-6)
    with torch.no_grad():
        assert not fast.linear(x, w, bias).requires_grad


X16, PACKED, ROWWISE = (
    torch.ones(1, 64, dtype=torch.bfloat16),
    fast.quantize(torch.from_numpy(numbers(32, 64)), "int4_g32", packed=True),
    fast.quantize(torch.from_numpy(numbers(32, 64)), "int8_rowwise"),
)
PRODUCTS = {
    "linear": lambda learned: fast.linear(X16, learned(PACKED)),
    "linear_pair": lambda learned: fast.linear_pair(X16, PACKED, learned(PACKED)),
    "linear_swiglu": lambda learned: fast.linear_swiglu(X16, learned(PACKED), ROWWISE),
    "linear_of_codes": lambda learned: fast.linear_of_codes(
        fast.quantize(X16.float(), "int8_rowwise"), learned(ROWWISE), dtype=torch.float32
    ),
    "cpu_linear": lambda learned: cpu_linear(X16, learned(PACKED), None),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_scales_that_require_a_gradient_raise_in_forward(name):
    """A stored weight has no gradient for its scales: the call says so, not the backward of a training step."""
    product = PRODUCTS[name]
    with pytest.raises(NotImplementedError, match="no gradient for the scales"):
        product(lambda w: replace(w, scale=w.scale.clone().requires_grad_()))
    with torch.no_grad():
        product(lambda w: replace(w, scale=w.scale.clone().requires_grad_()))


if platform.system() == "Linux":
    from tests.fast.kernels.compiling.recorded_launches import Flat, Recorded

linux = pytest.mark.skipif(platform.system() != "Linux", reason="triton has no packages for this system")
W4A16, W8A16, ANY, SMALL_M = (
    "triton_gemv_w4a16_kernel",
    "triton_gemv_w8a16_kernel",
    "triton_gemv_any_kernel",
    "triton_gemm_small_m_kernel",
)


def kernel_of(scheme, rows=1, dtype=torch.bfloat16, shape=(64, 512), packed=None, tiled=False):
    """The name of the kernel that would run, None where there is none."""
    record = scheme if isinstance(scheme, Scheme) else named(scheme)
    w = fast.quantize(
        torch.zeros(shape), record, packed=record.format.bits < 8 if packed is None else packed, tiled=tiled
    )
    launch = launch_for(w, rows, dtype)
    assert (launch_for(w, 1, dtype) is not None) == (rows_fused(w, dtype) > 0)
    return None if launch is None else launch.kernel.__name__


@linux
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("scheme", ["int8_rowwise", "int4_g64", "mxfp4_rceil"])
def test_a_compiled_kernel_serves_one_kind_of_operands(monkeypatch, scheme, rows):
    """It would read others as those that it was compiled for: dtype and presence of every operand belong to its key."""
    w, x = (
        fast.quantize(torch.zeros(64, 512), scheme, packed=True),
        torch.zeros(rows, 512, dtype=torch.bfloat16),
    )
    recorded = Recorded(monkeypatch, Flat)
    biases = [
        None,
        *(torch.zeros(64, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    ]
    for count, bias in enumerate(biases, 1):
        fast.linear(x, w, bias)
        assert recorded.counts() == (count, 0)
    for count, bias in enumerate(biases, 1):
        fast.linear(x, w, bias)
        assert recorded.counts() == (4, count)


@linux
@pytest.mark.parametrize("kind", ["linear", "linear_pair", "linear_swiglu", "linear_of_codes"])
def test_scales_of_another_dtype_are_refused_after_right_ones(monkeypatch, kind):
    """They were read as what the first call had."""
    w, x = fast.quantize(torch.ones(64, 512), "int8_rowwise"), torch.ones(1, 512, dtype=torch.bfloat16)
    wrong, q = replace(w, scale=w.scale.half()), fast.quantize(x, "int8_rowwise")
    recorded = Recorded(monkeypatch, Flat)
    call = {
        "linear": lambda w: fast.linear(x, w),
        "linear_pair": lambda w: fast.linear_pair(x, w, w),
        "linear_swiglu": lambda w: fast.linear_swiglu(x, w, w),
        "linear_of_codes": lambda w: fast.linear_of_codes(q, w, dtype=torch.bfloat16),
    }[kind]
    call(w)
    call(w)
    counts = recorded.counts()
    with pytest.raises(ValueError, match="scale = float32 of shape"):
        call(wrong)
    assert recorded.counts() == counts


def scheme_with(name, **scale):
    record = SCHEMES[name]
    return replace(record, name=f"{name} {scale}", scale=replace(record.scale, **scale))


TINYGEMM, ASYMMETRIC = (scheme_of(name) for name in ("torchao.int4_g64_tinygemm", "int4_g64_asymmetric"))
UNSIGNED = replace(SCHEMES["int4_g64"], name="unsigned", element="uint4")


@linux
@pytest.mark.parametrize(
    ("kernel", "scheme", "options"),
    [
        (W4A16, "int4_g32", {}),
        (W4A16, "int4_g256_asymmetric", {"dtype": torch.float16}),
        (W4A16, "int4_g32", {"shape": (16, 512)}),
        (W4A16, "int4_rowwise", {}),
        (W4A16, "int4_g96", {"shape": (64, 768)}),
        (W4A16, "torchao.int4_g64_tinygemm", {}),
        (W4A16, UNSIGNED, {}),
        (ANY, "int4_g32", {"shape": (15, 512)}),
        (ANY, "int4_tensorwise", {}),
        (ANY, replace(TINYGEMM, name="wide zero", zero=replace(TINYGEMM.zero, storage="float32")), {}),
        (ANY, replace(ASYMMETRIC, name="unsigned zero", element="uint4"), {}),
        (ANY, "int4_g32", {"dtype": torch.float32}),
        (ANY, "int4_g32", {"packed": False}),
        (ANY, "int4_g32", {"shape": (64, 1184)}),
        (ANY, "mxfp4", {}),
        (ANY, "nf4", {}),
        (ANY, "nvfp4", {}),
        (ANY, scheme_with("int4_g32", block=16), {}),
        (ANY, scheme_with("int4_g32", block=(32, 32)), {}),
        (ANY, "int3_g32", {}),
        (W8A16, "int8_rowwise", {}),
        (W8A16, "int8_tensorwise", {"dtype": torch.float32}),
        (W8A16, "int8_rowwise_asymmetric", {}),
        (W8A16, "fp8_rowwise", {}),
        (W8A16, "fp8_128x128_e5m2", {}),
        (W8A16, "mxfp8_e4m3", {}),
        (W8A16, "mxint8", {}),
        (ANY, "mxfp8_e4m3", {"shape": (64, 544)}),
        (ANY, "fp8_rowwise", {"shape": (64, 768)}),
        *((SMALL_M, name, {"rows": rows}) for name in ("int4_g32", "fp8_rowwise", "nvfp4") for rows in (2, 17, 32)),
        (SMALL_M, "fp8_rowwise", {"rows": 128}),
        (SMALL_M, "mxfp6_e3m2", {"rows": 2, "dtype": torch.float16}),
        (ANY, scheme_with("int4_g32", block=8), {}),
    ],
)  # fmt: skip
def test_which_kernel(kernel, scheme, options):
    assert kernel_of(scheme, **options) == kernel


@linux
@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("int8_rowwise", {"rows": 129}),
        ("int8_rowwise", {"rows": 0}),
        ("int8_rowwise", {"rows": 2, "dtype": torch.float32}),
        ("int8_rowwise", {"dtype": torch.float64}),
        ("nf4", {"rows": 2}),
        (scheme_with("int4_g32", block=8), {"rows": 2}),
        ("int8_rowwise", {"shape": (64, 1000)}),
        ("int8_rowwise", {"shape": (0, 512)}),
        ("int8_rowwise", {"shape": (64, 0)}),
        ("mxfp8_e4m3", {"shape": (128, 512), "tiled": True}),
        ("torchao.fp8_rowwise_training", {}),
        ("int4_g32", {"rows": 33}),
    ],
)  # fmt: skip
def test_what_no_kernel_takes(scheme, options):
    assert kernel_of(scheme, **options) is None


@linux
def test_one_bit_is_refused():
    """The kernels' unpacking begins at two bits."""
    from ao_lab.config.recipe import named

    for name in ("int1_g32", "int1_g32_asymmetric"):
        if (record := named(name)) is not None:
            assert kernel_of(record) is None


@linux
def test_columns_and_batches_are_not_taken():
    for shape, axis in (((512, 64), 0), ((2, 64, 512), -1), ((512,), 0)):
        assert (
            launch_for(fast.quantize(torch.zeros(shape), "int8_rowwise", axis=axis), 1, torch.bfloat16)
            is None
        )


@linux
def test_views_at_odd_addresses_are_copied(monkeypatch):
    """Kernels read words of four bytes: a view that begins elsewhere is handed over as a copy."""
    from fast.kernels.triton_gemv import select as kernels

    w = fast.quantize(torch.zeros(64, 512), "int4_g32", packed=True)
    memory = torch.zeros(w.codes.numel() + 1, dtype=torch.uint8)
    moved = replace(w, codes=memory[1:].view(w.codes.shape))
    x = torch.zeros(513, dtype=torch.bfloat16)[1:].view(1, 512)
    seen = []
    monkeypatch.setattr(kernels.CompiledLaunch, "run", lambda launch, pointers, device: seen.extend(pointers))
    kernels.linear(x, moved, None, "triton_gemv_w4a16")
    assert (x.data_ptr() % 4, moved.codes.data_ptr() % 4) == (2, 1)
    assert all(pointer is None or pointer.data_ptr() % 4 == 0 for pointer in seen[:2])
    assert len(seen) > 2


@linux
def test_how_many_rows_kernels_take():
    """128 where a row has one scale, 32 where scales change along it, one of float32, none where nothing is read."""
    rows = {
        (name, dtype): rows_fused(
            fast.quantize(torch.zeros(64, 512), name, packed=name != "int8_rowwise"), dtype
        )
        for name in ("int8_rowwise", "int4_g64")
        for dtype in (torch.bfloat16, torch.float32)
    }
    assert list(rows.values()) == [128, 1, 32, 1]
    assert rows_fused(fast.quantize(torch.zeros(64, 512), "int4_g64", axis=0), torch.bfloat16) == 0
