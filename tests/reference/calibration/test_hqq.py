"""HQQ against a loop over one block, against rounding, and against the package hqq where that is installed."""

from __future__ import annotations

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from ao_lab.testing.bits import assert_same_quantized
from reference import SCHEMES, dequantize, quantize
from reference.calibration.hqq import hqq, shrink
from reference.schemes.conventions import hqq_scheme
from tests.support.refusals import refused

F = np.float32


def weights(seed, shape=(8, 128), dtype=F):
    """With outliers, as they make HQQ differ from rounding."""
    rng = np.random.default_rng(seed)
    return (rng.standard_t(4, shape) * 0.05).astype(F).astype(dtype)


def numbers(q):
    """(scale, zero point in steps of the scale), float64 in the shape of the scales."""
    return (
        q.scale.astype(np.float64),
        2 ** (q.scheme.format.bits - 1) - q.zero.astype(np.float64) / q.scale.astype(np.float64),
    )


def tree(terms):
    """The sum of a power of two of numbers, adjacent pairs first: where errors of both signs balance, its last bit decides."""
    terms = list(terms)
    while len(terms) > 1:
        terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def slow(block, s, z, bits, steps, p, beta):
    """One block, number by number: the zero point of the least mean |error| before the first step that does not lower it."""
    best, least = z, math.inf
    for _ in range(steps):
        codes = [min(max(round(x / s + z), 0), 2**bits - 1) for x in block]
        errors = [x - (q - z) * s for x, q in zip(block, codes, strict=True)]
        error = tree(map(abs, errors)) / len(block)
        if not error < least:
            break
        best, least = z, error
        shrunk = [math.copysign(max(abs(e) - abs(e) ** (p - 1) / beta, 0), e) if e else 0.0 for e in errors]
        z = tree(q - (x - e) / s for x, e, q in zip(block, shrunk, codes, strict=True)) / len(block)
        # As it is stored: a value in float32.
        z = 2 ** (bits - 1) - float(F((2 ** (bits - 1) - z) * s)) / s
    return best


@pytest.mark.parametrize(("bits", "group"), [(2, 32), (3, 64), (4, 64), (8, 32)])
@pytest.mark.parametrize(("steps", "p", "beta"), [(20, 0.7, 10.0), (3, 0.5, 100.0), (1, 1.0, 50.0)])
def test_zero_points_are_those_of_a_loop(bits, group, steps, p, beta):
    scheme = hqq_scheme(bits, group, "float32")
    w = weights(bits)
    q = hqq(w, scheme, steps=steps, p=p, beta=beta)
    start = quantize(w, scheme)
    scale, first = numbers(start)
    found = numbers(q)[1]
    assert (q.scale == start.scale).all()
    for row, column in np.ndindex(scale.shape):
        block = [float(x) for x in w[row, column * group : (column + 1) * group]]
        expected = slow(block, scale[row, column], first[row, column], bits, steps, p, beta)
        assert abs(found[row, column] - expected) < 1e-9
    assert_same_quantized(q, quantize(w, scheme, scales=q.scales))


def test_shrink():
    x = np.asarray([0.0, -0.0, 0.1, -0.5, 2.0])
    assert shrink(x, 1.0, 5.0).tolist() == [0, 0, 0, -0.3, 1.8]
    np.testing.assert_allclose(shrink(x[4:], 0.5, 10.0), 2 - 0.1 / np.sqrt(2), rtol=1e-15)


def errors(w, q, group):
    difference = np.abs(dequantize(q).astype(np.float64) - w.astype(np.float64))
    return difference.reshape(len(w), -1, group).mean(axis=2)


@pytest.mark.parametrize(
    "scheme", ["hqq.int4_g64", "hqq.int2_g64", "int3_g64", "int4_g64", "ternary_g32", "nvfp4", "mxfp4"]
)
def test_no_block_is_worse_than_rounding(scheme):
    w = weights(1, (16, 256))
    group = SCHEMES[scheme].scale.block
    found, start = errors(w, hqq(w, scheme), group), errors(w, quantize(w, scheme), group)
    assert (found <= start * (1 + 1e-6)).all()
    if scheme != "mxfp4":
        assert (found < start * (1 - 1e-3)).any()


