from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from reference.matmul.exact import RESULTS
from reference.matmul.matmul import matmul
from reference.matmul.tensor_core_model import HOPPER_FP8_PROMOTED, tensor_core_matmul
from reference.quantize.quantize import quantize

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
    with pytest.raises(ValueError, match="out_dtype is one of"):
        matmul(a, b, out_dtype="float64")
    with pytest.raises(ValueError, match=r"shapes \(2, 3\) and \(4, 3\); transpose b"):
        matmul(a, b.T)
    with pytest.raises(ValueError, match="reshape it to two axes"):
        matmul(a[0], b)
    with pytest.raises(ValueError, match="do not broadcast"):
        matmul(np.ones((2, 2, 3), np.float32), np.ones((3, 3, 4), np.float32))
    with pytest.raises(TypeError, match="got float64"):
        matmul(a.astype(np.float64), b)
    with pytest.raises(TypeError, match="decode it if these are codes"):
        matmul(a.astype(np.uint8), b)
    with pytest.raises(TypeError, match="one library, got numpy and torch"):
        matmul(a, torch.from_numpy(b))
    with pytest.raises(TypeError, match="call it outside jit"):
        jax.jit(matmul)(jnp.asarray(a), jnp.asarray(b))
    with pytest.raises(ValueError, match="one value per column"):
        matmul(a, b, bias=np.ones(3, np.float32))
    with pytest.raises(ValueError, match="one value per column"):
        matmul(a, b, bias=np.ones((5, 2, 4), np.float32))
    with pytest.raises(ValueError, match="at least 1; got 0"):
        matmul(a, b, accumulation="blocked", block=0)
    with pytest.raises(ValueError, match="k_step"):
        matmul(a, b, accumulation="hopper_fp8", k_step=0)
    with pytest.raises(ValueError, match=r"holds 1\.06.*float8_e4m3fn does not"):
        matmul(a * np.float32(1.0625), b, accumulation="hopper_fp8")
    with pytest.raises(ValueError, match="use accumulation='blocked'"):
        matmul(a.astype(np.int8), b, accumulation="hopper_fp8")
