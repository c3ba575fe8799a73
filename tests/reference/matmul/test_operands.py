"""How scales, zero points and outer scales of `Quantized` operands enter `matmul`."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from reference.matmul.error_bound import gamma
from reference.matmul.matmul import matmul
from reference.matmul.operands import operand_of
from reference.matmul.tensor_core_model import HOPPER_FP8, HOPPER_FP8_PROMOTED, tensor_core_matmul
from reference.quantize.quantize import dequantize, quantize
from reference.schemes.schemes import SCHEMES, scheme_of


def block_sum(a, b):
    """The exact product rounded to float32; `tests/reference/matmul/test_exact.py` checks it."""
    return matmul(a.astype(np.float32), b.astype(np.float32))


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
