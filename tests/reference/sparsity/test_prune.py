"""Scores and masks against scalar programs in NumPy's float32, and the stated answers at their edges; SR-STE; squared ReLU."""

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
from reference import encode
from reference.sparsity.activation import squared_relu_24
from reference.sparsity.compress import compress, decompress
from reference.sparsity.prune import (
    magnitude_scores,
    parse_pattern,
    prune,
    ria_scores,
    square_sums,
    sr_ste_gradient,
    wanda_scores,
)
from tests.support.refusals import refused

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
def test_scores_libraries_agree_bit_for_bit(name):
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


def test_scores_refusals_name_the_way_out():
    w, sums = np.ones((2, 4), F), np.ones(4, F)
    with pytest.raises(TypeError, match="wanda_scores takes float32, bfloat16, float16, got float64"):
        wanda_scores(w.astype(np.float64), sums)
    refused(ValueError, r"float32 of shape \(4,\)", wanda_scores, w, np.ones(2, F))
    refused(ValueError, r"float32 of shape \(2,\)", wanda_scores, w, sums, axis=0)
    refused(ValueError, "axis 2 is outside", wanda_scores, w, sums, axis=2)
    refused(ValueError, r"see square_sums.*got NoneType", ria_scores, w)
    refused(ValueError, r"0, 0.5 or 1, got 0.25", ria_scores, w, sums, exponent=0.25)
    refused(ValueError, "takes a matrix", ria_scores, w[None], sums)
    refused(ValueError, "tokens by channels", square_sums, F(1))
    refused(ValueError, "before is float32", square_sums, w, np.ones(3, F))


# SR-STE's gradient against the formula in NumPy's float32, and against autograd of the penalty that it descends.

NAMES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def formula(g, w, mask, decay):
    """Two operations in float32, one cast."""
    with np.errstate(all="ignore"):
        pull = (w.astype(np.float32) * np.float32(decay)).astype(np.float32)
        return np.where(mask, g, (g.astype(np.float32) + pull).astype(g.dtype))


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(sorted(NAMES)), st.sampled_from([2e-4, 1.0, 1e-45, 1e38, 0.1]), st.data())
def test_equals_the_formula_on_any_bits(name, decay, data):
    dtype = np.dtype(NAMES[name])
    carrier = np.dtype(f"uint{8 * dtype.itemsize}")
    words = hnp.arrays(carrier, (2, 8), elements=st.integers(0, 2 ** (8 * dtype.itemsize) - 1))
    g, w = (data.draw(words).view(dtype) for _ in range(2))
    mask = data.draw(hnp.arrays(np.bool_, (2, 8)))
    made = sr_ste_gradient(g, w, mask, decay=decay)
    assert made.dtype == dtype
    wanted = formula(g, w, mask, decay)
    nan = np.isnan(wanted.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(made.astype(np.float32)), nan)
    np.testing.assert_array_equal(made.view(carrier)[~nan], wanted.view(carrier)[~nan])
    np.testing.assert_array_equal(made.view(carrier)[mask], g.view(carrier)[mask])  # payloads of NaN, too
    finite = np.isfinite(g.astype(np.float32)) & np.isfinite(w.astype(np.float32))
    assert not nan[finite].any()
    plain = sr_ste_gradient(g, w, mask, decay=0)
    np.testing.assert_array_equal(plain.view(carrier), g.view(carrier))
    assert not np.shares_memory(plain, g)


@pytest.mark.parametrize("name", NAMES)
def test_sr_ste_libraries_agree_bit_for_bit(name):
    rng = np.random.default_rng(0)
    g, w = (rng.standard_normal((4, 8)).astype(NAMES[name]) for _ in range(2))
    mask = prune(w)
    expected = sr_ste_gradient(g, w, mask)
    on_torch = [torch.from_numpy(t.astype(np.float32)).to(getattr(torch, name)) for t in (g, w)]
    for function in (sr_ste_gradient, sr_ste_gradient.__wrapped__):
        made = function(*on_torch, torch.from_numpy(mask))
        assert made.dtype == getattr(torch, name)
        assert_same_bits(made.float().numpy(), expected.astype(np.float32))
    made = jax.jit(sr_ste_gradient)(jnp.asarray(g), jnp.asarray(w), jnp.asarray(mask))
    assert_same_bits(np.asarray(made).astype(np.float32), expected.astype(np.float32))


