"""SparseGPT against a loop with explicit inverses, against the least squares optimum of one step, and its stated failures."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ao_lab.testing.strategies import assert_same_bits
from reference import dequantize, fake_quantize, quantize
from reference.sparsity.compress import compress
from reference.sparsity.prune import parse_pattern, prune
from reference.sparsity.sparsegpt import inverse_factor, sparsegpt
from tests.support.refusals import refused

F = np.float32
#: One place of float32: float64 sums in another order may round a survivor the other way.
ONE_PLACE = 2.0**-23


def inputs(seed, rows, k, tokens=None):
    """Weights, and the Hessian of correlated inputs of unequal size."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens or 4 * k, k)) @ (
        np.eye(k) + 0.5 * rng.standard_normal((k, k)) / np.sqrt(k)
    )
    x *= np.exp(rng.standard_normal(k))
    return rng.standard_normal((rows, k)).astype(F), x.T @ x


def damped(h, damping=0.01):
    h = h.copy()
    dead = np.diag(h) == 0
    h[dead, dead] = 1
    return h + damping * np.diag(h).mean() * np.eye(len(h))


def slow(w, h, pattern, store=F):
    """One row after the other; H of the columns that are left is inverted again at every step."""
    kept, group = parse_pattern(pattern)
    out, mask = np.zeros(w.shape), np.zeros(w.shape, bool)
    k = w.shape[1]
    costs = [np.linalg.inv(h[j:, j:])[0, 0] for j in range(k)]
    for row in range(len(w)):
        left = w[row].astype(np.float64)
        for j in range(k):
            if j % group == 0:
                ranked = sorted(range(j, j + group), key=lambda i: (-(left[i] ** 2) / costs[i], i))
                mask[row, ranked[:kept]] = True
            out[row, j] = store(left[j]) if mask[row, j] else 0
            inverse = np.linalg.inv(h[j:, j:])
            left[j:] -= (left[j] - out[row, j]) / inverse[0, 0] * inverse[0]
    return out, mask


@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(["2:4", "1:4", "3:4", "1:2", "4:8", "4:4"]),
    st.sampled_from([8, 16, 128]),
)
def test_equals_the_loop_in_any_block(seed, pattern, block):
    w, h = inputs(seed, 3, 24)
    made = sparsegpt(w, h, pattern=pattern, block=block)
    weights, mask = slow(w, damped(h), pattern)
    np.testing.assert_array_equal(made.mask, mask)
    np.testing.assert_allclose(made.weights, weights, rtol=ONE_PLACE, atol=0)
    np.testing.assert_array_equal(made.weights[~made.mask].view(np.uint32), 0)
    kept, group = parse_pattern(pattern)
    assert (made.mask.reshape(-1, group).sum(-1) == kept).all()
    assert (made.damping, made.floor, made.scales) == (0.01, 0.0, None)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6))
def test_the_loss_is_that_of_the_change(seed):
    """The sum of e**2 is tr(D H D^T): the product of this change with the damped H."""
    w, h = inputs(seed, 5, 32)
    made = sparsegpt(w, h, block=8)
    change = made.weights.astype(np.float64) - w
    np.testing.assert_allclose(made.loss, np.trace(change @ damped(h) @ change.T), rtol=1e-9)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6))
def test_one_step_is_the_optimal_brain_surgeon(seed):
    """3:4 of one group drops one weight: the cheapest, and no other change of the columns behind it costs less."""
    w, h = inputs(seed, 1, 4)
    made, h = sparsegpt(w, h, pattern="3:4"), damped(h)
    costs, answers = [], []
    for dropped in range(4):
        behind = np.arange(dropped + 1, 4)
        change = np.zeros(4)
        change[dropped] = -w[0, dropped]
        if len(behind):
            change[behind] = np.linalg.solve(h[np.ix_(behind, behind)], -h[behind, dropped] * change[dropped])
        costs.append(change @ h @ change)
        answers.append(w[0] + change)
    best = int(np.argmin(costs))
    assert made.mask.tolist() == [[place != best for place in range(4)]]
    # A survivor is off by half a place of float32 at most, which moves those behind it by as much times U_ij / U_ii.
    upper = inverse_factor(h, damping=0.0).upper
    half = 2.0**-24 * np.abs(made.weights[0])
    bound = half @ (np.abs(upper) / np.diag(upper)[:, None])
    assert (np.abs(made.weights[0] - answers[best]) <= bound + 1e-12).all()
    np.testing.assert_allclose(made.loss, min(costs), rtol=1e-6, atol=1e-9)