@pytest.mark.parametrize("scheme", ["hqq.int3_g64", "int3_g64", "fp8_1x128"])
def test_a_part_of_a_tensor_has_the_bits_of_the_whole(scheme, monkeypatch):
    w = weights(2, (6, 256))
    whole = hqq(w, scheme)
    rows, columns = hqq(w[2:4], scheme), hqq(np.ascontiguousarray(w[:, 128:]), scheme)
    assert (whole.codes[2:4] == rows.codes).all()
    assert (whole.scale[2:4] == rows.scale).all()
    assert (whole.codes[:, 128:] == columns.codes).all()
    monkeypatch.setattr("reference.calibration.hqq.CHUNK", 200)
    assert_same_quantized(hqq(w, scheme), whole)


def test_a_tensor_that_stops_as_one_depends_on_all_its_blocks():
    """The package's way: parts have other bits than in the whole."""
    w = weights(3, (32, 128))
    scheme = hqq_scheme(3, 64, "float32")
    whole, part = hqq(w, scheme, stop="tensor"), hqq(w[:1], scheme, stop="tensor")
    assert (whole.zero[:1] != part.zero).any()
    assert np.abs(w - dequantize(whole)).mean() < np.abs(w - dequantize(quantize(w, scheme))).mean()


def test_zero_points_are_judged_as_they_are_stored():
    """In bfloat16: that of the least mean |error| among stored ones, not one that was rounded at the end."""
    w = weights(4, (64, 64))
    coarse = hqq_scheme(4, 64)
    found = hqq(w, coarse)
    fine = hqq(w, replace(coarse, name="fine", zero=replace(coarse.zero, storage="float32")))
    rounded = np.asarray(fine.zero.astype(ml_dtypes.bfloat16)).view(np.uint16)
    late = quantize(w, coarse, scales=replace(found.scales, zero=rounded))
    assert found.zero.dtype == np.uint16
    assert errors(w, found, 64).mean() < errors(w, late, 64).mean()


def test_scales_answer_a_block_of_exact_multiples():
    """A block whose largest weight is an outlier of its grid gets its grid back; its scale is one where rounding has none."""
    w = np.full((1, 32), 0.75, F)
    w[0, ::2] = -0.75
    w[0, 5] = 1.0
    q = hqq(w, "int4_g32")
    values = dequantize(q)
    assert np.abs(values - w).mean() < np.abs(dequantize(quantize(w, "int4_g32")) - w).mean()


def test_edges():
    for scheme in ("hqq.int4_g64", "int4_g64"):
        assert_same_quantized(hqq(weights(5), scheme, steps=0), quantize(weights(5), scheme))
        zeros = np.zeros((2, 64), F)
        assert (dequantize(hqq(zeros, scheme)) == 0).all()
        constant = np.full((2, 64), -1.5, F)
        assert np.isfinite(dequantize(hqq(constant, scheme))).all()
        tiny = weights(6, (2, 64)) * F(1e-36)
        assert np.isfinite(dequantize(hqq(tiny, scheme))).all()
        assert hqq(np.zeros((0, 64), F), scheme).codes.shape == (0, 64)
        assert hqq(weights(7, dtype=ml_dtypes.bfloat16), scheme).codes.shape == (8, 128)
    huge = np.full((1, 64), 3e38, F)
    huge[0, ::2] = -3e38
    assert np.isfinite(dequantize(hqq(huge, "int4_g64"))).all()


