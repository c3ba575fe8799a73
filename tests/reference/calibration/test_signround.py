"""SignRound against its formula in float64 with gradients by autograd, and against auto_round where that is installed."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from ao_lab.testing.bits import assert_same_quantized
from reference import SCHEMES, choose_scales, dequantize, quantize
from reference.calibration.signround import (
    SignRoundState,
    signround_codes,
    signround_quantize,
    signround_start,
    signround_step,
)
from reference.quantize.blocks import Blocks
from tests.support.refusals import refused

F = np.float32


def case(seed, scheme, shape=(8, 128), dtype=F, least=0.6):
    """(w, v, low, high, g) with ranges from `least` to 1."""
    rng = np.random.default_rng(seed)
    w = (rng.standard_normal(shape) * 0.05).astype(F).astype(dtype)
    scale = Blocks.of(shape, SCHEMES[scheme].scale, -1).scale_shape
    low, high = (rng.uniform(least, 1, scale).astype(F) for _ in range(2))
    return w, rng.uniform(-0.5, 0.5, shape).astype(F), low, high, rng.standard_normal(shape).astype(F)


def straight(x, rounded):
    """rounded, with the gradient of x."""
    return x + (rounded - x).detach()


def formula(w, v, low, high, scheme):
    """Values in float64 by the paper's formula, differentiable, for blocks along K; the scale as it is stored."""
    record, block = SCHEMES[scheme], SCHEMES[scheme].scale.block
    block = w.shape[1] if block == -1 else block
    rows, v, low, high = w.reshape(-1, block), v.reshape(-1, block), low.reshape(-1, 1), high.reshape(-1, 1)
    least, most = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    fmt, target, zero = record.format, record.scale.target, None
    if record.scale.statistic == "minmax":
        middle, half = (least + most) / 2, (most - least) / 2
        least, most = middle - half * low, middle + half * high
        s = (most - least) / target
        zero = least
    else:
        least, most = least.clamp(max=0) * low, most.clamp(min=0) * high
        if record.scale.statistic == "minmax_with_zero":
            s = (most - least) / target
            zero = -straight(-least / s, torch.round(-least / s)) * s
        elif record.scale.statistic == "minmax_split":
            s = torch.maximum(-least / -fmt.min, most / target)
        else:
            s = torch.maximum(-least, most) / target
    if zero is not None:
        offset = zero / s if record.zero.rule == "code" else 0 * s
        shifted = rows if record.zero.rule == "code" else rows - zero
        codes = straight(x := shifted / s + v, torch.round(x)) - straight(offset, torch.round(offset))
        return (codes.clamp(0, 2**fmt.bits - 1) * s + zero).reshape(w.shape)
    return (elements(rows / s, v, fmt) * s).reshape(w.shape)


def bound_of_sum(g, values, w):
    """By how much a sum of g * (value - w) over each row may be off in float32: four roundings of a term, of value and w apart,
    and one of the partial sum for each term.
    """
    terms = np.abs(g.astype(np.float64)) * (np.abs(values.astype(np.float64)) + np.abs(w.astype(np.float64)))
    return (g.shape[1] + 4) * 2.0**-24 * terms.sum(axis=1)


def elements(ratio, v, fmt):
    """The nearest values of a format to ratio + v steps, straight through within its range."""
    table = torch.from_numpy(np.unique(fmt.values[np.isfinite(fmt.values)]).astype(np.float64))
    step = table.diff()[torch.searchsorted(table[1:-1].contiguous(), ratio.detach(), side="right")]
    moved = ratio + v * step
    nearest = table[(moved.detach()[..., None] - table).abs().argmin(-1)]
    edges = table[0] - (table[1] - table[0]) / 2, table[-1] + (table[-1] - table[-2]) / 2
    return straight(moved.clamp(*edges), nearest)