def test_it_keeps_more_of_the_output_than_magnitudes_do():
    w, h = inputs(0, 32, 64)
    made = sparsegpt(w, h, block=32)

    def loss(weights):
        change = weights.astype(np.float64) - w
        return np.trace(change @ h @ change.T)

    assert loss(made.weights) < 0.5 * loss(np.where(prune(w), w, 0))
    # With a diagonal H nothing is made up for, and scores are those of the diagonal.
    scale = np.exp(np.random.default_rng(1).standard_normal(64))
    plain = sparsegpt(w, np.diag(scale**2), damping=0.0)
    np.testing.assert_array_equal(plain.mask, prune(w, scores=(np.abs(w) * scale).astype(F)))
    assert_same_bits(plain.weights, np.where(plain.mask, w, F(0)))


def test_ties_keep_the_lower_index_and_groups_see_updated_weights():
    w = np.ones((1, 8), F)
    assert sparsegpt(w, np.eye(8), damping=0.0).mask.tolist() == [[True, True, False, False] * 2]
    # Inputs 1 and 4 are nearly one: dropping 1 moves its weight to 4, which is then the largest of its group.
    h = np.eye(8)
    h[1, 4] = h[4, 1] = 0.99
    w = np.array([[3, 1, 3, 2, 1, 1.5, 1.5, 1.5]], F)
    made = sparsegpt(w, h, damping=0.0)
    assert made.mask.tolist() == [[True, False, True, False, True, True, False, False]]
    np.testing.assert_allclose(made.weights[0, 4], 1.99, rtol=1e-6)


@pytest.mark.parametrize(
    "scheme", ["int4_g32", "fp8_rowwise", "mxfp4", "nvfp4", "fp8_tensorwise", "torchao.fp8_128x128_inference"]
)
def test_survivors_are_quantized_and_their_errors_made_up_for(scheme):
    k = 128
    w, h = inputs(2, 128 if "128x128" in scheme else 4, k)
    made = sparsegpt(w, h, scheme=scheme)
    # Scales are those of the dense weights, and the values are the scheme's own.
    assert_same_bits(made.scales.scale, quantize(w, scheme).scales.scale)
    assert_same_bits(fake_quantize(made.weights, scheme, scales=made.scales), made.weights)
    q = quantize(made.weights, scheme, scales=made.scales)
    assert_same_bits(dequantize(q), made.weights)
    compress(made.weights)
    change = made.weights.astype(np.float64) - w
    np.testing.assert_allclose(made.loss, np.trace(change @ damped(h) @ change.T), rtol=1e-9)
    # Nothing pruned, it is GPTQ: better than rounding each by itself.
    gptq = sparsegpt(w, h, pattern="4:4", scheme=scheme)
    rounded = fake_quantize(w, scheme).astype(np.float64) - w
    assert gptq.loss < 0.9 * np.trace(rounded @ damped(h) @ rounded.T)


def test_the_order_is_mask_then_quantize():
    """A tie that quantization would make is none: scores are of weights before it."""
    w = np.array([[7.0, 0.6, 0.55, 0.7]], F)
    made = sparsegpt(w, np.eye(4), scheme="int8_rowwise", damping=0.0)
    assert made.mask.tolist() == [[True, False, False, True]]


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_weights_are_rounded_to_their_dtype_in_turn(dtype):
    w, h = inputs(3, 3, 16)
    short = w.astype(dtype)
    made = sparsegpt(short, h)
    assert made.weights.dtype == short.dtype
    weights, mask = slow(short.astype(F), damped(h), "2:4", lambda v: float(F(v).astype(dtype)))
    np.testing.assert_array_equal(made.mask, mask)
    assert_same_bits(made.weights.astype(F), weights.astype(F))


def test_weights_that_leave_the_range_saturate():
    h = np.array([[1, 0.999], [0.999, 1]])
    w = np.array([[60000.0, 60000]], np.float16)
    made = sparsegpt(w, h, pattern="1:2", damping=0.0)
    assert made.weights.tolist() == [[0, 65504]] or made.weights.tolist() == [[60000, 0]]
    made = sparsegpt(
        np.array([[60000.0, 0, 60000, 0]], np.float16), np.kron(h, np.eye(2)), pattern="1:4", damping=0.0
    )
    assert made.mask.tolist() == [[False, False, True, False]]
    assert made.weights.tolist() == [[0, 0, 65504, 0]]


