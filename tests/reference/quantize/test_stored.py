"""The tiled layout of block scales: the documented byte offsets, torchao's `to_blocked`, every library."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fast
from ao_lab.testing.strategies import assert_same_bits
from reference import (
    SCHEMES,
    Quantized,
    dequantize,
    matmul,
    quantize,
    quantize_both,
    tile_scales,
    untile_scales,
)
from reference.quantize.quantize import with_plain_scales, with_tiled_scales
from reference.quantize.stored import tiled_size
from tests.support.record_samples import sampled

SHAPES = [(1, 1), (32, 4), (128, 4), (129, 5), (256, 8), (300, 17), (16, 64), (640, 3)]


def codes(shape, seed=0):
    return np.random.default_rng(seed).integers(1, 256, shape).astype(np.uint8)


def tiled_one_by_one(scale):
    """cuBLAS's formula, a scale at a time: tiles of 512 bytes, row by row of tiles."""
    row_tiles, column_tiles = -(-scale.shape[0] // 128), -(-scale.shape[1] // 4)
    tiled = np.zeros(row_tiles * column_tiles * 512, np.uint8)
    for (row, column), code in np.ndenumerate(scale):
        tile = (row // 128) * column_tiles + column // 4
        tiled[tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + column % 4] = code
    return tiled


@given(rows=st.integers(0, 300), columns=st.integers(0, 10), seed=st.integers(0, 2**32 - 1))
def test_every_scale_lies_where_the_formula_says(rows, columns, seed):
    scale = codes((rows, columns), seed)
    tiled = tile_scales(scale)
    assert tiled.shape == (tiled_size((rows, columns)),)
    assert_same_bits(tiled, tiled_one_by_one(scale))
    assert_same_bits(untile_scales(tiled, (rows, columns)), scale)


@pytest.mark.parametrize("shape", SHAPES)
def test_torchao_makes_the_same(shape):
    from torchao.prototype.mx_formats.utils import from_blocked, to_blocked

    scale = torch.from_numpy(codes(shape))
    tiled = tile_scales(scale)
    assert torch.equal(tiled, to_blocked(scale))
    assert torch.equal(untile_scales(tiled, shape), from_blocked(tiled, *shape))


@pytest.mark.parametrize(("name", "blocks"), [("mxfp8_e4m3", 8), ("mxfp4", 8), ("nvfp4", 16)])
def test_scales_as_quantize_keeps_them(name, blocks):
    q = quantize(np.random.default_rng(0).standard_normal((160, 256)).astype(np.float32), name)
    assert q.scale.shape == (160, blocks)
    tiled = tile_scales(q.scale)
    assert tiled.shape == (2 * blocks // 4 * 512,)
    assert_same_bits(tiled, tiled_one_by_one(q.scale))
    assert_same_bits(untile_scales(tiled, q.scale.shape), q.scale)


@pytest.mark.parametrize("shape", SHAPES)
def test_libraries(shape):
    scale = codes(shape)
    expected, tensor, array = tile_scales(scale), torch.from_numpy(scale), jnp.asarray(scale)
    jitted, batched = jax.jit(tile_scales)(array), jax.vmap(tile_scales)(array[None])[0]
    for result in (tile_scales(tensor), tile_scales.__wrapped__(tensor), tile_scales(array), jitted, batched):
        assert_same_bits(result, expected)
    back = jax.jit(lambda tiled: untile_scales(tiled, shape))(jitted)
    for result in (untile_scales.__wrapped__(torch.from_numpy(expected), shape), back):
        assert_same_bits(result, scale)


NAMES = ["mxfp8_e4m3", "mxfp4", "nvfp4", "torchao.nvfp4"]
X = np.random.default_rng(1).standard_normal((96, 96)).astype(np.float32)


def same_but_tiled(result, plain):
    """Tiled scales of a `Quantized` that has plain ones; everything else as it is."""
    assert (result.tiled, plain.tiled) == (True, False)
    assert_same_bits(result, replace(plain, scale=tile_scales(plain.scale), tiled=True))
    assert_same_bits(with_plain_scales(result).scale, plain.scale)
    assert_same_bits(result.scales, plain.scales)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("packed", [False, True])
def test_quantize_tiled(name, packed):
    plain, result = quantize(X, name, packed=packed), quantize(X, name, packed=packed, tiled=True)
    same_but_tiled(result, plain)
    assert_same_bits(dequantize(result), dequantize(plain))
    assert_same_bits(dequantize(result, "bfloat16"), dequantize(plain, "bfloat16"))
    assert_same_bits(quantize(X, name, scales=result.scales, tiled=True).scale, result.scale)
    assert_same_bits(with_tiled_scales(plain), result)
    assert with_tiled_scales(result) is result
    assert_same_bits(matmul(result, with_plain_scales(result)), matmul(plain, plain))


@pytest.mark.parametrize("name", NAMES)
def test_both_copies_tiled(name):
    for result, plain in zip(
        quantize_both(X[:64], name, tiled=True), quantize_both(X[:64], name), strict=True
    ):
        same_but_tiled(result, plain)


@pytest.mark.parametrize("name", sampled({"mxfp4", "nvfp4"}, NAMES))
def test_tiled_in_every_library(name):
    expected = quantize(X, name, tiled=True)
    tensor, array = torch.from_numpy(X.copy()), jnp.asarray(X)
    jitted = jax.jit(lambda x: quantize(x, name, tiled=True))(array)
    for result in (fast.quantize(tensor, name, tiled=True), quantize(array, name, tiled=True), jitted):
        assert result.tiled
        assert_same_bits(result, expected)
    assert_same_bits(fast.dequantize(fast.quantize(tensor, name, tiled=True)), dequantize(expected))
    assert_same_bits(jax.jit(dequantize)(jitted), dequantize(expected))
    assert_same_bits(fast.quantize_both(tensor, name, tiled=True)[1], quantize_both(X, name, tiled=True)[1])


def test_tiled_under_a_tracer():
    tensor = torch.from_numpy(X.copy())
    compiled = torch.compile(
        lambda x: fast.quantize(x, "mxfp4", tiled=True).scale, backend="eager", fullgraph=True
    )
    assert_same_bits(compiled(tensor), quantize(X, "mxfp4", tiled=True).scale)
    back = torch.compile(
        lambda x: fast.dequantize(fast.quantize(x, "nvfp4", tiled=True)), backend="eager", fullgraph=True
    )
    assert_same_bits(back(tensor), dequantize(quantize(X, "nvfp4")))


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)])
def test_empty_tiled(shape):
    q = quantize(np.zeros(shape, np.float32), "mxfp4", tiled=True)
    assert q.scale.shape == (0,)
    assert dequantize(q).shape == shape


