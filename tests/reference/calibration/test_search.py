"""Searched scales against brute force: every candidate quantized by itself, block by block."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ao_lab.testing.strategies import assert_same_bits
from reference import SCHEMES, Scales, choose_scales, dequantize, quantize, search_scales
from reference.calibration.search import default_candidates
from reference.formats.formats import FORMATS
from reference.schemes.schemes import Scale, Scheme
from tests.support.refusals import refused

F = np.float32


def small(name, block=8, **changes):
    """A record of SCHEMES with short blocks."""
    return replace(
        SCHEMES[name], name=f"{name}_b{block}", scale=replace(SCHEMES[name].scale, block=block, **changes)
    )


def matrix(seed, rows=4, k=32):
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((rows, k)) * np.exp(rng.standard_normal((rows, k // 8))).repeat(8, axis=1)
    return w.astype(F), np.exp(rng.standard_normal(k))


def block_errors(w, scheme, scales, weights, norm):
    """(rows, blocks) by the quantizer itself."""
    off = np.abs(dequantize(quantize(w, scheme, scales=scales)).astype(np.float64) - w) ** norm
    size = scheme.scale.block if scheme.scale.block != -1 else w.shape[1]
    return (off * weights).reshape(len(w), -1, size).sum(-1)


def clipped(w, low, high, size):
    """w with each block's range shrunk: its least value times `low`, its largest times `high`."""
    parts = w.reshape(len(w), -1, size)
    least, most = (parts.min(-1, keepdims=True) * F(low)), (parts.max(-1, keepdims=True) * F(high))
    return np.minimum(np.maximum(parts, least), most).reshape(w.shape)


def best_of(w, scheme, tried, weights, norm=2.0):
    """Scale and zero point of the least error of each block, the first of equals."""
    errors = np.stack([block_errors(w, scheme, scales, weights, norm) for scales in tried])
    choice = errors.argmin(axis=0)
    shape = tried[0].scale.shape

    def take(part):
        if getattr(tried[0], part) is None or (scheme.zero is None and part == "zero"):
            return None
        arrays = np.stack([getattr(scales, part).reshape(choice.shape) for scales in tried])
        return np.take_along_axis(arrays, choice[None], 0)[0].reshape(shape)

    return take("scale"), take("zero"), errors.min(axis=0)


@settings(max_examples=12)
@given(st.integers(0, 10**6), st.sampled_from([1.0, 2.0, 2.4]), st.booleans())
def test_e4m3_scales_against_all_126_codes(seed, norm, weighted):
    """Every code of a scale, by steps beyond both ends."""
    scheme = small("nvfp4")
    w, weights = matrix(seed)
    weights = weights if weighted else np.ones(32)
    base = choose_scales(w, scheme)
    tried = [base]
    tried += [Scales(np.full_like(base.scale, code), base.outer) for code in range(1, 127)]
    scale, _, errors = best_of(w, scheme, tried, weights, norm)
    made = search_scales(
        w, scheme, weights=weights if weighted else None, norm=norm, candidates=[0, *range(-126, 127)]
    )
    np.testing.assert_allclose(block_errors(w, scheme, made, weights, norm), errors, rtol=1e-12)
    unlike = made.scale != scale  # of two codes as good either
    assert unlike.mean() < 0.2
    assert_same_bits(made.outer, base.outer)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.sampled_from(["mxfp4", "mxint8", "mxfp8_e4m3", "nvfp4"]))