def test_descends_a_penalty_on_what_the_mask_drops():
    """The gradient of <g, w> + decay / 2 * |(1 - mask) w|**2, exact in these small integers."""
    w = torch.tensor([[3.0, -1, 2, 4, 8, -8, 1, 0]], requires_grad=True)
    g = torch.tensor([[1.0, 2, 3, 4, 5, 6, 7, 8]])
    mask = prune(w.detach())
    (torch.sum(g * w) + 0.25 * torch.sum((~mask) * w**2)).backward()
    assert torch.equal(sr_ste_gradient(g, w.detach(), mask, decay=0.5), w.grad)


def test_sr_ste_refusals_name_the_way_out():
    g = np.ones((2, 4), np.float32)
    mask = g > 0
    for decay in (-1e-4, np.nan, np.inf, True, 2.0**127):
        refused(ValueError, "decay is a number from 0", sr_ste_gradient, g, g, mask, decay=decay)
    refused(ValueError, r"w is float32 of shape \(2, 4\)", sr_ste_gradient, g, g[:1], mask)
    refused(ValueError, "w is float32", sr_ste_gradient, g, g.astype(np.float16), mask)
    refused(TypeError, "as prune returns it, got float32", sr_ste_gradient, g, g, g)
    refused(ValueError, "one bool per weight", sr_ste_gradient, g, g, mask[0])
    refused(TypeError, "cast it to float32", sr_ste_gradient, g.astype(np.float64), g, mask)


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
    refused(ValueError, "N:M", prune, np.zeros((1, 4), np.float32), pattern=pattern)


def test_refusals_name_the_way_out():
    with pytest.raises(TypeError, match="string such as"):
        prune(np.zeros(4, np.float32), pattern=24)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"multiple of 4, got shape \(2, 6\).*pad the axis to 8"):
        prune(np.zeros((2, 6), np.float32))
    refused(ValueError, "0-d", prune, np.float32(1))
    with pytest.raises(ValueError, match="one score per weight"):
        prune(np.zeros((2, 4), np.float32), scores=np.zeros(4, np.float32))
    refused(TypeError, "cast to float32", prune, np.zeros((2, 4), np.float64))


# The sparse squared ReLU against a loop in NumPy's float32.

LARGEST = np.finfo(F).max
ACTIVATION_SPECIAL = [
    0,
    0x80000000,
    1,
    0x80000001,
    0x7F800000,
    0xFF800000,
    0x7FC00001,
    0xFF800001,
    0x3F800000,
    0xBF800000,
    0x7F000000,
]
BITS = st.one_of(st.sampled_from(ACTIVATION_SPECIAL), st.integers(0, 2**32 - 1))


def slow(row, scale):
    """(values, mask) of one row, element by element."""
    values, mask = np.zeros(len(row), F), np.zeros(len(row), bool)
    for start in range(0, len(row), 4):

        def order(i):
            return (not np.isnan(row[i]), 0.0 if np.isnan(row[i]) else -float(row[i]), i)

        for i in sorted(range(start, start + 4), key=order)[:2]:
            mask[i] = True
            if np.isnan(row[i]):
                values[i] = np.nan
            elif row[i] > 0:
                square = F(row[i] * row[i])
                values[i] = (min(square, LARGEST) if np.isfinite(row[i]) else square) / F(scale)
    return values, mask


