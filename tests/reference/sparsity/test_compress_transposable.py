"""A matrix and its transpose in storage, against masked copies of both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ao_lab.testing.strategies import assert_same_bits
from reference.sparsity.compress import decompress
from reference.sparsity.compress_transposable import compress_transposable
from reference.sparsity.transposable import prune_transposable

SHAPES = st.tuples(st.integers(0, 3), st.integers(1, 3)).map(lambda n: (4 * n[0], 4 * n[1]))
PATTERNS = SHAPES.flatmap(
    lambda shape: hnp.arrays(
        np.uint32, shape, elements=st.one_of(st.integers(0, 2**32 - 1), st.sampled_from([0, 0x80000000, 0x3F800000]))
    )
).map(lambda bits: bits.view(np.float32))  # fmt: skip

#: Ties in nearly every tile: the mask of the transpose by itself would be another one than the transpose of the mask.
TIED = SHAPES.flatmap(lambda shape: hnp.arrays(np.int8, shape, elements=st.integers(-2, 2))).map(
    lambda w: w.astype(np.float32)
)


@settings(max_examples=60, deadline=None)
@given(st.one_of(PATTERNS, TIED))
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
    with pytest.raises(TypeError, match="cast it to float32"):
        compress_transposable(np.zeros((8, 8), np.int8))
