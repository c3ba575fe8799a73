"""`rms_norm`: the stated order bit for bit, the real numbers and torch's function within derived bounds, every library."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ao_lab.testing.strategies import assert_same_bits, assert_same_quantized, fill, float_arrays
from reference import FORMATS, quantize, rms_norm, rms_norm_quantize
from tests.support.bits import tensor_of
from tests.support.record_samples import sampled
from tests.support.refusals import refused

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
KINDS = ("normals", "wide", "subnormals", "largest", "zeros", "bits")
U = 2.0**-24


def one_nan(values):
    """Every NaN as the specification writes it."""
    return np.where(np.isnan(values), np.array(np.nan, values.dtype), values)


def plain(x, weight, eps, residual=None):
    """The rule in NumPy's own float32 arithmetic, which is IEEE 754."""
    wide = lambda a: a.astype(np.float32)  # noqa: E731
    with np.errstate(all="ignore"):
        h = x if residual is None else (wide(x) + wide(residual)).astype(x.dtype)
        squares = wide(h) * wide(h)
        size = 1 << max(x.shape[-1] - 1, 0).bit_length()
        total = np.concatenate([squares, np.zeros((*x.shape[:-1], size - x.shape[-1]), np.float32)], -1)
        while total.shape[-1] > 1:
            total = total[..., 0::2] + total[..., 1::2]
        r = np.float32(1) / np.sqrt(total / np.float32(x.shape[-1]) + np.float32(eps))
        y = (wide(h) * r * wide(weight)).astype(x.dtype)
    return one_nan(y), None if residual is None else one_nan(h)


def inputs(kind, dtype, shape=(6, 100), seed=0):
    """x, weight, residual."""
    x, residual = (fill(kind, shape, dtype=dtype, seed=seed + i) for i in range(2))
    return x, fill("normals", shape[-1:], dtype=dtype, seed=seed + 2), residual


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_stated_order(dtype, kind):
    for length in (1, 2, 3, 64, 100, 257):
        x, weight, residual = inputs(kind, dtype, (5, length), seed=length)
        for eps, added in ((1e-6, None), (1e-5, residual), (0.0, residual)):
            assert_same_bits(rms_norm(x, weight, eps=eps, residual=added), plain(x, weight, eps, added))


@settings(max_examples=60)
@given(st.sampled_from(list(DTYPES)), st.data())
def test_drawn_rows(dtype, data):
    x, residual = (data.draw(float_arrays(dtype, (2, 24))) for _ in range(2))
    weight = data.draw(float_arrays(dtype, (24,)))
    assert_same_bits(rms_norm(x, weight, residual=residual), plain(x, weight, 1e-6, residual), inputs=x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch(dtype):
    """Through NumPy's memory and in its own namespace."""
    for kind in KINDS:
        x, weight, residual = inputs(kind, dtype, (6, 11))
        expected = rms_norm(x, weight, residual=residual)
        tensors = [tensor_of(a) for a in (x, weight, residual)]
        for function in (rms_norm, rms_norm.__wrapped__):
            assert_same_bits(function(*tensors[:2], residual=tensors[2]), expected, inputs=x)
        alone = rms_norm(*tensors[:2])
        assert_same_bits(alone[0], rms_norm(x, weight)[0], inputs=x)
        assert alone[1] is None


@pytest.mark.parametrize("dtype", sampled({"bfloat16"}, DTYPES))
def test_jax(dtype):
    """Compiled. Rows are short and no power of two: every level of the sum's tree is as much again to compile."""
    for kind in KINDS:
        x, weight, residual = inputs(kind, dtype, (6, 11))
        got = rms_norm(*map(jnp.asarray, (x, weight)), residual=jnp.asarray(residual))
        assert_same_bits(got, rms_norm(x, weight, residual=residual), inputs=x)


# A trace does not depend on the dtype of what is traced.
@pytest.mark.parametrize("dtype", sampled({"float32"}, DTYPES))
def test_traced_in_jax(dtype):
    """Under the caller's jit, without a residual and as a batch of rows."""
    alone = jax.jit(rms_norm)
    rows = jax.jit(jax.vmap(lambda a, w, b: rms_norm(a, w, residual=b), in_axes=(0, None, 0)))
    for kind in KINDS:
        x, weight, residual = inputs(kind, dtype, (6, 11))
        arrays = [jnp.asarray(a) for a in (x, weight, residual)]
        assert_same_bits(rows(*arrays), rms_norm(x, weight, residual=residual), inputs=x)
        got = alone(*arrays[:2])
        assert_same_bits(got[0], rms_norm(x, weight)[0], inputs=x)
        assert got[1] is None


@pytest.mark.nightly  # a compilation per operation; the same under jit by day
def test_jax_step_by_step():
    x, weight, residual = inputs("wide", "float32", (2, 2))
    got = rms_norm.__wrapped__(jnp.asarray(x), jnp.asarray(weight), residual=jnp.asarray(residual))
    assert_same_bits(got, rms_norm(x, weight, residual=residual))


def exact(h, weight, eps):
    """y in float64, whose own error (under 2**-45 for these lengths) the bounds below leave room for."""
    wide = h.astype(np.float64)
    root = np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + np.float64(np.float32(eps)))
    return wide / root * weight.astype(np.float64)


