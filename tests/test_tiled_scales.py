"""The tiled layout of block scales: the documented byte offsets, torchao's `to_blocked`, every library."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ao_lab.testing import assert_same_bits
from reference import quantize, tile_scales, untile_scales
from reference.tiled_scales import tiled_size

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
    for made in (tile_scales(tensor), tile_scales.__wrapped__(tensor), tile_scales(array), jitted, batched):
        assert_same_bits(made, expected)
    back = jax.jit(lambda tiled: untile_scales(tiled, shape))(jitted)
    for made in (untile_scales.__wrapped__(torch.from_numpy(expected), shape), back):
        assert_same_bits(made, scale)


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