def test_default_steps(seed, name):
    scheme = small(name)
    w, weights = matrix(seed)
    base = choose_scales(w, scheme)
    steps = [0, -1, 1] if name != "nvfp4" else [0] + [s * n for n in range(1, 7) for s in (-1, 1)]
    moved = [
        np.clip(base.scale.astype(int) + step, name == "nvfp4", 254 if name != "nvfp4" else 126)
        for step in steps
    ]
    tried = [Scales(code.astype(np.uint8), base.outer) for code in moved]
    scale, _, _ = best_of(w, scheme, tried, weights)
    assert_same_bits(search_scales(w, scheme, weights=weights).scale, scale)


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.sampled_from(["int4_g32", "int2_g32", "fp8_1x128", "stretched2_g32"]))
def test_ratios_of_the_range(seed, name):
    scheme = small(name, partial=False)
    w, weights = matrix(seed)
    ratios = list(default_candidates(scheme))
    assert ratios[0] == 1.0
    absolute = np.abs(w)
    tried = [choose_scales(clipped(absolute, 1, ratio, 8), scheme) for ratio in ratios]
    scale, _, _ = best_of(w, scheme, tried, weights)
    assert_same_bits(search_scales(w, scheme, weights=weights).scale, scale)


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.sampled_from(["int3_g32_asymmetric", "torchao.int4_g32_tinygemm"]))
def test_both_ends_of_a_range(seed, name):
    """Pairs of ratios, each end by itself; bfloat16 scales and zero points are rounded before errors count."""
    scheme = small(name)
    w, weights = matrix(seed)
    w -= (w.reshape(4, -1, 8).min(-1) + w.reshape(4, -1, 8).max(-1)).repeat(8, axis=1).reshape(w.shape) / 2
    pairs = [(1.0, 1.0), (0.9, 1.0), (1.0, 0.9), (0.7, 0.8), (0.5, 0.5)]
    tried = [choose_scales(clipped(w, *pair, 8), scheme) for pair in pairs]
    scale, zero, _ = best_of(w, scheme, tried, weights)
    made = search_scales(w, scheme, weights=weights, candidates=pairs)
    assert_same_bits(made.scale, scale)
    assert_same_bits(made.zero, zero)


def test_steps_have_the_maximum_on_four_in_place_of_six():
    """Four over six: of each e4m3 scale of a block 6 / 4 of it is a default candidate, whatever its code."""
    values = FORMATS["float8_e4m3fn"].values[:127].astype(np.float64)
    for code in range(1, 127):
        nearest = int(np.abs(values - 1.5 * values[code]).argmin())
        assert nearest - code in default_candidates(SCHEMES["nvfp4"])
    # A block whose next value lies at 3 / 4 of the largest is exact only so.
    w = np.tile(np.array([4.0, 3, 4, 3, 2, 1, 0.5, 1.5], F), (1, 2))
    outer = np.asarray(F(1 / 64))
    assert dequantize(quantize(w, "nvfp4", scales=Scales(outer=outer))).tolist() != w.tolist()
    made = search_scales(w, "nvfp4", outer=outer)
    assert dequantize(quantize(w, "nvfp4", scales=made)).tolist() == w.tolist()


@pytest.mark.parametrize("name", ["nvfp4", "te.nvfp4", "torchao.nvfp4"])
def test_steps_end_at_the_floor_and_at_the_largest_code(name):
    """No step makes a scale 0, one below its record's floor, or NaN."""
    w = matrix(7, 4, 32)[0] * np.array([[1e-6], [1], [1], [100]], F)
    floor = {"nvfp4": 1, "te.nvfp4": 1, "torchao.nvfp4": 8}[name]
    for step, code in ((-200, floor), (200, 126)):
        made = search_scales(w, name, candidates=[step])
        assert (made.scale == code).all()


def test_a_short_last_block_counts_its_own_elements_alone():
    scheme = replace(small("int3_g32"), name="partial", scale=replace(small("int3_g32").scale, partial=True))
    w, weights = (array[..., :12].copy() for array in matrix(8, 40, 16))
    w[:, 11] *= 3  # what would fill the block up
    made = search_scales(w, scheme, weights=weights)
    alone = search_scales(w[:, 8:].copy(), small("int3_g32", 4), weights=weights[8:].copy())
    assert_same_bits(made.scale[:, 1:], alone.scale)


def test_stored_rounding_counts():
    """Scales in bfloat16: errors are those of the scale as it is stored, and so is the result."""
    scheme = Scheme(name="bf16_scales", element="int4", scale=Scale(block=8, target=7.0, storage="bfloat16"))
    w, weights = matrix(1)
    tried = [choose_scales(clipped(np.abs(w), 1, r, 8), scheme) for r in default_candidates(scheme)]
    scale, _, _ = best_of(w, scheme, tried, weights)
    made = search_scales(w, scheme, weights=weights)
    assert made.scale.dtype == np.uint16
    assert_same_bits(made.scale, scale)


