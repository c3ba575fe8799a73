"""The order of operations, where it decides: elements and scales within an ulp of a tie.

`x / s` and `x * (1 / s)` differ in the last bit of a quarter of all cases, which shows in a code only next to a tie. So these
inputs are built from ties: each test rebuilds the documented operations with NumPy's float32 and the casts of ml_dtypes, and
makes sure that another order would have given another answer.
"""

import ml_dtypes
import numpy as np
import pytest
import torch

from ao_lab.testing.strategies import assert_same_bits, ties
from reference import quantize

ONE = np.float32(1)
SEEDS = range(3)


def neighbours(values, rng):
    """float32 values moved by -1, 0 or 1 bit pattern, with random signs."""
    bits = np.abs(values).astype(np.float32).view(np.int32) + rng.integers(
        -1, 2, values.shape, dtype=np.int32
    )
    sign = np.where(rng.integers(0, 2, values.shape) == 0, -1, 1).astype(np.float32)
    return sign * np.maximum(bits, 0).view(np.float32)


def positive_ties(fmt):
    found = ties(fmt)
    return found[(found > 0) & (found < ties(fmt)[-1])]


def near_element_ties(fmt, scales, largest, rng):
    """One row per scale: ties of the format times the scale, then `largest` times the scale."""
    rows = neighbours(positive_ties(fmt) * scales.astype(np.float64)[:, None], rng)
    top = (largest * scales.astype(np.float64)).astype(np.float32)
    return np.concatenate([rows, top[:, None]], 1)


def random_scales(rng, count):
    return (rng.uniform(1, 2, count) * 2.0 ** rng.integers(-60, 60, count)).astype(np.float32)


def both_paths(x, name):
    """NumPy's path and the one of other devices."""
    q = quantize(x, name)
    general = quantize.__wrapped__(torch.from_numpy(x.copy()), name)
    assert_same_bits(general.codes, q.codes, inputs=x)
    return q


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("suffix", "element", "largest"), [("", "float8_e4m3fn", 448), ("_e5m2", "float8_e5m2", 57344)]
)
def test_default_multiplies_by_one_reciprocal(suffix, element, largest, seed):
    rng = np.random.default_rng(seed)
    x = near_element_ties(element, random_scales(rng, 500), largest, rng)
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(largest)
    want = (x * (ONE / scale)).astype(getattr(ml_dtypes, element))
    q = both_paths(x, f"fp8_rowwise{suffix}")
    assert_same_bits(q.scale, scale)
    assert_same_bits(q.codes, want.view(np.uint8), inputs=x)
    assert (want != (x / scale).astype(want.dtype)).any()


@pytest.mark.parametrize("seed", SEEDS)
def test_torchao_inference_divides(seed):
    rng = np.random.default_rng(seed)
    x = near_element_ties("float8_e4m3fn", random_scales(rng, 500), 448, rng)
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(448)
    q = both_paths(x, "torchao.fp8_rowwise_inference")
    assert_same_bits(q.codes, (x / scale).astype(ml_dtypes.float8_e4m3fn).view(np.uint8), inputs=x)


def nvfp4_tensor(rng, blocks):
    """(tensor (blocks, 16), outer scale): block maxima next to ties of e4m3 scales, elements next to ties of e2m1."""
    top = np.float32(rng.uniform(1, 2) * 2.0 ** int(rng.integers(-40, 40)))
    outer = top / np.float32(2688)
    choices = positive_ties("float8_e4m3fn")
    scales = rng.choice(choices[choices < 440], blocks)
    maxima = np.abs(neighbours(6 * scales * np.float64(outer), rng))
    stored = (maxima / np.float32(6) / outer).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    steps = rng.choice(positive_ties("float4_e2m1fn"), (blocks, 15))
    rest = neighbours(steps * (stored * np.float64(outer))[:, None], rng)
    x = np.concatenate([maxima[:, None], np.clip(rest, -maxima[:, None], maxima[:, None])], 1)
    x[0, 0] = top
    return x, outer


@pytest.mark.parametrize("seed", SEEDS)
def test_nvfp4_divides_by_the_outer_scale_and_takes_one_reciprocal(seed):
    rng = np.random.default_rng(seed)
    other_scale = other_codes = 0
    for _ in range(40):
        x, outer = nvfp4_tensor(rng, 400)
        ratio = np.abs(x).max(-1, keepdims=True) / np.float32(6)
        scale = np.maximum((ratio / outer).astype(ml_dtypes.float8_e4m3fn), ml_dtypes.float8_e4m3fn(2.0**-9))
        reciprocal = ONE / (outer * scale.astype(np.float32))
        want = (x * reciprocal).astype(ml_dtypes.float4_e2m1fn)
        q = both_paths(x, "nvfp4")
        assert_same_bits(q.outer, outer)
        assert_same_bits(q.scale, scale.view(np.uint8))
        assert_same_bits(q.codes, want.view(np.uint8), inputs=x)
        other_scale += (scale != (ratio * (ONE / outer)).astype(scale.dtype)).sum()
        other_codes += (want != (x * (ONE / outer / scale.astype(np.float32))).astype(want.dtype)).sum()
    assert other_scale > 0
    assert other_codes > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_zero_points_divide_by_the_scale(seed):
    """Rows whose minimum lies next to half an integer of scales below zero."""
    rng = np.random.default_rng(seed)
    scales = random_scales(rng, 20000).astype(np.float64)
    steps = rng.integers(0, 255, len(scales)) + 0.5
    low = -np.abs(neighbours(steps * scales, rng))
    x = np.stack([low, ((255 - steps) * scales).astype(np.float32)], 1)
    scale = (x[:, 1] - x[:, 0]) / np.float32(255)
    want = np.clip(-128 - np.rint(low / scale), -128, 127).astype(np.int8)
    q = both_paths(x, "int8_rowwise_asymmetric")
    assert_same_bits(q.scale[:, 0], scale)
    assert_same_bits(q.zero[:, 0], want, inputs=low)
    assert (want != np.clip(-128 - np.rint(low * (ONE / scale)), -128, 127)).any()
    codes = np.clip(np.rint(x * (ONE / scale)[:, None]) + want[:, None], -128, 127).astype(np.int8)
    assert_same_bits(q.codes, codes.view(np.uint8), inputs=x)