def test_a_short_last_block_counts_its_own_elements():
    base = SCHEMES["int3_g64"]
    scheme = replace(base, name="short", scale=replace(base.scale, partial=True))
    w = weights(8, (16, 100))
    q, alone = hqq(w, scheme), hqq(np.ascontiguousarray(w[:, 64:]), scheme)
    assert (q.scale[:, 1] == alone.scale[:, 0]).all()
    # Repeated, the last element would weigh more than the others.
    filled = hqq(np.concatenate([w[:, 64:], np.repeat(w[:, -1:], 28, axis=1)], axis=1), scheme)
    assert (q.scale[:, 1] != filled.scale[:, 0]).any()
    # Nor does it count in what decides: repeated 63 times, its error alone would.
    w[:, 64:] = np.asarray([[1.0, 0.9], [0.9, 1.0]] * 8, F).repeat(18, axis=1)
    for length in range(65, 100):
        part = np.ascontiguousarray(w[:, 64:length])
        row = replace(scheme, name="row", scale=replace(scheme.scale, block=-1))
        assert (hqq(part, scheme).scale[:, 0] == hqq(part, row).scale.reshape(-1)).all()


DEFINED = [name for name, scheme in SCHEMES.items() if not (scheme.zero and scheme.zero.rule == "code")]


@pytest.mark.parametrize("name", [*DEFINED[::8], "te.nvfp4", "fp8_128x128"])
def test_schemes(name):
    check_scheme(name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme(name):
    check_scheme(name)


def check_scheme(name):
    """Never worse than rounding as a whole, or refused with the way out."""
    scheme, w = SCHEMES[name], weights(9, (128, 256))
    if scheme.zero is not None and scheme.zero.rule == "code":
        refused(ValueError, f"{name} are integers.*take hqq", hqq, w, name)
    elif scheme.outer is not None and scheme.outer.statistic != "absmax_elements":
        refused(ValueError, f"{name} are quantized.*one level", hqq, w, name)
    else:
        found, start = np.abs(dequantize(hqq(w, name)) - w), np.abs(dequantize(quantize(w, name)) - w)
        assert found.mean() <= start.mean() * (1 + 1e-6)


def test_refusals():
    w = weights(10)
    refused(ValueError, "stop is", hqq, w, "hqq.int4_g64", stop="row")
    refused(ValueError, "steps", hqq, w, "hqq.int4_g64", steps=-1)
    refused(ValueError, "p is above 0", hqq, w, "hqq.int4_g64", p=0)
    refused(ValueError, "p is above 0", hqq, w, "hqq.int4_g64", p=1.5)
    refused(ValueError, "beta", hqq, w, "hqq.int4_g64", beta=0)
    refused(ValueError, "has none; leave stop out", hqq, w, "int4_g64", stop="tensor")
    drawn = replace(SCHEMES["int4_g64"], name="drawn", rounding="stochastic")
    refused(ValueError, "stochastically", hqq, w, drawn)
    refused(ValueError, "NaN or infinity", hqq, w * F(np.nan), "hqq.int4_g64")
    refused(ValueError, "divisible", hqq, w[:, :100], "hqq.int4_g64")
    refused(ValueError, "matrix", hqq, w[0], "hqq.int4_g64")
    refused(TypeError, "NumPy array", hqq, w.tolist(), "hqq.int4_g64")


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_package(bits, monkeypatch):
    """hqq 0.2.8.post1 on a CPU in float32: equal codes, but where one of float32's rounding errors decides."""
    monkeypatch.setenv("DISABLE_CUDA", "1")
    package = pytest.importorskip("hqq.core.quantize")
    import torch

    w = weights(bits, (64, 256))
    theirs, meta = package.Quantizer.quantize(
        torch.from_numpy(w), nbits=bits, group_size=32, axis=1, round_zero=bits == 4, bitpack=False, device="cpu",
        compute_dtype=torch.float32,
    )  # fmt: skip
    q = hqq(w, hqq_scheme(bits, 32, "float32"), stop="tensor")
    scale, zero = numbers(q)
    different = q.codes != theirs.numpy().reshape(64, 256)
    near = np.abs((w.reshape(64, 8, 32) / scale[..., None] + zero[..., None]) % 1 - 0.5).reshape(64, 256)
    assert different.mean() < 1e-4
    assert (near[different] < 0.1).all()
    if not different.any():
        assert np.abs(zero.reshape(-1, 1) - meta["zero"].numpy()).max() < 1e-4