@settings(max_examples=15)
@given(st.integers(0, 10**6))
def test_local_hessians(seed):
    """d^T H_b d of a block, one block at a time."""
    scheme = small("nvfp4")
    w, _ = matrix(seed)
    x = np.random.default_rng(seed).standard_normal((50, 32))
    h = x.T @ x
    local = np.stack([h[b : b + 8, b : b + 8] for b in range(0, 32, 8)])
    made = search_scales(w, scheme, weights=local)
    base = choose_scales(w, scheme)

    def errors(scales):
        off = (dequantize(quantize(w, scheme, scales=scales)).astype(np.float64) - w).reshape(4, 4, 8)
        return np.array([[off[n, b] @ local[b] @ off[n, b] for b in range(4)] for n in range(4)])

    least = errors(base)
    for step in range(-6, 7):
        codes = np.clip(base.scale.astype(int) + step, 1, 126).astype(np.uint8)
        least = np.minimum(least, errors(Scales(codes, base.outer)))
    assert (errors(made) <= least * (1 + 1e-12)).all()
    diagonal = np.stack([np.diag(np.diag(block)) for block in local])
    assert_same_bits(
        search_scales(w, scheme, weights=diagonal).scale,
        search_scales(w, scheme, weights=np.diag(h).copy()).scale,
    )


@pytest.mark.parametrize(
    "name", ["fp8_tensorwise", "fp8_128x128", "int8_rowwise", "nf4", "te.nvfp4_16x16", "fp8_1x128"]
)
def test_scales_of_rows_tiles_and_tensors(name):
    """No block is worse than by the scales of `choose_scales`, and some are better; a short last block counts once."""
    w, weights = matrix(2, 160, 192)
    scheme = SCHEMES[name]
    made, base = search_scales(w, scheme, weights=weights), choose_scales(w, scheme)
    off = {
        key: ((dequantize(quantize(w, scheme, scales=scales)).astype(np.float64) - w) ** 2 * weights).sum()
        for key, scales in (("made", made), ("base", base))
    }
    assert off["made"] <= off["base"]
    for part in ("scale", "outer", "zero"):
        if getattr(base, part) is not None:
            assert getattr(made, part).shape == getattr(base, part).shape
            assert getattr(made, part).dtype == getattr(base, part).dtype


def test_rows_of_chunks_are_independent():
    """More rows than a chunk has; an outer scale that is given is kept."""
    w, weights = matrix(3, 40, 4096)
    for name, outer in (("nvfp4", np.asarray(F(0.001))), ("int4_g32", None), ("int8_rowwise", None)):
        made = search_scales(w, name, weights=weights, outer=outer)
        for rows in (slice(0, 3), slice(14, 18), slice(39, 40)):
            alone = search_scales(w[rows], name, weights=weights, outer=outer)
            assert_same_bits(alone.scale, made.scale[rows])
        if outer is not None:
            assert_same_bits(made.outer, outer)


def test_ties_and_zeros_keep_the_scale_of_choose_scales():
    w = np.zeros((2, 64), F)
    for name in ("nvfp4", "mxfp4", "int4_g32", "int4_g32_asymmetric"):
        made, base = search_scales(w, name), choose_scales(w, name)
        assert_same_bits(made.scale, base.scale)
        if base.zero is not None:
            assert_same_bits(made.zero, base.zero)
    # What the format holds exactly is never moved.
    w = dequantize(quantize(matrix(4)[0], "mxfp4"))
    assert_same_bits(dequantize(quantize(w, "mxfp4", scales=search_scales(w, "mxfp4"))), w)