@settings(max_examples=150, deadline=None)
@given(hnp.arrays(np.uint32, (2, 8), elements=BITS), st.sampled_from([1.0, 3.0, 2.0**-149, 1e-30, 3e38]))
def test_equals_the_loop_on_any_bits(bits, scale):
    x = bits.view(F)
    with np.errstate(all="ignore"):
        wanted = [slow(row, s) for row, s in zip(x, (scale, 0.5), strict=True)]
        made = squared_relu_24(x, scale=np.array([[scale], [0.5]], F))
        np.testing.assert_array_equal(made.mask, [mask for _, mask in wanted])
        assert_same_bits(made.values, np.array([values for values, _ in wanted]))
        codes = squared_relu_24(x, scale=np.array([[scale], [0.5]], F), fmt="float8_e4m3fn")
    np.testing.assert_array_equal(codes.values, encode(made.values, "float8_e4m3fn"))
    np.testing.assert_array_equal(codes.mask, made.mask)
    assert not np.isnan(made.values[np.isfinite(x)]).any()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_short_floats_are_rounded_once(dtype):
    x = np.random.default_rng(0).permutation(np.arange(65536, dtype=np.uint16)).view(dtype).reshape(64, 1024)
    made = squared_relu_24(x)
    assert made.values.dtype == x.dtype
    with np.errstate(all="ignore"):
        wide = squared_relu_24(x.astype(F))
        np.testing.assert_array_equal(made.mask, wide.mask)
        assert_same_bits(made.values.astype(F), wide.values.astype(dtype).astype(F))


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        ([-5, 1, -7, 0.5], [1, 3]),
        ([-5, -1, -7, -0.5], [1, 3]),
        ([-0.0, 0, -0.0, 0], [0, 1]),
        ([-0.0, 0, -(2.0**-149), 2.0**-149], [0, 3]),
        ([3, 3, 3, 4], [0, 3]),
        ([np.inf, 9, np.nan, -np.inf], [0, 2]),
        ([-np.inf, -3e38, -np.nan, -np.inf], [1, 2]),
    ],
)
@pytest.mark.parametrize("library", ["numpy", "jax", "torch"])
def test_signed_values_decide(row, kept, library):
    convert = {"numpy": np.asarray, "torch": torch.from_numpy, "jax": jnp.asarray}[library]
    mask = squared_relu_24(convert(np.array([row], F))).mask
    assert np.flatnonzero(np.asarray(mask)[0]).tolist() == kept


def test_libraries_agree_and_the_result_compresses():
    x = np.random.default_rng(1).standard_normal((4, 16)).astype(F)
    scale = np.abs(x).max(-1, keepdims=True)
    expected = squared_relu_24(x, scale=scale, fmt="float8_e4m3fn")
    given_torch = squared_relu_24(torch.from_numpy(x), scale=torch.from_numpy(scale), fmt="float8_e4m3fn")
    assert isinstance(given_torch.mask, torch.Tensor)
    jitted = jax.jit(lambda x, s: squared_relu_24(x, scale=s, fmt="float8_e4m3fn"))
    for made in (given_torch, jitted(jnp.asarray(x), jnp.asarray(scale))):
        np.testing.assert_array_equal(np.asarray(made.values), expected.values)
        np.testing.assert_array_equal(np.asarray(made.mask), expected.mask)
    np.testing.assert_array_equal(decompress(*compress(*expected)), expected.values)
    # What stays of the dense squared ReLU: everything where a group has at most two positive elements.
    dense = np.maximum(x, 0) ** 2
    few = ((x > 0).reshape(4, 4, 4).sum(-1) <= 2).repeat(4, -1)
    assert_same_bits(squared_relu_24(x).values[few], dense[few])
    assert 0 < few.mean() < 1


def test_activation_refusals_name_the_way_out():
    x = np.ones((2, 8), F)
    refused(ValueError, "multiple of 4", squared_relu_24, x[:, :6])
    refused(TypeError, "cast it to float32", squared_relu_24, x.astype(np.float64))
    refused(TypeError, "scale is float32, got float64", squared_relu_24, x, scale=np.ones((2, 1)))
    refused(ValueError, r"\(2,\) does not broadcast", squared_relu_24, x, scale=np.ones(2, F))
    refused(ValueError, "x's library, got float", squared_relu_24, x, scale=2.0)
    for wrong in (0.0, -1.0, np.inf, np.nan):
        refused(ValueError, "positive and finite", squared_relu_24, x, scale=np.full((2, 1), wrong, F))
    refused(ValueError, "float8_e4m3", squared_relu_24, x, fmt="float8_e4m3f")
