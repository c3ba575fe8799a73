"""GPTQ against least squares column by column, Babai's bound, and the product that its loss stands for; in every scheme."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ao_lab.testing.strategies import assert_same_bits
from reference import (
    SCHEMES,
    Scales,
    choose_scales,
    dequantize,
    fake_quantize,
    gptq,
    pack,
    quantize,
    search_scales,
    second_moment,
    triangular_factor,
)
from reference.calibration.gptq import column_order
from reference.quantize.blocks import Blocks
from tests.support.refusals import refused

F = np.float32
#: One scheme of each kind of rule; all of them by night.
BY_DAY = (
    "int4_g32", "int3_g64_asymmetric", "int8_rowwise", "int8_tensorwise", "mxfp4", "mxint8", "nvfp4", "fp8_128x128",
    "nf4", "stretched2_g32", "torchao.int4_g32_tinygemm", "torchao.fp8_rowwise_training", "te.nvfp4",
    "compressed_tensors.nvfp4", "torchao.mxfp4_rceil",
)  # fmt: skip


def inputs(seed, rows, k, tokens=None):
    """Weights, and the Hessian of correlated inputs of unequal size."""
    rng = np.random.default_rng(seed)
    mixed = np.eye(k) + 0.7 * rng.standard_normal((k, k)) / np.sqrt(k)
    x = rng.standard_normal((tokens or 4 * k, k)) @ mixed * np.exp(0.5 * rng.standard_normal(k))
    return rng.standard_normal((rows, k)).astype(F), second_moment(x).value


def damped(h, share=0.01):
    live = np.diag(h) > 0
    return h + share * np.diag(h)[live].mean() * np.eye(len(h))


def loss_of(made, w, h):
    """Of each row, by the product."""
    change = dequantize(made.quantized).astype(np.float64) - w
    return ((change @ h) * change).sum(axis=1)


def slow(w, h, scheme, scales, order):
    """One row after the other, least squares of the columns that are free at every step; values and targets."""
    out, targets = w.astype(np.float64), w.astype(np.float64)
    for row in range(len(w)):
        for place, j in enumerate(order):
            done, free = order[:place], order[place:]
            change = out[row, done] - w[row, done]
            shift = np.linalg.solve(h[np.ix_(free, free)], -h[np.ix_(free, done)] @ change)
            targets[row, j] = w[row, j] + shift[0]
            column = np.tile(targets[row].astype(F), (len(w), 1))
            out[row, j] = fake_quantize(column, scheme, scales=scales)[row, j]
    return out, targets


@settings(max_examples=25)
@given(
    st.integers(0, 10**6),
    st.sampled_from(["int4", "e2m1", "asymmetric"]),
    st.sampled_from(["stored", "activation", "groups"]),
)
def test_equals_least_squares_column_by_column(seed, kind, order):
    base = {"int4": "int4_g32", "e2m1": "mxfp4", "asymmetric": "int3_g32_asymmetric"}[kind]
    scheme = replace(SCHEMES[base], name=kind, scale=replace(SCHEMES[base].scale, block=4))
    w, h = inputs(seed, 3, 12)
    made = gptq(w, h, scheme, scales=choose_scales(w, scheme), order=order)
    columns = column_order(np.diag(h), order, Blocks.of(w.shape, scheme.scale, -1))
    values, _ = slow(w, damped(h), scheme, choose_scales(w, scheme), columns)
    np.testing.assert_array_equal(dequantize(made.quantized), values)


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.sampled_from(["stored", "activation", "groups"]))
def test_the_loss_is_that_of_the_change_and_within_babais_bound(seed, order):
    """Blocks of 128 columns and a rest; nothing saturates, as the steps are larger than absmax needs."""
    w, h = inputs(seed, 4, 160)
    scheme, scales = SCHEMES["int8_g32"], choose_scales(4 * w, "int8_g32")
    made = gptq(w, h, scheme, scales=scales, order=order)
    np.testing.assert_allclose(made.loss, loss_of(made, w, damped(h)), rtol=1e-9)
    columns = column_order(np.diag(h), order, Blocks.of(w.shape, scheme.scale, -1))
    pivots = np.diag(triangular_factor(h, order=columns).factor) ** 2
    steps = np.repeat(scales.scale.astype(np.float64), 32, axis=1)[:, columns]
    assert (made.loss <= (steps**2 @ pivots) / 4 * (1 + 1e-6)).all()
    assert made.quantized.codes.view(np.int8).min() > -128
    assert (made.damping, made.floor, made.dead.any()) == (0.01, 0.0, False)


def all_schemes():
    return [pytest.param(name, marks=() if name in BY_DAY else (pytest.mark.nightly,)) for name in SCHEMES]


@pytest.mark.parametrize("name", all_schemes())
def test_every_scheme(name):
    """Scales are exactly those given, codes those of the quantizer, the loss less than that of rounding."""
    wide = "torchao.nf4" in name
    w, h = inputs(3, 64 if wide else 32, 256)
    w = np.tile(w, (4, 1)) if "128x128" in name else w
    scales = choose_scales(w, name)
    made = gptq(w, h, name, scales=scales, order="activation")
    for part in ("scale", "outer", "zero"):
        if getattr(scales, part) is not None:
            assert_same_bits(getattr(made.quantized, part), getattr(scales, part))
    np.testing.assert_allclose(made.loss, loss_of(made, w, damped(h)), rtol=1e-8)
    again = quantize(dequantize(made.quantized), name, scales=scales)
    if "tinygemm" not in name:  # its values are no multiples of its scales
        np.testing.assert_array_equal(dequantize(again), dequantize(made.quantized))
    rounded = dequantize(quantize(w, name, scales=scales)).astype(np.float64) - w
    assert made.loss.sum() < 0.95 * ((rounded @ damped(h)) * rounded).sum()


def test_with_a_hessian_of_independent_inputs_it_rounds_to_nearest():
    w, _ = inputs(4, 5, 64)
    h = np.diag(np.exp(np.random.default_rng(4).standard_normal(64)))
    for order in ("stored", "activation", "groups"):
        made = gptq(w, h, "mxfp4", scales=choose_scales(w, "mxfp4"), order=order)
        assert_same_bits(made.quantized.codes, quantize(w, "mxfp4").codes)


def test_scales_are_searched_where_none_are_given():
    w, h = inputs(5, 6, 64)
    for name in ("int3_g32_asymmetric", "nvfp4"):
        made = gptq(w, h, name)
        scales = search_scales(w, name, weights=np.diag(h).copy())
        assert_same_bits(made.quantized.scale, scales.scale)
    outer = np.float32(2.0**-9)
    made = gptq(w, h, "nvfp4", scales=Scales(outer=np.asarray(outer)))
    assert made.quantized.outer == outer
    assert_same_bits(
        made.quantized.scale,
        search_scales(w, "nvfp4", weights=np.diag(h).copy(), outer=np.asarray(outer)).scale,
    )
    bare = gptq(w, h, "int4_g32", scales=choose_scales(w, "int4_g32").scale)
    assert_same_bits(
        bare.quantized.codes, gptq(w, h, "int4_g32", scales=choose_scales(w, "int4_g32")).quantized.codes
    )


def test_rows_are_independent():
    """The stacked matrix of two layers that read one tensor gives each its own codes, the outer scale tied."""
    (a, h), (b, _) = inputs(6, 5, 64), inputs(7, 3, 64)
    both = np.concatenate([a, b])
    outer = choose_scales(both, "nvfp4").outer
    made = gptq(both, h, "nvfp4", scales=Scales(outer=outer), order="groups")
    for part, rows in ((a, slice(0, 5)), (b, slice(5, 8))):
        alone = gptq(part, h, "nvfp4", scales=Scales(outer=outer), order="groups")
        assert_same_bits(alone.quantized.codes, made.quantized.codes[rows])
        assert_same_bits(alone.quantized.scale, made.quantized.scale[rows])
        np.testing.assert_allclose(alone.loss, made.loss[rows], rtol=1e-12)


def test_orders():
    diagonal = np.array([1.0, 5, 2, 5, 0, 9, 3, 3, 4])
    blocks = Blocks((1, 9), 3, 1, False)
    assert column_order(diagonal, "stored", blocks).tolist() == list(range(9))
    # Ties keep the lower index.
    assert column_order(diagonal, "activation", blocks).tolist() == [5, 1, 3, 8, 6, 7, 2, 0, 4]
    # Blocks by their largest: the second, then the first (5), then the third (4); falling inside.
    assert column_order(diagonal, "groups", blocks).tolist() == [5, 3, 4, 1, 2, 0, 8, 6, 7]
    for whole in (-1, "tensor"):
        same = column_order(diagonal, "groups", Blocks((1, 9), whole, 1, False))
        assert same.tolist() == [5, 1, 3, 8, 6, 7, 2, 0, 4]
    # A short last block, tiles, and blocks of the flattened matrix that end with rows.
    short = column_order(diagonal, "groups", Blocks((1, 9), 4, 1, True))
    assert short.tolist() == [5, 6, 7, 4, 1, 3, 2, 0, 8]
    for width in ((2, 3), "flat:3"):
        tiles = Blocks((2, 9), width, 1, False)
        assert column_order(diagonal, "groups", tiles).tolist() == [5, 3, 4, 1, 2, 0, 8, 6, 7]


def test_an_order_that_puts_large_channels_first_loses_less():
    w, h = inputs(8, 16, 128)
    scales = choose_scales(w, "int3_g32")
    losses = {
        order: gptq(w, h, "int3_g32", scales=scales, order=order).loss.sum()
        for order in ("stored", "activation", "groups")
    }
    assert losses["activation"] < losses["groups"] < losses["stored"]


def test_dead_channels_keep_their_rounding():
    w, h = inputs(9, 4, 32)
    h[[3, 20]], h[:, [3, 20]] = 0, 0
    w[:, 20] *= 3
    scales = choose_scales(w, "int4_g32")
    for damping in (0.0, 0.1):
        made = gptq(w, h, "int4_g32", scales=scales, damping=damping)
        assert np.flatnonzero(made.dead).tolist() == [3, 20]
        assert made.damping == damping
        assert_same_bits(made.quantized.codes[:, [3, 20]], quantize(w, "int4_g32").codes[:, [3, 20]])
    live = np.setdiff1d(np.arange(32), [3, 20])
    alone = gptq(
        w[:, live],
        h[np.ix_(live, live)],
        "int8_rowwise",
        scales=choose_scales(w, "int8_rowwise"),
        damping=0.1,
    )
    with_dead = gptq(w, h, "int8_rowwise", scales=choose_scales(w, "int8_rowwise"), damping=0.1)
    assert_same_bits(with_dead.quantized.codes[:, live], alone.quantized.codes)


def test_damping_is_what_the_factor_took():
    w, _ = inputs(10, 2, 8)
    bent = np.eye(8)
    bent[1, 2] = bent[2, 1] = 1.035
    made = gptq(w, bent, "int8_rowwise")
    assert (made.damping, made.floor) == (0.04, 0.0)
    strong = gptq(w, inputs(10, 2, 8)[1], "int8_rowwise", damping=1e6)
    assert_same_bits(
        strong.quantized.codes, quantize(w, "int8_rowwise", scales=strong.quantized.scales).codes
    )


@settings(max_examples=20)
@given(st.integers(0, 10**6))
def test_the_cross_term_is_the_least_squares_answer_to_the_float_outputs(seed):
    """V with V x_q nearest to W x, by lstsq on the tokens; rounding V by itself has the same codes."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((200, 16))
    x_q = x + 0.3 * rng.standard_normal((200, 16)) @ rng.standard_normal((16, 16))
    w = rng.standard_normal((3, 16)).astype(F)
    cross = (x - x_q).T @ x_q / 200
    best = np.linalg.lstsq(x_q, x @ w.T, rcond=None)[0].T
    h, scales = second_moment(x_q).value, choose_scales(2 * w, "int8_rowwise")
    for order in ("stored", "activation"):
        made = gptq(w, h, "int8_rowwise", scales=scales, damping=0.0, cross=cross, order=order)
        wanted = gptq(best, h, "int8_rowwise", scales=scales, damping=0.0, order=order)
        assert_same_bits(made.quantized.codes, wanted.quantized.codes)
        np.testing.assert_allclose(made.loss, loss_of(made, best, h), rtol=1e-8)