def test_dead_channels_become_zero():
    w, h = inputs(4, 3, 16)
    h[5], h[:, 5] = 0, 0
    w[:, 5] = 100
    made = sparsegpt(w, h)
    assert np.flatnonzero(made.dead).tolist() == [5]
    assert (made.weights[:, 5] == 0).all()
    zeroed = w.copy()
    zeroed[:, 5] = 0
    weights, mask = slow(zeroed, damped(h), "2:4")
    np.testing.assert_array_equal(made.mask, mask)
    np.testing.assert_allclose(made.weights, weights, rtol=ONE_PLACE, atol=0)


def test_damping_rises_then_the_floor_and_both_are_reported():
    w, _ = inputs(5, 2, 8)
    # The least eigenvalue is -0.035, the mean of the diagonal 1: 0.01 + 3 * 0.01 is the first damping that lifts it above 0.
    bent = np.eye(8)
    bent[1, 2] = bent[2, 1] = 1.035
    made = sparsegpt(w, bent)
    assert (made.damping, made.floor) == (0.04, 0.0)
    weights, mask = slow(w, damped(bent, 0.04), "2:4")
    np.testing.assert_array_equal(made.mask, mask)
    np.testing.assert_allclose(made.weights, weights, rtol=ONE_PLACE, atol=0)
    # One large channel beside a block with a negative eigenvalue below minus the mean: damping 1 is not enough.
    h = np.eye(8)
    h[0, 0] = 100
    mean = 107 / 8
    h[1, 2] = h[2, 1] = 1 + mean + 0.05
    made = sparsegpt(w, h)
    assert (made.damping, made.floor) == (1.0, 1e-3)
    h[1, 2] = h[2, 1] = 1 + mean + 20
    refused(ValueError, r"not positive definite with damping 1 and 0\.1", sparsegpt, w, h)


def test_the_factor():
    _, h = inputs(6, 1, 12)
    factor = inverse_factor(h)
    np.testing.assert_array_equal(np.tril(factor.upper, -1), 0)
    assert (np.diag(factor.upper) > 0).all()
    np.testing.assert_allclose(factor.upper @ damped(h) @ factor.upper.T, np.eye(12), atol=1e-10)
    # Only the lower triangle is read, float32 is widened, and the scale changes no mask.
    assert_same_bits(inverse_factor(np.tril(h)).upper, factor.upper)
    w, _ = inputs(7, 3, 12)
    np.testing.assert_array_equal(sparsegpt(w, h.astype(F)).mask, sparsegpt(w, 1024 * h.astype(F)).mask)
    assert sparsegpt(w[:0], h).weights.shape == (0, 12)


def test_nothing_given_is_changed():
    w, h = inputs(8, 3, 16)
    h[3], h[:, 3] = 0, 0
    copies = w.copy(), h.copy()
    sparsegpt(w, h)
    assert_same_bits(w, copies[0])
    assert_same_bits(h, copies[1])


def test_refusals_name_the_way_out():
    w, h = inputs(9, 2, 8)
    cases = [
        ({"w": w.tolist()}, TypeError, "takes NumPy arrays, got list"),
        ({"w": w.astype(np.float64)}, TypeError, "cast it to float32"),
        ({"w": w[0]}, ValueError, "takes a matrix"),
        ({"w": np.where(w > 0, np.inf, w)}, ValueError, "finite weights"),
        ({"pattern": "2:3"}, ValueError, r"multiple of 3, got shape \(2, 8\)"),
        ({"block": 6}, ValueError, "positive multiple of the 4 of '2:4', got 6; 128"),
        ({"block": 0}, ValueError, "positive multiple"),
        ({"damping": 2.0}, ValueError, "0 to 1, got 2.0"),
        ({"hessian": h[:4, :4]}, ValueError, r"\(8, 8\), inputs by inputs, got shape \(4, 4\)"),
        ({"hessian": h.astype(np.float16)}, TypeError, "float32 or float64, got float16"),
        ({"hessian": h * np.nan}, ValueError, "finite and within float32"),
        ({"hessian": h * 1e300}, ValueError, "finite and within float32"),
        ({"hessian": -h}, ValueError, "sum of squares, got negative"),
        ({"hessian": 0 * h}, ValueError, "no input was seen; .*prune by magnitude"),
        ({"scheme": "nf4"}, ValueError, "blocks lie along K"),
        ({"scheme": "int4_g32"}, ValueError, "not divisible by the block size 32"),
    ]
    for changed, error, said in cases:
        arguments = {"w": w, "hessian": h, **changed}
        refused(error, said, sparsegpt, arguments.pop("w"), arguments.pop("hessian"), **arguments)
    refused(ValueError, "no inputs", sparsegpt, w[:, :0], h[:0, :0])
