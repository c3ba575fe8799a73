"""Scores against scalar programs in NumPy's float32, and the stated answers at their edges."""

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

from ao_lab.testing.strategies import assert_same_bits
from reference.sparsity.prune import prune
from reference.sparsity.scores import magnitude_scores, ria_scores, square_sums, wanda_scores

F = np.float32
SPECIAL = [0.0, -0.0, 1.0, -3.0, 2.0**-149, 2.0**-126, 3e38, -1e-30, 1e25]


def floats(shape):
    usual = st.floats(-1e4, 1e4, width=32)
    return hnp.arrays(F, shape, elements=st.one_of(st.sampled_from([F(v) for v in SPECIAL]), usual))


def pair_sum(terms):
    """Adjacent pairs, recursively, one number at a time; a missing partner is 0."""
    terms = [F(term) for term in terms] or [F(0)]
    while len(terms) & (len(terms) - 1):
        terms.append(F(0))
    while len(terms) > 1:
        terms = [F(a + b) for a, b in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def root(x):
    """NumPy's float64 square root rounded to float32 is the correctly rounded one (53 >= 2 * 24 + 2)."""
    return F(np.sqrt(np.float64(x)))


def slow_ria(w, sums, exponent):
    out = np.zeros(w.shape, F)
    for i, j in np.ndindex(w.shape):
        size = abs(w[i, j])
        column, row = pair_sum(abs(w[:, j])), pair_sum(abs(w[i]))
        score = F((size / column if column else F(0)) + (size / row if row else F(0)))
        norm = {0: F(1), 0.5: root(root(sums[j])), 1: root(sums[j])}[exponent]
        out[i, j] = score * norm if score else F(0)
    return out


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_each_score_is_that_of_a_scalar_program(data):
    rows, k, tokens = (data.draw(st.integers(1, 5)) for _ in range(3))
    w, x = data.draw(floats((rows, k))), data.draw(floats((tokens, k)))
    with np.errstate(all="ignore"):
        sums = square_sums(x)
        assert_same_bits(sums, np.array([pair_sum(x[:, j] * x[:, j]) for j in range(k)]))
        wanted = np.array(
            [[abs(v) * root(s) if v else F(0) for v, s in zip(row, sums, strict=True)] for row in w], F
        )
        assert_same_bits(wanda_scores(w, sums), wanted)
        assert_same_bits(wanda_scores(w.T.copy(), sums, axis=0), wanted.T)
        for exponent in (0, 0.5, 1):
            wanted = slow_ria(w, sums, exponent)
            assert_same_bits(ria_scores(w, sums, exponent=exponent), wanted)
            assert_same_bits(ria_scores(w.T.copy(), sums, axis=0, exponent=exponent), wanted.T)
            # Finite weights and inputs give no NaN, although sums may overflow.
            assert not np.isnan(wanted).any()
    assert_same_bits(ria_scores(w, exponent=0), ria_scores(w, sums, exponent=0))
    assert_same_bits(prune(w, pattern="1:1", scores=magnitude_scores(w)), prune(w, pattern="1:1"))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_libraries_agree_bit_for_bit(name):
    rng = np.random.default_rng(3)
    dtype = np.dtype(name) if name != "bfloat16" else np.dtype(ml_dtypes.bfloat16)
    w = rng.standard_normal((2, 4)).astype(dtype)
    x = rng.standard_normal((2, 2, 4)).astype(dtype)
    earlier = square_sums(x[:1])

    def scores(w, x, earlier):
        sums = square_sums(x, earlier)
        return (
            sums,
            magnitude_scores(w),
            wanda_scores(w, sums),
            ria_scores(w, sums),
            ria_scores(w, exponent=0),
        )

    expected = scores(w, x, earlier)
    assert {str(one.dtype) for one in expected} == {"float32"}

    def on_torch(array):
        return torch.from_numpy(array.astype(F)).to(getattr(torch, name))

    results = [scores(on_torch(w), on_torch(x), torch.from_numpy(earlier))]
    if (
        name == "bfloat16"
    ):  # the other dtypes differ in how they widen, which tests of `arrays` compare; compiling is slow
        results.append(jax.jit(scores)(jnp.asarray(w), jnp.asarray(x), jnp.asarray(earlier)))
    for made in results:
        for one, wanted in zip(made, expected, strict=True):
            assert_same_bits(np.asarray(one), wanted)


def test_sums_are_continued_call_by_call():
    x = np.random.default_rng(0).standard_normal((3, 7, 4)).astype(F)
    first, second = square_sums(x[0]), square_sums(x[1:])
    assert_same_bits(square_sums(x[1:], first), first + second)
    # Blocks of a power of two of the tokens are subtrees: a kernel may add each by itself.
    tokens = np.random.default_rng(1).standard_normal((64, 4)).astype(F)
    blocks = np.stack([square_sums(part) for part in tokens.reshape(8, 8, 4)])
    assert_same_bits(square_sums(tokens), np.array([pair_sum(blocks[:, j]) for j in range(4)]))
    assert_same_bits(square_sums(np.zeros((0, 4), F)), np.zeros(4, F))


def test_wanda_keeps_what_its_inputs_make_large():
    w = np.array([[4.0, 3, 2, 1]], F)
    x = np.array([[0.1, 0.1, 10, 10]], F)
    assert prune(w, scores=wanda_scores(w, square_sums(x))).tolist() == [[False, False, True, True]]


def test_nan_is_kept_and_a_zero_weight_scores_zero():
    w = np.array([[np.nan, 0, 1, -0.0]], F)
    huge = np.array([1, np.inf, np.inf, np.inf], F)
    for scores in (wanda_scores(w, huge), ria_scores(w[:, 1:], huge[1:])):
        tail = scores[0, -3:]
        assert tail.tolist() == [0, np.inf, 0]
    assert np.isnan(wanda_scores(w, huge)[0, 0])
    assert np.isnan(wanda_scores(w, np.array([1, np.nan, -1, 1], F))[0]).tolist() == [True, True, True, False]
    assert np.isnan(ria_scores(w, exponent=0)).all()  # the row's sum is NaN


def test_refusals_name_the_way_out():
    w, sums = np.ones((2, 4), F), np.ones(4, F)
    with pytest.raises(TypeError, match="wanda_scores takes float32, bfloat16, float16, got float64"):
        wanda_scores(w.astype(np.float64), sums)
    with pytest.raises(ValueError, match=r"float32 of shape \(4,\)"):
        wanda_scores(w, np.ones(2, F))
    with pytest.raises(ValueError, match=r"float32 of shape \(2,\)"):
        wanda_scores(w, sums, axis=0)
    with pytest.raises(ValueError, match="axis 2 is outside"):
        wanda_scores(w, sums, axis=2)
    with pytest.raises(ValueError, match=r"see square_sums.*got NoneType"):
        ria_scores(w)
    with pytest.raises(ValueError, match=r"0, 0.5 or 1, got 0.25"):
        ria_scores(w, sums, exponent=0.25)
    with pytest.raises(ValueError, match="takes a matrix"):
        ria_scores(w[None], sums)
    with pytest.raises(ValueError, match="tokens by channels"):
        square_sums(F(1))
    with pytest.raises(ValueError, match="before is float32"):
        square_sums(w, np.ones(3, F))
