"""`quantize_both` is `quantize` of a matrix and of its transpose, in every library."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from ao_lab.testing.strategies import assert_same_bits, assert_same_quantized, fill, float_arrays
from reference import SCHEMES, Scales, choose_scales, quantize, quantize_both
from tests.support.record_samples import sampled

X = fill("normals", (64, 96))
# Whole tensor, rows, blocks, tiles, e8m0, two levels, zero points; every one divides both axes.
NAMES = ["fp8_tensorwise", "fp8_rowwise", "fp8_1x128", "fp8_128x128", "mxfp8_e4m3", "mxfp4", "nvfp4", "int4_g32_asymmetric",
         "nf4"]  # fmt: skip


def expected(x, scheme, **options):
    return quantize(x, scheme, **options), quantize(np.ascontiguousarray(x.T), scheme, **options)


@settings(max_examples=30)
@given(
    x=float_arrays("float32", (32, 64)) | float_arrays("bfloat16", (32, 64)),
    name=st.sampled_from(NAMES),
    packed=st.booleans(),
)
def test_rows_and_columns(x, name, packed):
    rows, columns = quantize_both(x, name, packed=packed)
    assert (rows.shape, columns.shape) == ((32, 64), (64, 32))
    assert rows.axis == columns.axis == 1
    for result, want in zip((rows, columns), expected(x, name, packed=packed), strict=True):
        assert_same_quantized(result, want, inputs=x)


@pytest.mark.parametrize("name", NAMES)
def test_torch(name):
    tensor = torch.from_numpy(X.copy())
    result = quantize_both(tensor, name)
    for q, truth in zip(result, expected(X, name), strict=True):
        assert_same_quantized(q, truth)
        assert isinstance(q.codes, torch.Tensor)


@pytest.mark.parametrize("name", sampled({"fp8_128x128", "mxfp4"}, ["fp8_128x128", "mxfp4", "nvfp4"]))
def test_jax(name):
    """Compiled per copy, and both under the caller's jit and vmap."""
    array = jnp.asarray(X)
    batched = jax.jit(jax.vmap(lambda x: quantize_both(x, name)))(array[None])
    first = jax.tree.map(lambda leaf: leaf[0], batched)
    for result in (quantize_both(array, name), first):
        for q, truth in zip(result, expected(X, name), strict=True):
            assert_same_quantized(q, truth)


def test_stochastic_words_of_each_copy():
    record = replace(SCHEMES["mxfp4"], name="mxfp4_stochastic", rounding="stochastic")
    words = [reference.random_bits(shape, seed=1, stream=i) for i, shape in enumerate(((64, 96), (96, 64)))]
    rows, columns = quantize_both(X, record, random_bits=tuple(words))
    assert_same_quantized(rows, quantize(X, record, random_bits=words[0]))
    assert_same_quantized(columns, quantize(X.T, record, random_bits=words[1]))
    assert (rows.codes != columns.codes.T).any()
    with pytest.raises(ValueError, match="needs random_bits"):
        quantize_both(X, record)
    with pytest.raises(ValueError, match=r"shape \(96, 64\)"):
        quantize_both(X, record, random_bits=(words[0], words[0]))


def test_given_scales_of_either_copy():
    given_rows = choose_scales(X / 2, "fp8_rowwise")
    given_columns = Scales(np.full((96, 1), 0.5, np.float32))
    rows, columns = quantize_both(X, "fp8_rowwise", scales=(given_rows, given_columns.scale))
    assert_same_quantized(rows, quantize(X, "fp8_rowwise", scales=given_rows))
    assert_same_quantized(columns, quantize(X.T, "fp8_rowwise", scales=given_columns))
    rows, columns = quantize_both(X, "fp8_rowwise", scales=(None, given_columns))
    assert_same_quantized(rows, quantize(X, "fp8_rowwise"))
    assert_same_bits(columns.scale, given_columns.scale)


def test_the_second_copy_is_not_made_from_the_first():
    once = quantize(reference.dequantize(quantize(X, "mxfp4")).T, "mxfp4")
    assert (once.codes != quantize_both(X, "mxfp4")[1].codes).any()


@pytest.mark.parametrize("shape", [(0, 32), (32, 0), (0, 0)])
def test_empty(shape):
    rows, columns = quantize_both(np.zeros(shape, np.float32), "mxfp4", packed=True)
    assert rows.codes.shape == (shape[0], shape[1] // 2)
    assert columns.codes.shape == (shape[1], shape[0] // 2)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: quantize_both(X[0], "mxfp4"), ValueError, r"a matrix \(M, K\), got float32 of shape \(96,\)"),
        (lambda: quantize_both(X[None], "mxfp4"), ValueError, r"shape \(1, 64, 96\)"),
        (lambda: quantize_both(X.astype(np.int32), "mxfp4"), TypeError, "int32"),
        (lambda: quantize_both(X[:, :80], "mxfp4"), ValueError, "not divisible by the block size 32"),
        (lambda: quantize_both(X[:33], "mxfp4"), ValueError, r"\(96, 33\)"),
        (lambda: quantize_both(X, "mxfp4", scales=Scales()), TypeError, "None or a pair.*got Scales"),
        (lambda: quantize_both(X, "mxfp4", scales=(None,)), TypeError, "scales is None or a pair"),
        (lambda: quantize_both(X, "mxfp4", random_bits=X), TypeError, "random_bits is None or a pair"),
    ],
)  # fmt: skip
def test_what_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()