@pytest.mark.parametrize("run", [quantize, fast.quantize])
@pytest.mark.parametrize(
    ("name", "shape", "axis", "words"),
    [
        ("fp8_rowwise", (32, 32), -1, "blocks along one axis .* leave tiled out"),
        ("fp8_1x128", (32, 128), -1, "scales in float32"),
        ("te.nvfp4_16x16", (32, 32), -1, r"blocks \(16, 16\)"),
        ("mxfp4", (32, 32), 0, "along its last axis, got shape .* and axis 0"),
        ("mxfp4", (2, 32, 32), -1, r"a matrix \(M, K\)"),
        ("mxfp4", (32,), -1, r"shape \(32,\)"),
    ],
)  # fmt: skip
def test_what_has_no_tiles(run, name, shape, axis, words):
    x = np.ones(shape, np.float32) if run is quantize else torch.ones(shape)
    with pytest.raises(ValueError, match=words):
        run(x, name, axis=axis, tiled=True)


def test_tiled_scales_of_another_shape():
    q = quantize(X, "mxfp4", tiled=True)
    with pytest.raises(ValueError, match=r"\(512,\), got uint8 of shape \(96, 3\)"):
        dequantize(replace(q, scale=quantize(X, "mxfp4").scale))
    with pytest.raises(ValueError, match="float32"):
        dequantize(Quantized(q.codes, q.scale, None, None, q.shape, 1, SCHEMES["fp8_1x128"], tiled=True))


def test_padding_is_zero_and_is_dropped():
    tiled = tile_scales(np.full((1, 1), 127, np.uint8))
    assert tiled.nonzero()[0].tolist() == [0]
    assert untile_scales(np.full(512, 9, np.uint8), (2, 3)).tolist() == [[9] * 3] * 2


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: tile_scales(np.ones((2, 2), np.float32)), TypeError, "uint8, got float32"),
        (lambda: tile_scales(np.ones(4, np.uint8)), ValueError, r"\(M, blocks\), got shape \(4,\)"),
        (lambda: untile_scales(np.ones(512, np.int8), (2, 2)), TypeError, "uint8, got int8"),
        (lambda: untile_scales(np.ones(512, np.uint8), (2, 5)), ValueError, r"\(1024,\), got \(512,\)"),
        (lambda: untile_scales(np.ones((32, 16), np.uint8), (2, 2)), ValueError, r"got \(32, 16\)"),
        (lambda: untile_scales(np.ones(512, np.uint8), (2,)), ValueError, r"got \(2,\)"),
    ],
)
def test_what_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()