def test_weights_far_out_saturate_and_stay_finite():
    w = np.array([[3e38, -3e38, 3e38, 1.0]], F)
    h = np.full((4, 4), 0.99) + 0.01 * np.eye(4)
    made = gptq(w, h, "fp8_rowwise", scales=np.array([[1e-3]], F))
    assert np.isfinite(dequantize(made.quantized)).all()
    assert np.isfinite(made.loss).all()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_dtypes(dtype):
    w, h = inputs(11, 3, 32)
    short = w.astype(dtype)
    made = gptq(short, h.astype(F), "int4_g32", scales=choose_scales(w, "int4_g32"))
    wide = gptq(
        short.astype(np.float64),
        h.astype(F).astype(np.float64),
        "int4_g32",
        scales=choose_scales(w, "int4_g32"),
    )
    assert_same_bits(made.quantized.codes, wide.quantized.codes)


def test_packed_codes_and_nothing_given_is_changed():
    w, h = inputs(12, 3, 32)
    h[5], h[:, 5] = 0, 0
    copies = w.copy(), h.copy()
    made = gptq(w, h, "int3_g32", packed=True)
    plain = gptq(w, h, "int3_g32")
    assert made.quantized.packed
    assert_same_bits(made.quantized.codes, pack(plain.quantized.codes, "int3"))
    assert_same_bits(w, copies[0])
    assert_same_bits(h, copies[1])
    assert gptq(w[:0], h, "int4_g32").quantized.codes.shape == (0, 32)


