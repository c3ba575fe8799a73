"""`layer_norm_quantize`: the stated order bit for bit, torch's function, every library, edges, what is refused."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from ao_lab.testing.strategies import assert_same_quantized, fill
from reference import dequantize, layer_norm_quantize, quantize
from tests.support.bits import tensor_of

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
KINDS = ("normals", "wide", "subnormals", "largest", "zeros", "bits")
X, W = np.arange(8, dtype=np.float32).reshape(2, 4), np.ones(4, np.float32)


def mean(v, length):
    """Adjacent pairs of float32, zeros up to a power of two."""
    size = 1 << max(length - 1, 0).bit_length()
    total = np.concatenate([v, np.zeros((*v.shape[:-1], size - length), np.float32)], -1)
    while total.shape[-1] > 1:
        total = total[..., 0::2] + total[..., 1::2]
    return total / np.float32(length)


def plain(x, weight, bias, eps):
    """The rule in NumPy's own float32 arithmetic, which is IEEE 754."""
    wide = lambda a: a.astype(np.float32)  # noqa: E731
    with np.errstate(all="ignore"):
        d = wide(x) - mean(wide(x), x.shape[-1])
        r = np.float32(1) / np.sqrt(mean(d * d, x.shape[-1]) + np.float32(eps))
        y = d * r * wide(weight)
        y = (y if bias is None else y + wide(bias)).astype(x.dtype)
    return np.where(np.isnan(y), np.array(np.nan, y.dtype), y)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_stated_order(dtype, kind):
    """By a scheme of rows, in which a bit of the largest element is seen in the scale, and by groups."""
    for length in (1, 3, 64, 96):
        x = fill(kind, (5, length), dtype=dtype, seed=length)
        weight, bias = (fill("normals", (length,), dtype=dtype, seed=seed) for seed in (1, 2))
        for eps, added in ((1e-5, None), (1e-6, bias), (0.0, bias)):
            for name in ("fp8_rowwise", *(["mxfp8_e4m3"] if length % 32 == 0 else [])):
                got = layer_norm_quantize(x, weight, name, bias=added, eps=eps)
                assert_same_quantized(got, quantize(plain(x, weight, added, eps), name))


@pytest.mark.parametrize("library", [tensor_of, pytest.param(jnp.asarray, marks=pytest.mark.nightly)])
def test_every_library(library):
    arrays = [fill("normals", shape, seed=seed) for seed, shape in enumerate(((6, 64), (64,), (64,)))]
    x, weight, bias = arrays
    expected = layer_norm_quantize(x, weight, "mxfp4", bias=bias, packed=True)
    x, weight, bias = map(library, arrays)
    assert_same_quantized(layer_norm_quantize(x, weight, "mxfp4", bias=bias, packed=True), expected)


def test_it_is_torchs_layer_norm():
    """Within half a step of e4m3, which is 1/16 of an element, and what sums in another order move."""
    x, weight, bias = torch.randn(8, 96) * 3 + 5, torch.randn(96), torch.randn(96)
    wanted = torch.nn.functional.layer_norm(x.double(), (96,), weight.double(), bias.double(), 1e-5)
    q = layer_norm_quantize(x, weight, "fp8_rowwise", bias=bias)
    limit = wanted.abs() * (1 / 16 + 2.0**-16) + q.scale * 2.0**-10 + 2.0**-16
    assert ((dequantize(q).double() - wanted).abs() <= limit).all()


def test_edges():
    """NaN and infinities make their row NaN and no other; a bias alone is left where squares overflow; equal numbers."""
    x = np.ones((5, 8), np.float32)
    x[0, 1], x[1, 2] = np.nan, np.inf
    x[2, :4], x[2, 4:] = 1e30, -1e30
    bias = np.full(8, 2, np.float32)
    values = dequantize(layer_norm_quantize(x, np.ones(8, np.float32), "fp8_rowwise", bias=bias))
    assert np.isnan(values[:2]).all()
    assert (values[2:] == 2).all()
    zero = layer_norm_quantize(x, np.ones(8, np.float32), "fp8_rowwise", eps=0.0)
    assert np.isnan(dequantize(zero)[3:]).all()


@pytest.mark.parametrize(
    ("given", "options", "error", "message"),
    [
        ((X.astype(np.int32), W), {}, TypeError, "layer_norm_quantize takes.*got int32"),
        ((np.float32(1), W), {}, ValueError, r"layer_norm_quantize takes x of shape \(\.\.\., K\)"),
        ((X, W[:3]), {}, ValueError, r"weight is float32 of shape \(4,\)"),
        ((X, W), {"bias": W[:3]}, ValueError, r"bias is float32 of shape \(4,\)"),
        ((X, W), {"bias": W.astype(np.float16)}, ValueError, "bias is float32.*got float16"),
        ((X, W), {"eps": -1.0}, ValueError, "eps is a number from 0"),
    ],
)
def test_what_is_refused(given, options, error, message):
    with pytest.raises(error, match=message):
        layer_norm_quantize(*given, "fp8_rowwise", **options)