def bound(y, roundings, dtype):
    """|computed - y|: `roundings` float32 roundings, (1 + u)**n - 1 <= n u / (1 - n u), then one to the dtype.

    The last is half a unit in the last place of the computed number, at most 2**-p of its magnitude, and half the smallest
    subnormal below the normal numbers. Inputs are such that nothing else underflows.
    """
    gamma = roundings * U / (1 - roundings * U) * (1 + 2.0**-20)
    if dtype == "float32":
        return np.abs(y) * gamma
    fmt = FORMATS[dtype]
    last = 2.0 ** -(fmt.mantissa_bits + 1)
    return np.abs(y) * (gamma + (1 + gamma) * last) + fmt.smallest_subnormal / 2


def roundings(additions):
    """A square passes its own rounding, `additions` additions, the division by K and the addition of eps; the root halves
    what they amount to. The root, the reciprocal and two products follow."""
    return (additions + 3) / 2 + 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 7, 256, 4096])
def test_within_its_bound_of_the_real_numbers_and_of_torch(dtype, length):
    x, weight, residual = inputs("normals", dtype, (8, length), seed=length)
    y, h = rms_norm(x, weight, residual=residual)
    torch_h = tensor_of(x) + tensor_of(residual)
    assert_same_bits(torch_h, h)
    theirs = torch.nn.functional.rms_norm(torch_h, (length,), tensor_of(weight), eps=1e-6).double().numpy()
    truth = exact(h, weight, 1e-6)
    tree = bound(truth, roundings((length - 1).bit_length()), dtype)
    assert (np.abs(y.astype(np.float64) - truth) <= tree).all()
    # torch adds in an order of its own; two more roundings cover a reciprocal square root within two units.
    any_order = bound(truth, roundings(length - 1) + 2, dtype)
    assert (np.abs(theirs - truth) <= any_order).all()
    assert (np.abs(theirs - y.astype(np.float64)) <= tree + any_order).all()


def test_edges_are_those_of_torch():
    """Zeros, NaN, infinities, rows whose squares overflow or vanish, with and without eps: every root is a power of two, or
    rounds to one, so a different order or reciprocal square root changes nothing. NaN where torch has NaN."""
    inf, nan = np.inf, np.nan
    rows = [
        [0, 0],
        [-0.0, 0],
        [1, nan],
        [inf, 1],
        [-inf, inf],
        [2.0**100, 1],
        [2.0**-100, 0],
        [4, -4],
        [2.0**60, 2.0**60],
    ]
    x = np.array(rows, np.float32)
    weight = np.array([1, -2], np.float32)
    for eps in (0.0, 2.0**-20):
        ours = rms_norm(x, weight, eps=eps)[0]
        with np.errstate(all="ignore"):
            theirs = torch.nn.functional.rms_norm(
                torch.from_numpy(x), (2,), torch.from_numpy(weight), eps=eps
            )
        assert_same_bits(ours, one_nan(theirs.numpy()))


