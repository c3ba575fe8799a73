"""Transposable masks against an exhaustive search and a loop over sorted elements."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ao_lab.testing.strategies import assert_same_bits
from reference.sparsity.compress import compress, decompress
from reference.sparsity.prune import prune
from reference.sparsity.transposable import compress_transposable, prune_transposable
from tests.support.record_samples import sampled
from tests.support.refusals import refused

SPECIAL = [
    0,
    0x80000000,
    1,
    0x7F800000,
    0xFF800000,
    0x7FC00000,
    0xFF800001,
    0x3F800000,
    0x3F800001,
    0x7F7FFFFF,
    0x00800000,
]
TILES = hnp.arrays(
    np.uint32, (4, 4), elements=st.one_of(st.sampled_from(SPECIAL), st.integers(0, 2**32 - 1))
).map(lambda bits: bits.view(np.float32))
#: Few values: ties in nearly every tile.
TIED = hnp.arrays(np.int8, (4, 4), elements=st.integers(-2, 2)).map(lambda tile: tile.astype(np.float32))


def all_masks():
    """Every way to put two into each row and column: found among all 2**16 masks, in the order of their kept places."""
    masks = []
    for eight in itertools.combinations(range(16), 8):
        mask = np.zeros(16, bool)
        mask[list(eight)] = True
        mask = mask.reshape(4, 4)
        if (mask.sum(0) == 2).all() and (mask.sum(1) == 2).all():
            masks.append(mask)
    return masks


MASKS = np.array(all_masks())


def search(tile):
    """The first best mask: most NaNs, then most infinities, then the largest sum of the finite ones, in float32 by rows."""
    size = np.abs(tile)
    kept = np.where(MASKS & np.isfinite(size), size, np.float32(0)).astype(np.float32)
    with np.errstate(over="ignore"):
        rows = kept.sum(-1, dtype=np.float32)  # two numbers and two zeros: one rounding in any order
        total = (rows[:, 0] + rows[:, 1]) + (rows[:, 2] + rows[:, 3])
    counts = [(MASKS & kind).sum((1, 2)) for kind in (np.isnan(tile), np.isinf(tile))]
    values = list(zip(*counts, total, strict=True))
    return MASKS[values.index(max(values))]


def greedy(tile):
    def order(place):
        size = abs(float(tile[place]))
        return (not np.isnan(size), -size if not np.isnan(size) else 0, place)

    mask = np.zeros((4, 4), bool)
    for place in sorted(np.ndindex(4, 4), key=order):
        if mask[place[0]].sum() < 2 and mask[:, place[1]].sum() < 2:
            mask[place] = True
    return mask


def test_there_are_90_masks_in_lexicographic_order():
    from reference.sparsity import transposable

    np.testing.assert_array_equal(transposable.MASKS.reshape(-1, 4, 4), MASKS)
    assert len(MASKS) == 90


@settings(max_examples=80, deadline=None)
@given(st.one_of(TILES, TIED))
def test_both_methods_on_any_tile(tile):
    np.testing.assert_array_equal(prune_transposable(tile), search(tile))
    np.testing.assert_array_equal(prune_transposable(tile, method="greedy"), greedy(tile))


@pytest.mark.parametrize(
    "values",
    [
        [np.nan, np.inf, -np.inf, 3, 1, 0],  # NaN before infinities before sums
        [2.0**24, 2.0**24 + 2, 2.0**23 + 1, 3, 1],  # sums that depend on the order of addition
        [3e38, 2e38, 1, -0.0],  # and that overflow
    ],
)
def test_directed_tiles(values):
    tiles = np.random.default_rng(4).choice(np.array(values, np.float32), (100, 4, 4))
    wanted = [search(tile) for tile in tiles]
    np.testing.assert_array_equal(prune_transposable(tiles), wanted)


@settings(max_examples=25, deadline=None)
@given(hnp.arrays(np.int16, (4, 4), elements=st.integers(-1000, 1000)))
def test_exact_is_the_optimum_of_integers(tile):
    """Sums of such integers are exact in float32, so the mask is the true optimum, and the transpose's is as good."""
    w = tile.astype(np.float32)
    best = max(int(np.abs(tile.astype(int))[mask].sum()) for mask in MASKS)
    for mask in (prune_transposable(w), prune_transposable(w.T.copy()).T):
        assert int(np.abs(tile.astype(int))[mask].sum()) == best