@pytest.mark.parametrize("scheme", [
    "int2_g32_asymmetric", "int4_g32_asymmetric", "int8_g64_asymmetric", "int3_g64", "hqq.int4_g64", "int8_rowwise",
    "torchao.int4_g32_no_clipping", "fp8_1x128",
])  # fmt: skip
def test_values_and_gradients_are_those_of_the_formula(scheme):
    w, v, low, high, g = case(1, scheme)
    parts = [torch.from_numpy(part).double().requires_grad_() for part in (v, low, high)]
    expected = formula(torch.from_numpy(w).double(), *parts, scheme)
    (expected * torch.from_numpy(g)).sum().backward()
    values, vjp = signround_quantize(w, v, low, high, scheme)
    # A code moves where the middle of two lies between w / s + v and what rounding makes of it: four roundings by 2^-24 of
    # a ratio, or those of scale and zero point in bfloat16 by 2^-9, which is half of 2^bits codes in the mean.
    bits, short = SCHEMES[scheme].format.bits, SCHEMES[scheme].scale.storage == "bfloat16"
    moving = 2.0**bits * (2.0**-9 if short else 2.0**-23) + 4 / w.size
    # Elsewhere scale and zero point move a value by their error, of the largest at most.
    still = (2 * 2.0**-9 if short else 8 * 2.0**-24) * np.abs(w).max()
    different = np.abs(values - expected.detach().numpy()) > 2 * still
    assert different.mean() < moving
    for found, part in zip(vjp(g), parts, strict=True):
        truth = part.grad.numpy()
        assert found.dtype == F
        # A sum of a block is off by its length in float32, and by a step where one of its codes moves: with scales in bfloat16
        # one of 32 does, a tenth of the largest sum.
        length = w.size // truth.size
        share = 0.1 if short else (length + 4) * 2.0**-22
        off = np.abs(found - truth) > share * np.abs(truth).max()
        assert off.mean() < (0.02 if short else length * moving), (
            np.abs(found - truth).max() / np.abs(truth).max()
        )


@pytest.mark.parametrize("scheme", ["int4_g32_asymmetric", "int4_g32", "torchao.int4_g32_no_clipping"])
def test_blocks_of_one_sign_have_one_end(scheme):
    """The other one is 0, and its factor moves nothing."""
    w, v, low, high, g = case(10, scheme)
    w = np.abs(w)
    _, vjp = signround_quantize(w, v, low, high, scheme)
    assert (vjp(g).low == 0).all()
    assert (vjp(g).high != 0).all()
    assert (
        signround_codes(w, v, 0 * low, high, scheme).scale == signround_codes(w, v, low, high, scheme).scale
    ).all()


def test_second_levels_stay():
    w, v, low, high, _ = case(11, "nvfp4")
    assert signround_codes(w, v, 0.5 * low, 0.5 * high, "nvfp4").outer == quantize(w, "nvfp4").outer


def test_a_step_is_the_distance_of_the_neighbours():
    """Of e2m1 0.5 below 2, 1 from there and 2 from 4; of mxint8 1 / 64."""
    w = np.zeros((1, 32), F)
    w[0, :6] = [6, 1.9, 2, 3.9, 4, -1]
    state, ones = signround_start(w, "mxfp4"), np.ones_like(w)
    assert signround_quantize(w, *state, "mxfp4").vjp(ones).v[0, :6].tolist() == [2, 0.5, 1, 1, 2, 0.5]
    w[0, 0] = 1
    state = signround_start(w / 4, "mxint8")
    assert (signround_quantize(w / 4, *state, "mxint8").vjp(ones).v == 2.0**-6).all()


@pytest.mark.parametrize("scheme", ["mxfp4", "nvfp4", "mxint8", "torchao.fp8_rowwise_training", "nf4"])
def test_scales_pass_gradients_straight_through(scheme):
    """The derivative of a stored scale by a factor is the scale over the factor."""
    w, v, low, high, g = case(2, scheme, (16, 256))
    values, vjp = signround_quantize(w, v, low, high, scheme)
    q = signround_codes(w, v, low, high, scheme)
    assert (values == dequantize(q)).all()
    found = vjp(g)
    split = Blocks.of(w.shape, SCHEMES[scheme].scale, -1)
    size = w.size // found.low.size
    rows, grads = w.reshape(-1, size), g.reshape(-1, size).astype(np.float64)
    upper = (rows.max(axis=1).clip(0) * high.reshape(-1)) >= (
        -rows.min(axis=1).clip(None, 0) * low.reshape(-1)
    )
    # d values / d s = (values - w) / s where no code saturates, else values / s.
    dv = found.v.reshape(-1, size)
    inside = dv != 0
    slope = values.reshape(-1, size).astype(np.float64) - np.where(inside, rows, 0)
    for factor, gradient, active in ((low, found.low, ~upper), (high, found.high, upper)):
        truth = np.where(active, (grads * slope).sum(axis=1) / factor.reshape(-1), 0)
        most = bound_of_sum(grads, values.reshape(-1, size), rows) / factor.reshape(-1)
        assert (np.abs(gradient.reshape(-1) - truth) <= most).all()
    assert split.scale_shape == found.low.shape


@pytest.mark.parametrize(
    "scheme", ["int4_g32_asymmetric", "mxfp4", "fp8_rowwise", "nf4", "ternary_g32", "mxint8"]
)
def test_half_a_step_reaches_the_next_value(scheme):
    """Of two neighbours of a weight within its range both are reached."""
    w, _, low, _, _ = case(3, scheme, (8, 256))
    ones = np.ones_like(low)
    half = np.full(w.shape, 0.5, F)
    down, up = (signround_quantize(w, sign * half, ones, ones, scheme).values for sign in (-1, 1))
    reached = (down < up).mean()
    assert reached > 0.8
    near = dequantize(signround_codes(w, 0 * half, ones, ones, scheme))
    assert ((down <= near) & (near <= up)).all()
    ends = (fold(near.reshape(-1, 32), axis=1).repeat(32).reshape(w.shape) for fold in (np.min, np.max))
    within = np.logical_and(*(sign * w <= sign * end for sign, end in zip((-1, 1), ends, strict=True)))
    slack = 1e-6 * np.abs(w)
    assert ((down <= w + slack) & (w - slack <= up))[within].all()


