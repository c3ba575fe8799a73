"""`matmul`: tiers of accumulation, bias and dtypes of results, edges, three libraries; operands that are `Quantized`."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from reference.matmul.error_bound import gamma
from reference.matmul.exact import RESULTS
from reference.matmul.matmul import matmul
from reference.matmul.operands import operand_of
from reference.matmul.tensor_core_model import HOPPER_FP8, HOPPER_FP8_PROMOTED, tensor_core_matmul
from reference.quantize.quantize import dequantize, quantize
from reference.schemes.schemes import SCHEMES, scheme_of
from tests.support.refusals import refused

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
INF, NAN = np.inf, np.nan


def block_sum(a, b):
    """The exact product rounded to float32; `tests/reference/matmul/test_exact.py` checks it."""
    return matmul(a.astype(np.float32), b.astype(np.float32))


@pytest.mark.parametrize("accumulation", ["exact", "blocked", "hopper_fp8"])
def test_zero_sums_are_positive_and_empty_shapes_work(accumulation):
    zero = matmul(np.float32([[-0.0, 1, -1]]), np.float32([[1], [1], [1]]), accumulation=accumulation)
    assert not np.signbit(zero[0, 0])
    assert not np.signbit(matmul(np.float32([[-0.0]]), np.float32([[1]]), accumulation=accumulation)[0, 0])
    for m, k, n in [(0, 3, 2), (3, 0, 2), (2, 3, 0), (0, 0, 0)]:
        got = matmul(np.ones((m, k), np.float32), np.ones((k, n), np.float32), accumulation=accumulation)
        assert got.shape == (m, n)
        assert not got.any()
    bias = np.float32([1.5, -2.5])
    got = matmul(
        np.ones((3, 0), np.float32), np.ones((0, 2), np.float32), accumulation=accumulation, bias=bias
    )
    np.testing.assert_array_equal(got, np.broadcast_to(bias, (3, 2)))


@pytest.mark.parametrize("accumulation", ["exact", "blocked", "hopper_fp8"])
def test_nan_and_infinity(accumulation):
    values = [0.0, -0.0, 1.0, -2.0, INF, -INF, NAN]
    a = np.float32([[x, y] for x in values for y in values])
    b = a.T.copy()
    with np.errstate(invalid="ignore"):
        want = np.float32(a[:, None, 0] * b[None, 0] + a[:, None, 1] * b[None, 1])
    np.testing.assert_array_equal(
        matmul(a, b, accumulation=accumulation, operand_formats=("float8_e5m2",) * 2), want
    )


@pytest.mark.parametrize("name", list(RESULTS))
def test_blocked_is_a_loop_in_float32(name):
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal(s).astype(np.float32) for s in ((4, 70), (70, 5)))
    bias = rng.standard_normal(5).astype(np.float32)
    total = np.zeros((4, 5), np.float32)
    for start in range(0, 70, 32):
        total = total + block_sum(a[:, start : start + 32], b[start : start + 32])
    got = matmul(a, b, accumulation="blocked", block=32, bias=bias, out_dtype=name)
    assert np.array_equal(got, (total + bias).astype(DTYPES[name]))
    np.testing.assert_array_equal(matmul(a, b, accumulation="blocked", block=1000), matmul(a, b))


def test_hopper_tier_is_the_model():
    rng = np.random.default_rng(4)
    a, b = (
        rng.standard_normal(s).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
        for s in ((4, 300), (300, 5))
    )
    wide = a.astype(np.float64), b.astype(np.float64)
    chain, promoted = tensor_core_matmul(*wide), tensor_core_matmul(*wide, core=HOPPER_FP8_PROMOTED)
    assert not np.array_equal(chain, promoted)
    np.testing.assert_array_equal(matmul(a, b, accumulation="hopper_fp8"), chain)
    np.testing.assert_array_equal(matmul(a, b, accumulation="hopper_fp8", promote=128), promoted)
    np.testing.assert_array_equal(
        matmul(a.astype(np.float32), b.astype(np.float32), accumulation="hopper_fp8"), chain
    )
    e5m2 = matmul(a.astype(np.float32).astype(ml_dtypes.float8_e5m2), b, accumulation="hopper_fp8")
    assert e5m2.shape == (4, 5)
    sixteen = matmul(
        a, b, accumulation="hopper_fp8", k_step=16, frac_bits=25, operand_formats=("bfloat16", "float16")
    )
    assert np.abs(sixteen - matmul(a, b)).max() < 1e-4 < np.abs(chain - matmul(a, b)).max()


@pytest.mark.parametrize("accumulation", ["exact", "blocked", "hopper_fp8"])
@pytest.mark.parametrize("out", list(RESULTS))
def test_libraries_agree_bit_for_bit(accumulation, out):
    rng = np.random.default_rng(9)
    x, w = rng.standard_normal((4, 160)).astype(np.float32), rng.standard_normal((160, 5)).astype(np.float32)
    plain = [v.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) for v in (x, w)]
    plain[1][:, 0] *= 2.0**-9 if accumulation == "hopper_fp8" else 2.0**-145
    plain[1] = (
        plain[1].astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        if accumulation == "hopper_fp8"
        else plain[1]
    )
    bias = rng.standard_normal(5).astype(np.float32)
    bias[0] = 0
    keywords = {"accumulation": accumulation, "out_dtype": out}
    want = matmul(*plain, bias=bias, **keywords).view(np.uint8)
    on_torch = matmul(*map(torch.from_numpy, plain), bias=torch.from_numpy(bias), **keywords)
    assert on_torch.dtype == getattr(torch, out)
    np.testing.assert_array_equal(on_torch.view(torch.uint8).numpy(), want)
    on_jax = matmul(*map(jnp.asarray, plain), bias=jnp.asarray(bias), **keywords)
    assert isinstance(on_jax, jax.Array)
    np.testing.assert_array_equal(np.asarray(on_jax).view(np.uint8), want)


@pytest.mark.parametrize("library", [torch.from_numpy, jnp.asarray])
def test_quantized_operands_of_every_library(library):
    rng = np.random.default_rng(11)
    x, w = rng.standard_normal((4, 64)).astype(np.float32), rng.standard_normal((64, 5)).astype(np.float32)
    ours = [quantize(v, "mxfp8_e4m3", axis=axis) for v, axis in ((x, -1), (w, 0))]
    theirs = [replace(q, codes=library(q.codes), scale=library(q.scale)) for q in ours]
    for accumulation in ("exact", "blocked", "hopper_fp8"):
        got = matmul(*theirs, accumulation=accumulation)
        assert isinstance(got, type(theirs[0].codes))
        np.testing.assert_array_equal(np.asarray(got), matmul(*ours, accumulation=accumulation))


def test_narrow_dtypes_of_every_library():
    a, b = np.float32([[1.5, -2, 3.5]]), np.float32([[1], [0.25], [2]])
    for name in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"):
        dtype = np.float16 if name == "float16" else getattr(ml_dtypes, name)
        assert matmul(a.astype(dtype), b.astype(dtype))[0, 0] == 8
        assert matmul(jnp.asarray(a.astype(dtype)), jnp.asarray(b.astype(dtype)))[0, 0] == 8
        assert matmul(*(torch.from_numpy(x).to(getattr(torch, name)) for x in (a, b)))[0, 0] == 8


def test_batches_and_views():
    rng = np.random.default_rng(10)
    a, b = (
        rng.standard_normal((3, 1, 4, 20)).astype(np.float32),
        rng.standard_normal((2, 20, 5)).astype(np.float32),
    )
    bias = rng.standard_normal((3, 1, 1, 5)).astype(np.float32)
    for keywords in ({}, {"accumulation": "blocked", "block": 8}):
        got = matmul(a, b, bias=bias, **keywords)
        assert got.shape == (3, 2, 4, 5)
        for i, j in np.ndindex(3, 2):
            np.testing.assert_array_equal(got[i, j], matmul(a[i, 0], b[j], bias=bias[i, 0, 0], **keywords))
        flipped = matmul(a[..., ::-1, :], np.asfortranarray(b), bias=bias, **keywords)
        np.testing.assert_array_equal(flipped, got[..., ::-1, :])


def test_refusals_name_the_way_out():
    a, b = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
    with pytest.raises(ValueError, match="accumulation is one of exact, blocked, hopper_fp8"):
        matmul(a, b, accumulation="fast")
    refused(ValueError, "out_dtype is one of", matmul, a, b, out_dtype="float64")
    refused(ValueError, r"shapes \(2, 3\) and \(4, 3\); transpose b", matmul, a, b.T)
    refused(ValueError, "reshape it to two axes", matmul, a[0], b)
    with pytest.raises(ValueError, match="do not broadcast"):
        matmul(np.ones((2, 2, 3), np.float32), np.ones((3, 3, 4), np.float32))
    refused(TypeError, "got float64", matmul, a.astype(np.float64), b)
    refused(TypeError, "decode it if these are codes", matmul, a.astype(np.uint8), b)
    refused(TypeError, "one library, got numpy and torch", matmul, a, torch.from_numpy(b))
    refused(TypeError, "call it outside jit", jax.jit(matmul), jnp.asarray(a), jnp.asarray(b))
    refused(ValueError, "one value per column", matmul, a, b, bias=np.ones(3, np.float32))
    refused(ValueError, "one value per column", matmul, a, b, bias=np.ones((5, 2, 4), np.float32))
    refused(ValueError, "at least 1; got 0", matmul, a, b, accumulation="blocked", block=0)
    refused(ValueError, "k_step", matmul, a, b, accumulation="hopper_fp8", k_step=0)
    with pytest.raises(ValueError, match=r"holds 1\.06.*float8_e4m3fn does not"):
        matmul(a * np.float32(1.0625), b, accumulation="hopper_fp8")
    refused(ValueError, "use accumulation='blocked'", matmul, a.astype(np.int8), b, accumulation="hopper_fp8")


# How scales, zero points and outer scales of `Quantized` operands enter `matmul`.


def blockwise(scale, size, axis, length):
    return np.take(np.repeat(scale, size, axis), range(length), axis)


@pytest.mark.parametrize("accumulation", ["blocked", "hopper_fp8"])
@pytest.mark.parametrize(
    ("name", "rows", "size"), [("fp8_1x128", 1, 128), ("fp8_128x128", 128, 128), ("mxfp8_e4m3", 1, 32)]
)
def test_block_scales_multiply_partial_sums(accumulation, name, rows, size):
    rng = np.random.default_rng(5)
    x, w = rng.standard_normal((3, 288)).astype(np.float32), rng.standard_normal((288, 4)).astype(np.float32)
    a, b = quantize(x, name, axis=-1), quantize(w, name, axis=0)
    codes = [
        np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)[q.codes].astype(np.float64)
        for q in (a, b)
    ]
    sa, sb = (
        q.scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float32) if q.scale.dtype == np.uint8 else q.scale
        for q in (a, b)
    )
    sa, sb = blockwise(sa, rows, 0, 3), blockwise(sb, rows, 1, 4)
    total = np.zeros((3, 4), np.float32)
    for i, start in enumerate(range(0, 288, size)):
        part = codes[0][:, start : start + size], codes[1][start : start + size]
        partial = block_sum(*part) if accumulation == "blocked" else np.float32(tensor_core_matmul(*part))
        total = total + partial * sa[:, i : i + 1] * sb[i : i + 1]
    np.testing.assert_array_equal(matmul(a, b, accumulation=accumulation), total)


def test_constant_scales_and_zero_points_follow_the_sum():
    rng = np.random.default_rng(6)
    x, w = (
        rng.standard_normal((3, 200)).astype(np.float32) + 1,
        rng.standard_normal((200, 4)).astype(np.float32),
    )
    a, b = quantize(x, "int8_rowwise_asymmetric"), quantize(w, "int8_rowwise", axis=0)
    codes = a.codes.view(np.int8).astype(np.int64) - a.zero, b.codes.view(np.int8).astype(np.int64)
    want = (codes[0] @ codes[1]).astype(np.float32) * a.scale * b.scale
    np.testing.assert_array_equal(matmul(a, b, accumulation="blocked", block=200), want)
    f, g = quantize(x, "fp8_tensorwise"), quantize(w, "fp8_rowwise", axis=0)
    codes = [
        np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)[q.codes].astype(np.float64)
        for q in (f, g)
    ]
    for core, promote in ((HOPPER_FP8, None), (HOPPER_FP8_PROMOTED, 128)):
        want = np.float32(tensor_core_matmul(*codes, core=core)) * f.scale * g.scale
        np.testing.assert_array_equal(matmul(f, g, accumulation="hopper_fp8", promote=promote), want)


def test_outer_and_encoding_scales():
    rng = np.random.default_rng(7)
    x, w = rng.standard_normal((2, 32)).astype(np.float32), rng.standard_normal((32, 3)).astype(np.float32)
    a, b = quantize(x, "nvfp4"), quantize(w, "nvfp4", axis=0)
    table = np.arange(16, dtype=np.uint8).view(np.uint8)
    fp4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])[table]
    ca, cb = fp4[a.codes], fp4[b.codes]
    sa, sb = (q.scale.view(ml_dtypes.float8_e4m3fn).astype(np.float32) for q in (a, b))
    parts = [
        np.float32(ca[:, s : s + 16] @ cb[s : s + 16]) * sa[:, i : i + 1] * sb[i : i + 1]
        for i, s in enumerate((0, 16))
    ]
    want = (parts[0] + parts[1]) * a.outer * b.outer
    np.testing.assert_array_equal(matmul(a, b, accumulation="blocked"), want)
    q = quantize(x, "torchao.fp8_rowwise_training")
    r = quantize(w, "torchao.fp8_rowwise_training", axis=0)
    codes = [
        np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)[t.codes].astype(np.float64)
        for t in (q, r)
    ]
    want = block_sum(*codes) * (np.float32(1) / q.scale) * (np.float32(1) / r.scale)
    np.testing.assert_array_equal(matmul(q, r, accumulation="blocked"), want)


@pytest.mark.parametrize(
    "name", ["fp8_rowwise", "mxfp4", "nvfp4", "int4_g32_asymmetric", "nf4", "torchao.int4_g32_tinygemm"]
)
def test_exact_of_quantized_is_exact_of_dequantized(name):
    rng = np.random.default_rng(8)
    x, w = rng.standard_normal((4, 64)).astype(np.float32), rng.standard_normal((64, 32)).astype(np.float32)
    a, b = quantize(x, scheme_of(name)), quantize(w, scheme_of(name), axis=0)
    want = matmul(dequantize(a), dequantize(b))
    np.testing.assert_array_equal(matmul(a, b), want)
    np.testing.assert_array_equal(matmul(a, dequantize(b)), want)
    assert matmul(a, b, accumulation="blocked").shape == (4, 32)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_parts_multiply_to_the_dequantized_value(name, axis):
    """For every scheme and both operands: (code - zero) * scale * outer, to the float32 roundings between the two.

    `dequantize` rounds the product, and the scale with its outer scale before that; the operand rounds the reciprocal of every
    inverted factor. n such roundings make gamma(n) at most (see `reference.matmul.error_bound`), none for powers of two,
    where both are exact. The float64 product here rounds once more, by 2**-53 and so by less than 2**-28 of gamma(1).
    """
    rng = np.random.default_rng(11)
    x = rng.standard_normal((256, 512)).astype(np.float32)
    operand = operand_of(quantize(x, name, axis=axis), axis, "a")
    value = operand.codes
    if operand.scale is not None:
        scale = operand.scale
        if operand.group is not None:
            starts = range(0, operand.k, operand.group)
            scale = np.concatenate([operand.scale_at(start) for start in starts], axis=axis)
            scale = np.repeat(scale, operand.group, axis=axis)
        value = value * scale * (1.0 if operand.outer is None else operand.outer)
    exact = operand.scale is None or scheme_of(name).scale.power_of_two
    roundings = 0 if exact else 1 + (operand.outer is not None) + sum(operand.inverted)
    bound = gamma(roundings) * (1 + 2.0**-28) * np.abs(operand.values)
    assert (np.abs(value - operand.values) <= bound).all()
    assert len(operand.inverted) == (operand.scale is not None) + (operand.outer is not None)