def test_refusals_name_the_way_out():
    w, h = inputs(13, 2, 32)
    stochastic = replace(SCHEMES["int4_g32"], name="drawn", rounding="stochastic")
    cases = [
        ({"w": w.tolist()}, TypeError, "takes NumPy arrays, got list"),
        ({"w": w.astype(np.int32)}, TypeError, "int32"),
        ({"w": w[0]}, ValueError, r"takes a matrix .*got shape \(32,\)"),
        ({"w": np.where(w > 2, np.inf, w)}, ValueError, "finite weights, got"),
        ({"w": w[:, :0]}, ValueError, "takes a matrix"),
        ({"hessian": h[:4, :4]}, ValueError, r"\(32, 32\), inputs by inputs, got shape \(4, 4\)"),
        ({"hessian": 0 * h}, ValueError, "no input was seen"),
        ({"scheme": "int4_g64"}, ValueError, "not divisible by the block size 64"),
        ({"scheme": "int4_g23"}, ValueError, "int4_g32"),
        ({"scheme": stochastic}, ValueError, "rounds stochastically; use"),
        ({"order": "act"}, ValueError, "order"),
        ({"damping": -1}, ValueError, "0 or more, got -1"),
        ({"scales": choose_scales(w[:1], "int4_g32")}, ValueError, r"of shape \(2, 1\), got"),
        ({"cross": h[:4]}, ValueError, r"of shape \(32, 32\).*got shape \(4, 32\)"),
        ({"cross": h * np.nan}, ValueError, "the cross term is finite"),
        ({"cross": h.tolist()}, TypeError, "cross term is a NumPy array"),
        ({"scheme": "nf4", "order": "groups"}, ValueError, "do not end with rows of 32"),
    ]
    for changed, error, said in cases:
        arguments = {"w": w, "hessian": h, "scheme": "int4_g32", **changed}
        refused(
            error,
            said,
            gptq,
            arguments.pop("w"),
            arguments.pop("hessian"),
            arguments.pop("scheme"),
            **arguments,
        )