@pytest.mark.parametrize("method", ["exact", "greedy"])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_tiles_and_libraries(method, name):
    """Every tile by itself; NumPy, torch and JAX give one mask; it and its transpose compress."""
    rng = np.random.default_rng(1)
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    w = rng.standard_normal((2, 12, 8)).astype(dtype)
    mask = prune_transposable(w, method=method)
    one = search if method == "exact" else greedy
    for batch, row, column in itertools.product(range(2), range(3), range(2)):
        at = np.s_[batch, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
        np.testing.assert_array_equal(mask[at], one(w[at].astype(np.float32)))
    on_torch = prune_transposable(
        torch.from_numpy(w.astype(np.float32)).to(getattr(torch, name)), method=method
    )
    assert on_torch.dtype == torch.bool
    np.testing.assert_array_equal(on_torch.numpy(), mask)
    if name == "bfloat16":
        np.testing.assert_array_equal(prune_transposable(jnp.asarray(w), method=method), mask)
    for view, kept in ((w, mask), (np.swapaxes(w, 1, 2), np.swapaxes(mask, 1, 2))):
        assert_same_bits(decompress(*compress(view, kept)), np.where(kept, view, dtype.type(0)))


TIES = np.random.default_rng(2).integers(-3, 4, (8, 8)).astype(np.float32)


@pytest.mark.parametrize("method", sampled({"exact"}, ["exact", "greedy"]))
def test_under_jit_and_vmap(method):
    """Traced; untraced arrays take the same program in `test_tiles_and_libraries`."""
    mask = prune_transposable(TIES, method=method)
    jitted = jax.jit(lambda w: prune_transposable(w, method=method))
    np.testing.assert_array_equal(jitted(jnp.asarray(TIES)), mask)
    np.testing.assert_array_equal(jax.vmap(jitted)(jnp.asarray(TIES)[None])[0], mask)


@pytest.mark.parametrize("method", ["exact", "greedy"])
def test_without_the_bridge(method):
    """torch's own operations, which devices other than CPUs run."""
    plain = prune_transposable.__wrapped__(torch.from_numpy(TIES), method=method)
    np.testing.assert_array_equal(plain.numpy(), prune_transposable(TIES, method=method))


def test_what_the_methods_keep():
    """20,000 normal tiles: rows alone keep most, then the exact mask, then the greedy one, as others measured."""
    w = np.random.default_rng(3).standard_normal((400, 800)).astype(np.float32)
    size = np.abs(w)
    masks = [prune(w), prune_transposable(w), prune_transposable(w, method="greedy")]
    kept = [float(size[mask].sum() / size.sum()) for mask in masks]
    np.testing.assert_allclose(kept, [0.744, 0.702, 0.692], atol=2e-3)
    tiles = masks[2].reshape(100, 4, 200, 4).sum((1, 3))
    assert set(tiles.ravel()) == {7, 8}
    assert abs((tiles == 7).mean() - 0.16) < 0.01
    assert (masks[1].reshape(100, 4, 200, 4).sum(1) == 2).all()


def test_scores_decide():
    scores = np.zeros((4, 4), np.float32)
    scores[:2, 2:] = scores[2:, :2] = 1
    mask = prune_transposable(np.ones((4, 4), np.float32), scores=scores)
    np.testing.assert_array_equal(mask, scores == 1)
    np.testing.assert_array_equal(
        prune_transposable(np.ones((4, 4), np.float32))[0], [True, True, False, False]
    )
    assert prune_transposable(np.zeros((0, 8), np.float32)).shape == (0, 8)


def test_refusals_name_the_way_out():
    w = np.zeros((4, 8), np.float32)
    with pytest.raises(ValueError, match=r"multiples of 4, got shape \(4, 6\); pad them to \(4, 8\)"):
        prune_transposable(w[:, :6])
    refused(ValueError, "needs a matrix", prune_transposable, w[0])
    refused(ValueError, "method is one of exact, greedy", prune_transposable, w, method="best")
    refused(ValueError, "give one per weight", prune_transposable, w, scores=w[:, :4])
    refused(TypeError, "cast it to float32", prune_transposable, w.astype(np.int8))


#: Of both orientations in storage.
SHAPES = st.tuples(st.integers(0, 3), st.integers(1, 3)).map(lambda n: (4 * n[0], 4 * n[1]))
PATTERNS = SHAPES.flatmap(
    lambda shape: hnp.arrays(
        np.uint32, shape, elements=st.one_of(st.integers(0, 2**32 - 1), st.sampled_from([0, 0x80000000, 0x3F800000]))
    )
).map(lambda bits: bits.view(np.float32))  # fmt: skip

#: Ties in nearly every tile: the mask of the transpose by itself would be another one than the transpose of the mask.
TIED_MATRICES = SHAPES.flatmap(lambda shape: hnp.arrays(np.int8, shape, elements=st.integers(-2, 2))).map(
    lambda w: w.astype(np.float32)
)


@settings(max_examples=60, deadline=None)
@given(st.one_of(PATTERNS, TIED_MATRICES))
def test_both_orientations_hold_the_kept_bits(w):
    """NaN payloads and -0 too; the transpose's storage is that of the transposed matrix."""
    mask = prune_transposable(w)
    rows, columns = compress_transposable(w)
    kept = np.where(mask, w.view(np.uint32), 0).view(np.float32)
    assert_same_bits(decompress(*rows), kept)
    assert_same_bits(decompress(*columns), np.ascontiguousarray(kept.T))
    assert (rows.values.shape, columns.values.shape) == (
        (w.shape[0], w.shape[1] // 2),
        (w.shape[1], w.shape[0] // 2),
    )


def test_two_are_kept_even_of_zeros():
    """Unlike `compress(w * mask)`, which would find nothing to store: indices are those of the mask."""
    rows, columns = compress_transposable(np.zeros((4, 8), np.float32))
    assert rows.metadata.tolist() == [[0x44], [0x44], [0xEE], [0xEE]]
    assert columns.metadata.tolist() == 2 * [[0x04], [0x04], [0x0E], [0x0E]]


def test_libraries_and_batches():
    w = np.random.default_rng(0).standard_normal((2, 8, 12)).astype(np.float32)
    wanted = compress_transposable(w)
    for single, made in zip(w, zip(*[iter(_flat(wanted, 2))] * 4, strict=True), strict=True):
        for one, other in zip(
            made, [part for pair in compress_transposable(single) for part in pair], strict=True
        ):
            assert_same_bits(one, other)  # fmt: skip
    on_torch = compress_transposable(torch.from_numpy(w).clone())
    jitted = jax.jit(compress_transposable)(jnp.asarray(w))
    for pair, ours, theirs in zip(wanted, on_torch, jitted, strict=True):
        for one, other, third in zip(pair, ours, theirs, strict=True):
            assert_same_bits(other.numpy(), one)
            assert_same_bits(np.asarray(third), one)


def _flat(pairs, batch):
    return [part[index] for index in range(batch) for pair in pairs for part in pair]


def test_refusals_are_those_of_the_mask():
    with pytest.raises(ValueError, match=r"multiples of 4, got shape \(6, 8\)"):
        compress_transposable(np.zeros((6, 8), np.float32))
    refused(TypeError, "cast it to float32", compress_transposable, np.zeros((8, 8), np.int8))
