from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from reference.sparsity.prune import parse_pattern, prune

PATTERNS = ["1:1", "1:2", "2:4", "1:4", "3:4", "4:4", "4:8", "2:3", "7:16"]


def slow_mask(scores, kept, group):
    """Python sorting of (magnitude, index): an independent statement of the rule."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        rows = np.asarray(scores).astype(np.float64).reshape(-1, group)
    mask = np.zeros(rows.shape, bool)
    for row, out in zip(rows, mask, strict=True):
        finite_or_infinite = [i for i in range(group) if not np.isnan(row[i])]
        nans = [i for i in range(group) if np.isnan(row[i])]
        ranked = nans + sorted(finite_or_infinite, key=lambda i: (-abs(row[i]), i))
        out[ranked[:kept]] = True
    return mask.reshape(np.shape(scores))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(PATTERNS), st.data())
def test_equals_sorting_on_any_bit_pattern(pattern, data):
    kept, group = parse_pattern(pattern)
    shape = (data.draw(st.integers(0, 3)), group * data.draw(st.integers(0, 3)))
    special = st.sampled_from(
        [0, 0x80000000, 1, 0x80000001, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 0x3F800000]
    )
    bits = data.draw(hnp.arrays(np.uint32, shape, elements=st.one_of(special, st.integers(0, 2**32 - 1))))
    w = bits.view(np.float32)
    mask = prune(w, pattern=pattern)
    assert mask.dtype == bool
    assert mask.shape == shape
    np.testing.assert_array_equal(mask, slow_mask(w, kept, group))
    np.testing.assert_array_equal(mask.reshape(-1, group).sum(-1), kept)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_all_16_bit_patterns(dtype):
    rng = np.random.default_rng(1)
    w = rng.permutation(np.arange(65536, dtype=np.uint16)).view(dtype).reshape(256, 256)
    np.testing.assert_array_equal(prune(w), slow_mask(w, 2, 4))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32])
def test_integers_with_the_lowest_value(dtype):
    info = np.iinfo(dtype)
    w = np.array([[info.min, info.max, 0, 1], [1, 0, info.min, info.min], [0, 0, 0, 0]], dtype)
    np.testing.assert_array_equal(prune(w), slow_mask(w, 2, 4))


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        ([1, 1, 1, 1], [0, 1]),
        ([0, -0.0, 0, -0.0], [0, 1]),
        ([-0.0, 0, 1, 0], [0, 2]),
        ([1, -2, 3, -4], [2, 3]),
        ([np.inf, 1, np.nan, -np.inf], [0, 2]),
        ([np.inf, -np.inf, 3, -np.nan], [0, 3]),
        ([np.nan, np.nan, np.nan, np.inf], [0, 1]),
        ([2**-149, 0, -(2**-148), 0], [0, 2]),
    ],
)
@pytest.mark.parametrize("library", ["numpy", "jax", "jit", "torch"])
def test_edges_in_every_library(row, kept, library):
    w = np.array([row], np.float32)
    if library == "torch":
        mask = prune(torch.from_numpy(w))
        assert isinstance(mask, torch.Tensor)
        assert mask.dtype == torch.bool
    elif library == "numpy":
        mask = prune(w)
    else:
        mask = (jax.jit(prune) if library == "jit" else prune)(jnp.asarray(w))
        assert isinstance(mask, jax.Array)
    assert np.flatnonzero(np.asarray(mask)[0]).tolist() == kept


@pytest.mark.parametrize("pattern", PATTERNS)
def test_libraries_agree_bit_for_bit(pattern):
    _, group = parse_pattern(pattern)
    rng = np.random.default_rng(2)
    w = rng.integers(0, 2**32, (3, 5, 4 * group), dtype=np.uint32).view(np.float32)
    expected = prune(w, pattern=pattern)
    np.testing.assert_array_equal(prune(torch.from_numpy(w.copy()), pattern=pattern).numpy(), expected)
    jitted = jax.jit(lambda x: prune(x, pattern=pattern))
    np.testing.assert_array_equal(jitted(jnp.asarray(w)), expected)
    np.testing.assert_array_equal(jax.vmap(jitted)(jnp.asarray(w)), expected)
    half = torch.from_numpy(w.copy()).bfloat16()
    np.testing.assert_array_equal(
        prune(half, pattern=pattern).numpy(),
        prune(half.view(torch.int16).numpy().view(ml_dtypes.bfloat16), pattern=pattern),
    )


def test_scores_decide_and_may_be_of_another_type():
    w = np.array([[9.0, 8, 7, 6]], np.float32)
    scores = np.array([[0, 1, 2, 3]], np.int8)
    np.testing.assert_array_equal(prune(w, scores=scores), [[False, False, True, True]])
    codes = np.array([[1, 2, 3, 4]], np.uint8)
    np.testing.assert_array_equal(prune(codes, scores=w), [[True, True, False, False]])


def test_not_contiguous_and_one_dimensional():
    rng = np.random.default_rng(3)
    wide = rng.standard_normal((16, 6)).astype(np.float32)
    np.testing.assert_array_equal(prune(wide.T), prune(np.ascontiguousarray(wide.T)))
    np.testing.assert_array_equal(prune(torch.from_numpy(wide).T).numpy(), prune(wide.T.copy()))
    np.testing.assert_array_equal(prune(wide[::2, 0]), prune(wide[::2, 0].copy()))
    assert prune(np.zeros((0, 8), np.float32)).shape == (0, 8)
    assert prune(np.zeros((3, 0), np.float32)).shape == (3, 0)


@pytest.mark.parametrize(
    "pattern", ["", "2", "2:", "0:4", "5:4", "-1:4", "2/4", "2:4:8", " 2:4", "2:4\n", "a:b"]
)
def test_malformed_patterns(pattern):
    with pytest.raises(ValueError, match="N:M"):
        prune(np.zeros((1, 4), np.float32), pattern=pattern)


def test_refusals_name_the_way_out():
    with pytest.raises(TypeError, match="string such as"):
        prune(np.zeros(4, np.float32), pattern=24)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"multiple of 4, got shape \(2, 6\).*pad the axis to 8"):
        prune(np.zeros((2, 6), np.float32))
    with pytest.raises(ValueError, match="0-d"):
        prune(np.float32(1))
    with pytest.raises(ValueError, match="one score per weight"):
        prune(np.zeros((2, 4), np.float32), scores=np.zeros(4, np.float32))
    with pytest.raises(TypeError, match="cast to float32"):
        prune(np.zeros((2, 4), np.float64))
