"""`packed=True`: the codes that `pack` makes, in every library, back through `dequantize` and into `matmul`."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import ao_lab
import reference
from ao_lab.testing.strategies import assert_same_bits, assert_same_quantized, fill
from reference import SCHEMES, dequantize, pack, quantize
from tests.support.record_samples import sampled

# 2, 3, 4, 6 and 8 bits; two levels, zero points, a codebook.
NAMES = ["int2_g32", "int3_g32", "mxfp4", "nvfp4", "int4_g32_asymmetric", "mxfp6_e2m3", "mxfp8_e4m3", "nf4"]
X = fill("normals", (2, 32, 96))


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("name", NAMES)
def test_packed_is_pack_of_the_codes(name, axis):
    x = np.moveaxis(X, -1, axis)
    q, plain = quantize(x, name, axis=axis, packed=True), quantize(x, name, axis=axis)
    assert q.packed is True
    assert plain.packed is False
    assert_same_quantized(q, replace(plain, codes=pack(plain.codes, SCHEMES[name].element), packed=True))
    assert_same_bits(dequantize(q), dequantize(plain))


def assert_packed(q, expected):
    assert q.packed is True
    assert_same_quantized(q, expected)
    assert_same_bits(dequantize(q), dequantize(expected))


@pytest.mark.parametrize("name", NAMES)
def test_torch(name):
    """torch shares NumPy's memory and by `__wrapped__` runs its own."""
    expected, tensor = quantize(X, name, packed=True), torch.from_numpy(X.copy())
    for function in (quantize, quantize.__wrapped__):
        assert_packed(function(tensor, name, packed=True), expected)


# A width that fills bytes evenly and one that does not; the others, a second level and zero points at night.
@pytest.mark.parametrize("name", sampled({"int3_g32", "mxfp4"}, NAMES))
def test_jax(name):
    """JAX keeps the flag as a static part."""
    expected = quantize(X, name, packed=True)
    result = quantize(jnp.asarray(X), name, packed=True)
    assert_packed(result, expected)
    assert_packed(jax.jit(lambda x: quantize(x, name, packed=True))(X), expected)
    assert_same_bits(jax.jit(dequantize)(expected), dequantize(expected))
    plain = jax.eval_shape(lambda x: quantize(x, name), X)
    assert jax.tree.structure(result) != jax.tree.structure(plain)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int3_g32"])
def test_operands_of_matmul(name):
    other = fill("normals", (96, 4), seed=1)
    q = quantize(X, name, packed=True)
    for accumulation in ("exact", "blocked"):
        expected = ao_lab.matmul(quantize(X, name), other, accumulation=accumulation)
        assert_same_bits(ao_lab.matmul(q, other, accumulation=accumulation), expected)
    assert_same_bits(
        reference.matmul_error_bound(q, other), reference.matmul_error_bound(quantize(X, name), other)
    )


def test_vmap_of_packed():
    stacked = jax.jit(jax.vmap(lambda x: quantize(x, "mxfp4", packed=True)))(jnp.asarray(X))
    assert stacked.codes.shape == (2, 32, 48)
    assert stacked.shape == (32, 96)
    assert_same_bits(jax.jit(jax.vmap(dequantize))(stacked), dequantize(quantize(X, "mxfp4")))


@pytest.mark.parametrize("shape", [(0, 32), (3, 0), (0,)])
def test_empty(shape):
    q = quantize(np.zeros(shape, np.float32), "mxfp4", packed=True)
    assert q.codes.shape == (*shape[:-1], shape[-1] // 2)
    assert dequantize(q).shape == shape


def test_what_is_refused():
    with pytest.raises(ValueError, match="pack needs at least one axis"):
        quantize(np.float32(1), "nvfp4", packed=True)
    q = quantize(X, "mxfp4", packed=True)
    with pytest.raises(ValueError, match=r"^codes .* \(2, 32, 96\), got \(2, 32, 48\);.*packed=True"):
        dequantize(replace(q, packed=False))
    with pytest.raises(ValueError, match=r"^packed codes .* \(2, 32, 48\), got \(2, 32, 96\);.*packed=False"):
        dequantize(replace(quantize(X, "mxfp4"), packed=True))
    # A byte per code needs no packing, so 0-d stays possible.
    assert quantize(np.float32(1), "fp8_tensorwise", packed=True).codes.shape == ()