def test_weights_move_scales_to_the_columns_that_count():
    w = np.full((1, 32), 0.1, F)
    w[0, 0] = 1.0
    weights = np.ones(32)
    weights[0] = 0
    kept = dequantize(quantize(w, "int4_g32", scales=search_scales(w, "int4_g32")))
    moved = dequantize(quantize(w, "int4_g32", scales=search_scales(w, "int4_g32", weights=weights)))
    assert abs(moved[0, 1] - 0.1) < abs(kept[0, 1] - 0.1)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_dtypes(dtype):
    """float64 is rounded to float32; records that compute in the input's dtype store what that gives."""
    w, weights = matrix(5)
    short = w.astype(dtype)
    for name in ("mxfp4", "torchao.int4_g32", "torchao.intx4_g32"):
        made = search_scales(short, name, weights=weights, candidates=[0] if name == "mxfp4" else [1.0])
        assert_same_bits(made.scale, choose_scales(short, name).scale)


def test_refusals_name_the_way_out():
    w, weights = matrix(6)
    cases = [
        ({"w": w.tolist()}, TypeError, "NumPy arrays, got list"),
        ({"w": np.where(w > 1, np.nan, w)}, ValueError, "finite weights"),
        ({"w": w[0]}, ValueError, "takes a matrix"),
        ({"scheme": "int4_g64"}, ValueError, "not divisible"),
        (
            {"scheme": replace(SCHEMES["mxfp4"], name="drawn", rounding="stochastic")},
            ValueError,
            "stochastically",
        ),
        ({"norm": 0}, ValueError, "norm is a positive number"),
        ({"norm": float("nan")}, ValueError, "norm is a positive number"),
        ({"weights": weights.tolist()}, TypeError, "float32 or float64, got list"),
        ({"weights": weights[:4]}, ValueError, r"shape \(32,\) or \(1, 32, 32\), got \(4,\)"),
        ({"weights": -weights}, ValueError, "0 or more"),
        ({"weights": weights * np.inf}, ValueError, "finite"),
        ({"weights": np.ones((1, 32, 32)), "norm": 1.0}, ValueError, "local Hessians take norm 2"),
        ({"candidates": []}, ValueError, "one step or ratio at least"),
        ({"candidates": [0.9]}, None, None),
        ({"candidates": [0, "1"]}, ValueError, "integers, steps of the stored code or ratios"),
        ({"candidates": [(0.9, 0.9)]}, ValueError, r"got \(0.9, 0.9\)"),
        ({"scheme": "int4_g32", "candidates": [0.0]}, ValueError, "ratios of the range, above 0"),
        ({"scheme": "int4_g32", "candidates": [True]}, ValueError, "ratios of the range"),
        (
            {"scheme": "int4_g32_asymmetric", "candidates": [(1, 1, 1)]},
            ValueError,
            "pairs of them for both ends",
        ),
        (
            {"w": matrix(6, 64, 256)[0], "weights": None, "scheme": "nf4", "candidates": [0.9]},
            ValueError,
            "integers",
        ),
        ({"outer": np.asarray(F(1))}, ValueError, "outer = none"),
        ({"scheme": "nvfp4", "outer": np.ones(3, F)}, ValueError, r"float32 of shape \(\)"),
    ]
    for changed, error, said in cases:
        arguments = {"w": w, "scheme": "mxfp4", "weights": weights, **changed}
        if error is None:
            search_scales(arguments.pop("w"), arguments.pop("scheme"), **arguments)
        else:
            refused(error, said, search_scales, arguments.pop("w"), arguments.pop("scheme"), **arguments)


@pytest.mark.parametrize("name", ["int4_g32", "mxfp4", "nvfp4", "int4_g32_asymmetric", "fp8_rowwise", "nf4"])
def test_the_largest_and_the_smallest_weights(name):
    """Finite weights have finite values and no warnings, whatever ratios and steps do to their ranges."""
    w = matrix(13, 2, 64)[0]
    largest = np.finfo(F).max
    for extreme in (np.where(w > 0, largest, -largest).astype(F), (w * F(1e-44)).astype(F)):
        scales = search_scales(extreme, name, weights=np.ones(64))
        values = dequantize(quantize(extreme, name, scales=scales))
        assert np.isfinite(values).all()
        off, before = (
            np.square(v.astype(np.float64) - extreme).sum()
            for v in (values, dequantize(quantize(extreme, name)))
        )
        assert off <= before
