"""`ao_lab.jax.matmul`: the exact product within rounding, traced or not; names that the documents pin."""

import numpy as np
import pytest

import reference

jax = pytest.importorskip("jax")
jnp = jax.numpy

import ao_lab.jax  # noqa: E402  JAX is optional

A = np.random.default_rng(0).integers(-8, 9, (8, 64)).astype(np.float32)
B = np.random.default_rng(1).integers(-8, 9, (64, 16)).astype(np.float32)


def test_pinned_names():
    from ao_lab.jax.training import dot_general
    from ao_lab.jax.training.dot_general import DotGeneral
    from ao_lab.jax.training.dot_general import dot_general as from_module

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
