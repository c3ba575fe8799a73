"""`ao_lab.jax.matmul`: the exact product within rounding, traced or not; names that the documents pin."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import reference
from reference import SCHEMES, dequantize, matmul, matmul_error_bound, quantize
from reference.matmul.linear import transposed
from reference.training.recipe import RECIPES

jax = pytest.importorskip("jax")
import ao_lab.jax  # noqa: E402  JAX is optional
from ao_lab.jax import functions  # noqa: E402
from ao_lab.jax.matmul import factor, product, transposed_factor  # noqa: E402
from ao_lab.jax.training import dot_general  # noqa: E402  JAX is optional

jnp = jax.numpy

A = np.random.default_rng(0).integers(-8, 9, (8, 64)).astype(np.float32)
B = np.random.default_rng(1).integers(-8, 9, (64, 16)).astype(np.float32)


def test_pinned_names():
    from ao_lab.jax.training import DotGeneral, dot_general
    from ao_lab.jax.training import dot_general as from_module

    assert ao_lab.jax.dot_general is ao_lab.jax.training.dot_general is dot_general is from_module
    assert ao_lab.jax.training.DotGeneral is DotGeneral
    assert callable(ao_lab.jax.matmul)


@pytest.mark.parametrize(
    "scheme",
    [
        "fp8_rowwise",
        *(pytest.param(n, marks=pytest.mark.nightly) for n in ("nf4", "nvfp4", "int4_g32_asymmetric")),
    ],
)
def test_quantized_operands(scheme):
    """Within float32 rounding of the exact product; under jit the same bits."""
    a, b = ao_lab.jax.quantize(jnp.asarray(A), scheme), ao_lab.jax.quantize(jnp.asarray(B), scheme, axis=0)
    exact = reference.matmul(reference.quantize(A, scheme), reference.quantize(B, scheme, axis=0))
    made = jax.jit(ao_lab.jax.matmul)(a, b)
    np.testing.assert_allclose(np.asarray(made), exact, rtol=1e-5, atol=1e-4)
    mixed = ao_lab.jax.matmul(jnp.asarray(A), b, out_dtype=jnp.bfloat16, bias=jnp.ones(16))
    assert mixed.dtype == jnp.bfloat16
    wanted = reference.matmul(A, reference.quantize(B, scheme, axis=0), bias=np.ones(16, np.float32))
    np.testing.assert_allclose(np.asarray(mixed, np.float32), wanted, rtol=2**-7)


def test_arrays():
    """Batches, two dtypes, a gradient; sums of integers are exact."""
    a, b = jnp.asarray(np.stack([A, -A]), jnp.bfloat16), jnp.asarray(B)
    np.testing.assert_array_equal(ao_lab.jax.matmul(a, b, precision="highest"), np.stack([A @ B, -A @ B]))
    gradient = jax.grad(lambda a: ao_lab.jax.matmul(a, b, precision="highest").sum())(jnp.asarray(A))
    np.testing.assert_array_equal(gradient, np.broadcast_to(B.sum(1), A.shape))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((A, B), TypeError, "takes JAX arrays"),
        ((jnp.asarray(A), jnp.asarray(B.T)), ValueError, "needs one K"),
        ((jnp.asarray(A), jnp.asarray(B[:, 0])), ValueError, "needs one K"),
        ((jnp.asarray(A, jnp.int32), jnp.asarray(B)), TypeError, "matmul takes float32"),
    ],
)
def test_refusals(arguments, error, message):
    with pytest.raises(error, match=message):
        ao_lab.jax.matmul(*arguments)


# How an operand is multiplied: exact factors, scales of sums, schemes of other kinds; programs for a GPU, made without one.


LAST = (((1,), (1,)), ((), ()))
CUSTOM_CALL = "triton_kernel_call_ffi"
#: A scale for each row under one for the tensor.
TWO_LEVELS = replace(SCHEMES["fp8_rowwise"], name="two_levels", outer=SCHEMES["nvfp4"].outer)
#: Scheme: the dtype of its factor, and how many scales sums are multiplied by.
FACTORS = {
    "fp8_tensorwise": ("bfloat16", 1), "fp8_rowwise": ("bfloat16", 1), "int8_rowwise": ("bfloat16", 1),
    "mxfp8_e5m2": ("bfloat16", 0), "mxint8": ("bfloat16", 0), "nvfp4": ("bfloat16", 1), "fp8_1x128": ("float32", 0),
    "int4_g32_asymmetric": ("float32", 0), "nf4": ("float32", 0), "torchao.fp8_rowwise_training": ("float32", 0),
    TWO_LEVELS: ("bfloat16", 2),
}  # fmt: skip


#: Whose values are dequantized in float32, as those of fp8_1x128 are.
SLOW = ("int4_g32_asymmetric", "nf4")


def normals(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def on_jax(q):
    return replace(q, **{part: jnp.asarray(value) for part in ("codes", "scale", "outer", "zero")
                         if (value := getattr(q, part)) is not None})  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in SLOW)) for name in FACTORS], ids=str
)
def test_factors(name):
    """Values times scales are what the codes stand for; products are within the bound of float32 sums."""
    a, b = quantize(normals(16, 256), name), quantize(normals(24, 256, seed=1), name)
    made = factor(on_jax(a))
    assert (str(made.values.dtype), len(made.scales)) == FACTORS[name]
    values = np.asarray(made.values, np.float64)
    for scale in made.scales:
        values = values * np.asarray(scale, np.float64)
    exact = dequantize(a).astype(np.float64)
    assert np.all(np.abs(values - exact) <= np.abs(exact) * 2.0**-23)
    if not made.scales:
        assert np.array_equal(values, exact)
    got = product(made, factor(on_jax(b)), "float32", None)
    bound = matmul_error_bound(a, transposed(b), accumulation="blocked") + matmul_error_bound(
        a, transposed(b)
    )
    assert np.all(np.abs(np.asarray(got, np.float64) - matmul(a, transposed(b))) <= bound)


@pytest.mark.parametrize("name", ["tensorwise", "nvfp4"])
def test_codes_of_the_transposed_matrix(name):
    one = RECIPES[name].output.b
    w = normals(32, 64)
    made, wanted = (
        transposed_factor(on_jax(quantize(w, one.scheme))),
        factor(on_jax(quantize(w.T, one.scheme))),
    )
    assert np.array_equal(np.asarray(made.values, np.float32), np.asarray(wanted.values, np.float32))
    for got, scale in zip(made.scales, wanted.scales, strict=True):
        assert got == scale


@pytest.fixture
def kernels_everywhere(monkeypatch):
    """As on a machine with a GPU: traced arrays may end there."""
    monkeypatch.setattr(functions, "has_kernels", lambda: True)


def launches(function, *shapes, platform="cuda"):
    """Kernels in the program of a function."""
    checks = [jax.export.DisabledSafetyCheck.custom_call(CUSTOM_CALL)]
    exported = jax.export.export(jax.jit(function), platforms=(platform,), disabled_checks=checks)
    arrays = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes)
    return exported(*arrays).mlir_module().count(f"@{CUSTOM_CALL}(")


@pytest.mark.nightly
def test_programs_for_a_gpu_launch_kernels(kernels_everywhere):
    """Six operands quantized; those of blocks along the sum are dequantized by a kernel too; a batch folds into one launch."""

    def step(x, w, g, numbers=LAST, recipe="rowwise"):
        y, gradients = jax.vjp(partial(dot_general, dimension_numbers=numbers, recipe=recipe), x, w)
        return y, gradients(g)

    shapes = (256, 128), (384, 128), (256, 384)
    assert launches(step, *shapes) == 6
    assert launches(partial(step, recipe="mxfp8"), *shapes) == 12
    assert launches(step, *shapes, platform="cpu") == 0
    batch = partial(step, recipe="mxfp8", numbers=(((2,), (2,)), ((0,), (0,))))
    assert launches(batch, *((2, *shape) for shape in shapes)) == 12