def test_zero_is_rounding():
    for name in (
        "int4_g32_asymmetric",
        "mxfp6_e2m3",
        "nvfp4",
        "torchao.int4_g32_tinygemm",
        "torchao.nf4",
        "te.nvfp4_16x16",
    ):
        check_scheme(name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme(name):
    check_scheme(name)


def check_scheme(name):
    """With V = 0 and factors of 1 rounding itself; otherwise values and gradients are finite where the scheme's values are."""
    w, v, low, high, g = case(4, name, (128, 256))
    start = signround_start(w, name)
    assert_same_quantized(signround_codes(w, *start, name), quantize(w, name, scales=choose_scales(w, name)))
    values, vjp = signround_quantize(w, v, low, high, name)
    assert np.isfinite(values).all()
    found = vjp(g)
    assert all(np.isfinite(part).all() for part in found)
    assert np.abs(found.v).max() > 0
    # Of one block with a largest magnitude one factor alone decides.
    assert (np.abs(found.low).max() + np.abs(found.high).max()) > 0


def test_dtypes():
    w, v, low, high, g = case(5, "int4_g32", dtype=ml_dtypes.bfloat16)
    values, vjp = signround_quantize(w, v, low, high, "int4_g32")
    assert values.dtype == ml_dtypes.bfloat16
    assert_same_quantized(
        signround_codes(w, v, low, high, "int4_g32"), signround_codes(w.astype(F), v, low, high, "int4_g32")
    )
    found = vjp(g.astype(ml_dtypes.bfloat16))
    expected = vjp(g.astype(ml_dtypes.bfloat16).astype(F))
    assert (found.v == expected.v).all()


@pytest.mark.parametrize("scheme", ["int3_g32", "nvfp4", "int4_g32_asymmetric", "nf4", "hqq.int4_g64"])
def test_learning_starts_at_codes_that_are_given(scheme):
    """Under their scales, which stay; where a code lies within half a step of its weight, values are the same."""
    w, v, low, high, g = case(6, scheme, (16, 256), least=0.9)
    q = signround_codes(w, v, low, high, scheme)
    state = signround_start(w, scheme, q)
    assert state.low is state.high is None
    again = signround_codes(w, *state, scheme, scales=q.scales)
    assert (again.codes == q.codes).mean() > 0.97
    assert (np.abs(state.v) <= 0.5).all()
    found = signround_quantize(w, *state, scheme, scales=q.scales).vjp(g)
    assert found.low is found.high is None
    assert np.abs(found.v).max() > 0


def test_steps_follow_signs_within_bounds():
    state = SignRoundState(*(np.asarray(x, F) for x in ([[0.0, 0.49, -0.49, 0.1]], [[0.99]], [[0.01]])))
    grads = SignRoundState(*(np.asarray(x, F) for x in ([[3.0, -1e-9, 2.0, 0.0]], [[-1.0]], [[5.0]])))
    moved = signround_step(state, grads, 0.25, range_rate=0.125)
    assert moved.v.tolist() == [[-0.25, 0.5, -0.5, float(F(0.1))]]
    assert (moved.low.tolist(), moved.high.tolist()) == ([[1.0]], [[0.0]])
    assert signround_step(state, grads, 0.5).v.dtype == F
    alone = signround_step(state._replace(low=None, high=None), grads, 0.25)
    assert alone.low is alone.high is None
    refused(ValueError, "rate", signround_step, state, grads, -1.0)
    refused(ValueError, "rate", signround_step, state, grads, 1.0, range_rate=float("nan"))


def test_it_lowers_an_output_error():
    """By more than a third in 100 steps, the best one kept, on correlated inputs."""
    rng = np.random.default_rng(7)
    w = rng.standard_normal((16, 64)).astype(F)
    x = rng.standard_normal((200, 64)) @ (np.eye(64) + 0.5 * rng.standard_normal((64, 64)))
    h = x.T @ x / 200
    state, losses = signround_start(w, "int3_g64"), []
    for step in range(100):
        values, vjp = signround_quantize(w, *state, "int3_g64")
        d = values.astype(np.float64) - w
        losses.append((d @ h * d).sum())
        state = signround_step(state, vjp((2 * d @ h).astype(F)), (1 - step / 100) / 100)
    assert min(losses) < 0.6 * losses[0]


def test_edges():
    for scheme in ("int4_g32_asymmetric", "mxfp4", "hqq.int4_g64", "nvfp4", "torchao.fp8_rowwise_inference"):
        shape = (2, 128)
        zeros, half = np.zeros(shape, F), np.full(shape, 0.5, F)
        start = signround_start(zeros, scheme)
        values, vjp = signround_quantize(zeros, half, start.low, start.high, scheme)
        if not SCHEMES[scheme].deviations:
            assert np.abs(values).max() < 1e-30
        assert all(np.isfinite(part).all() for part in vjp(half))
        huge = np.full(shape, 3e38, F)
        huge[:, ::2] = -3e38
        if not SCHEMES[scheme].deviations:
            assert np.isfinite(signround_quantize(huge, half, start.low, start.high, scheme).values).all()
            nothing = signround_quantize(huge, half, 0 * start.low, 0 * start.high, scheme)
            assert np.isfinite(nothing.values).all()
            assert all(np.isfinite(part).all() for part in nothing.vjp(half))
    empty = np.zeros((0, 32), F)
    assert signround_quantize(empty, empty, empty[:, :1], empty[:, :1], "mxfp4").vjp(empty).low.shape == (
        0,
        1,
    )


def test_refusals():
    w, v, low, high, g = case(8, "int4_g32")
    call = signround_quantize
    refused(ValueError, r"v as float32 of shape \(8, 128\)", call, w, v[:2], low, high, "int4_g32")
    refused(ValueError, r"low as float32 of shape \(8, 4\)", call, w, v, low[:2], high, "int4_g32")
    refused(ValueError, "float32", call, w, v.astype(np.float64), low, high, "int4_g32")
    refused(ValueError, "v from -0.5 to 0.5", call, w, v * 2, low, high, "int4_g32")
    refused(ValueError, "high from 0.0 to 1.0", call, w, v, low, high + 1, "int4_g32")
    refused(ValueError, "low as float32", call, w, v, None, None, "int4_g32")
    refused(ValueError, "NaN or infinity in v", call, w, v * F(np.nan), low, high, "int4_g32")
    refused(ValueError, "NaN or infinity in w", call, w * F(np.nan), v, low, high, "int4_g32")
    refused(
        ValueError,
        "given scales stay",
        call,
        w,
        v,
        low,
        high,
        "int4_g32",
        scales=choose_scales(w, "int4_g32"),
    )
    refused(ValueError, "g has the shape of w", call(w, v, low, high, "int4_g32").vjp, g[:2])
    refused(ValueError, "divisible", call, w[:, :100], v[:, :100], low, high, "int4_g32")
    refused(TypeError, "NumPy array", call, w.tolist(), v, low, high, "int4_g32")
    drawn = replace(SCHEMES["int4_g32"], name="drawn", rounding="stochastic")
    refused(ValueError, "stochastically", call, w, v, low, high, drawn)
    refused(
        ValueError, "quantized in int4_g32, got mxfp4", signround_start, w, "int4_g32", quantize(w, "mxfp4")
    )


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_auto_round(bits):
    """auto_round 0.16.1 in float32: values, scales and zero points bit for bit, gradients to their last bits."""
    module = pytest.importorskip("auto_round.data_type.int")
    scheme = f"int{bits}_g32_asymmetric"
    w, v, low, high, g = case(9, scheme, (64, 256), least=0.3)
    parts = [
        torch.from_numpy(part).clone().requires_grad_()
        for part in (v.reshape(-1, 32), low.reshape(-1), high.reshape(-1))
    ]
    theirs, scale, zero = module.quant_tensor_asym(
        torch.from_numpy(w), bits=bits, group_size=32, v=parts[0], min_scale=parts[1], max_scale=parts[2],
        scale_dtype=torch.float32,
    )  # fmt: skip
    (theirs * torch.from_numpy(g)).sum().backward()
    values, vjp = signround_quantize(w, v, low, high, scheme)
    q = signround_codes(w, v, low, high, scheme)
    assert (values != theirs.detach().numpy()).sum() == 0
    assert (q.scale.reshape(-1) != scale.detach().numpy().reshape(-1)).sum() == 0
    assert (q.zero.reshape(-1).astype(int) + 2 ** (bits - 1) != zero.detach().numpy().reshape(-1)).sum() == 0
    most = bound_of_sum(g.reshape(-1, 32), values.reshape(-1, 32), w.reshape(-1, 32))
    for found, part in zip(vjp(g), parts, strict=True):
        truth = part.grad.numpy().reshape(-1)
        # Of V there is one product of two roundings; both sums of a factor are off by the bound.
        slack = 2.0**-22 * np.abs(truth) if truth.size == w.size else 2 * most
        assert (np.abs(found.reshape(-1) - truth) <= slack).all()