def test_overflow_of_the_result_is_infinite():
    """One element of 25 holds the whole norm, so y is 5 times the weight."""
    x = np.eye(1, 25, dtype=np.float16)
    y = rms_norm(x, np.full(25, 65504, np.float16))[0]
    assert y[0, 0] == np.inf
    assert (y[0, 1:] == 0).all()


SCHEMES = ["mxfp8_e4m3", "mxfp4", "nvfp4", "fp8_rowwise", "int4_g32_asymmetric"]


@pytest.mark.parametrize("name", SCHEMES)
def test_quantized_is_quantize_of_y(name):
    for dtype in DTYPES:
        x, weight, residual = inputs("normals", dtype, (4, 64))
        y, h = rms_norm(x, weight, eps=1e-5, residual=residual)
        tensors = [tensor_of(a) for a in (x, weight, residual)]
        for packed in (False, True):
            options = {"eps": 1e-5, "packed": packed}
            result = [
                rms_norm_quantize(x, weight, name, residual=residual, **options),
                rms_norm_quantize(*tensors[:2], name, residual=tensors[2], **options),
                rms_norm_quantize.__wrapped__(*tensors[:2], name, residual=tensors[2], **options),
            ]
            for q, new in result:
                assert_same_quantized(q, quantize(y, name, packed=packed))
                assert_same_bits(new, h)
        assert rms_norm_quantize(x, weight, name)[1] is None


@pytest.mark.parametrize("name", sampled({"mxfp4"}, ["mxfp4", "fp8_rowwise"]))
def test_quantized_in_jax(name):
    x, weight, residual = inputs("normals", "bfloat16", (4, 32))
    arrays = [jnp.asarray(a) for a in (x, weight, residual)]
    expected = rms_norm_quantize(x, weight, name, residual=residual, packed=True)
    got = rms_norm_quantize(*arrays[:2], name, residual=arrays[2], packed=True)
    assert_same_quantized(got[0], expected[0])
    assert_same_bits(got[1], expected[1])


X, W = np.ones((2, 4), np.float32), np.ones(4, np.float32)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: rms_norm(X.astype(np.float64), W), TypeError, "got float64"),
        (lambda: rms_norm(X.astype(np.int32), W), TypeError, "got int32"),
        (lambda: rms_norm(np.float32(1), W), ValueError, r"\(\.\.\., K\)"),
        (lambda: rms_norm(X, W[:3]), ValueError, r"weight is float32 of shape \(4,\).*got float32 of shape \(3,\)"),
        (lambda: rms_norm(X, W.astype(np.float16)), ValueError, "weight is float32.*got float16"),
        (lambda: rms_norm(X, None), ValueError, "weight is float32.*got NoneType"),
        (lambda: rms_norm(X, W, residual=W), ValueError, r"residual is float32 of shape \(2, 4\)"),
        (lambda: rms_norm(jnp.asarray(X), W), ValueError, "in x's library, got ndarray"),
        (lambda: rms_norm(X, W, eps=-1.0), ValueError, "eps is a number from 0"),
        (lambda: rms_norm(X, W, eps=float("nan")), ValueError, "eps is a number from 0"),
    ],
)  # fmt: skip
def test_what_is_refused(call, error, words):
    refused(error, words, call)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (0,), (4,), (2, 3, 4)])
def test_every_rank_and_empty(shape):
    x = np.ones(shape, np.float32)
    y, h = rms_norm(x, np.ones(shape[-1:], np.float32), eps=0.0, residual=x)
    assert y.shape == h.shape == shape
    assert (y == 1).all()
