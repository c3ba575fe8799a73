"""`choose_scales`: rules of scales against exact fractions, the edges of default schemes; and statistics of blocks."""

from dataclasses import replace
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from ao_lab.testing.strategies import FINITE_KINDS, MAXIMA, assert_same_bits, blocks, fill, float_arrays
from reference import SCHEMES, Scale, Scheme, choose_scales
from reference.arrays.namespace import namespace_of
from reference.quantize.scales import absmax, mean, tree_sum, value_range, with_zero
from tests.support.exact_quantizers import LARGEST, float32, floor_log2, power

FINITE = [kind for kind in MAXIMA if kind not in ("nan", "infinity", "bits")]
TARGETS = {
    "float4_e2m1fn": 6,
    "float6_e2m3fn": 7.5,
    "float6_e3m2fn": 28,
    "float8_e4m3fn": 448,
    "float8_e5m2": 57344,
}
MANTISSA = {"float4_e2m1fn": 1, "float6_e2m3fn": 3, "float6_e3m2fn": 2, "float8_e4m3fn": 3, "float8_e5m2": 2}
FEW = settings(max_examples=60)


def largest_of(block):
    return max(Fraction(float(abs(v))) for v in block)


def ceil_log2(value):
    e = floor_log2(value)
    return e if power(e) == value else e + 1


def exponent(rule, largest, element):
    """The definitions in `Scale`, in exact arithmetic."""
    target = Fraction(TARGETS[element])
    if rule == "floor":
        return floor_log2(largest) - floor_log2(target)
    if rule == "ceil":
        return ceil_log2(largest) - floor_log2(target)
    if rule == "rceil":
        return ceil_log2(largest / target)
    # even: the maximum rounded to the element's mantissa bits first, ties away from zero; a subnormal's
    # bits count from 2**-126.
    quantum = power(max(floor_log2(largest), -126) - MANTISSA[element])
    return floor_log2((largest / quantum + Fraction(1, 2)).__floor__() * quantum or largest) - floor_log2(
        target
    )


@pytest.mark.parametrize("element", TARGETS)
@pytest.mark.parametrize("rule", ["floor", "ceil", "rceil", "even"])
def test_power_of_two_rules(rule, element):
    scale = Scale(block=8, target=float(TARGETS[element]), rule=rule, storage="float8_e8m0fnu")
    scheme = Scheme(name="mine", element=element, scale=scale)

    @FEW
    @given(blocks(scheme, shape=(6, 8), maxima=FINITE))
    def check(x):
        for block, code in zip(x, choose_scales(x, scheme).scale[:, 0], strict=True):
            largest = largest_of(block)
            e = exponent(rule, largest, element) if largest else -127
            assert int(code) - 127 == min(max(e, -127), 127), largest

    check()


@FEW
@given(blocks("fp8_rowwise", shape=(6, 8), maxima=FINITE))
def test_ratio_is_correctly_rounded_with_a_floor(x):
    for block, scale in zip(x, choose_scales(x, "fp8_rowwise").scale[:, 0], strict=True):
        assert Fraction(float(scale)) == max(float32(largest_of(block) / 448), power(-126))


@FEW
@given(blocks("fp8_rowwise", shape=(6, 8), maxima=FINITE))
def test_ratio_pow2_rounds_up(x):
    base = SCHEMES["fp8_rowwise"]
    scheme = replace(base, name="mine", scale=replace(base.scale, rule="ratio_pow2"))
    for block, scale in zip(x, choose_scales(x, scheme).scale[:, 0], strict=True):
        ratio = float32(largest_of(block) / 448)
        want = power(ceil_log2(ratio)) if ratio else 0
        assert Fraction(float(scale)) == max(want, power(-126))


@FEW
@given(blocks("fp8_rowwise", shape=(6, 8), maxima=FINITE))
def test_encoding_scales(x):
    """target / max, with a power of two rounded down: neither overflows."""
    base = SCHEMES["fp8_rowwise"]
    for rule in ("ratio", "ratio_pow2"):
        record = replace(base.scale, rule=rule, stored="encode", floor=("statistic", 2.0**-100))
        scheme = replace(base, name="mine", scale=record, apply="encode")
        for block, scale in zip(x, choose_scales(x, scheme).scale[:, 0], strict=True):
            ratio = float32(448 / max(largest_of(block), power(-100)))
            assert Fraction(float(scale)) == (ratio if rule == "ratio" else power(floor_log2(ratio)))


@FEW
@given(blocks("int8_rowwise", shape=(6, 8), dtype="bfloat16", maxima=FINITE))
def test_ratio_in_the_inputs_own_dtype(x):
    base = SCHEMES["int8_rowwise"]
    scheme = replace(base, name="mine", scale=replace(base.scale, compute="input", floor=None))
    largest = np.abs(x).max(-1, keepdims=True).astype(np.float32)
    want = (largest / np.float32(127)).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert_same_bits(choose_scales(x, scheme).scale, want, inputs=x)


@FEW
@given(blocks("int4_g32_asymmetric", shape=(4, 32), maxima=FINITE))
def test_ranges_hold_zero(x):
    scales = choose_scales(x, "int4_g32_asymmetric")
    for block, scale, zero in zip(x, scales.scale[:, 0], scales.zero[:, 0], strict=True):
        low, high = min(0.0, *block.tolist()), max(0.0, *block.tolist())
        width = float32(Fraction(high) - Fraction(low))
        assert Fraction(float(scale)) == max(
            float32((width or (LARGEST if high > low else 0)) / 15), power(-126)
        )
        assert -8 <= zero <= 7


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int4_g32", "int4_g32_asymmetric", "fp8_rowwise", "nf4"])
def test_zero_blocks_store_zeros(name):
    from reference import dequantize, quantize

    x = np.zeros((4, 64), np.float32)
    q = quantize(x, name)
    assert_same_bits(dequantize(q), x)
    assert np.isfinite(choose_scales(x, name).scale.astype(np.float32)).all()


def test_nan_and_infinity_make_a_house_scale_nan():
    x = fill("normals", (3, 32))
    x[0, 3], x[1, 3] = np.nan, -np.inf
    assert choose_scales(x, "mxfp4").scale[:2, 0].tolist() == [255, 255]
    assert choose_scales(x, "mxfp4").scale[2, 0] < 255
    assert choose_scales(x, "nvfp4").scale[:2, 0].tolist() == [0x7F, 0x7F]
    assert np.isfinite(choose_scales(x, "nvfp4").outer)
    rows = choose_scales(x, "int8_rowwise").scale[:, 0].view(np.uint32)
    assert rows[:2].tolist() == [0x7FC00000, 0x7FC00000]


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_shapes_along_an_axis(axis):
    x = fill("normals", (32, 64, 96))
    moved = choose_scales(np.ascontiguousarray(np.moveaxis(x, axis, -1)), "mxfp4").scale
    assert_same_bits(choose_scales(x, "mxfp4", axis=axis).scale, np.moveaxis(moved, -1, axis))


# Maxima, minima and the mean of block scales, in every library.

NUMPY = namespace_of(np.zeros(1))


def plain_mean(values):
    """The documented order with NumPy's own operators: halved pairs in a tree over zeros up to a power of two."""
    size = 1 << max(len(values) - 1, 0).bit_length()
    tree = np.concatenate([values, np.zeros(size - len(values), np.float32)])
    with np.errstate(all="ignore"):
        while len(tree) > 1:
            tree = tree[0::2] * np.float32(0.5) + tree[1::2] * np.float32(0.5)
        return tree / np.float32(len(values) / size)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 64, 100, 257])
def test_mean_in_every_library(count):
    """Of each length one program, for all kinds of numbers."""
    jitted = jax.jit(lambda x: mean(namespace_of(x), x, finite_only=False))
    for kind in ("normals", "subnormals", "wide", "largest", "zeros"):
        values = np.abs(fill(kind, (count,), seed=count))
        want, bits = plain_mean(values).view(np.int32), values.view(np.int32)
        assert_same_bits(mean(NUMPY, bits, finite_only=False), want)
        tensor = torch.from_numpy(bits.copy())
        assert_same_bits(mean(namespace_of(tensor), tensor, finite_only=False), want)
        assert_same_bits(jitted(jnp.asarray(bits)), want)


def test_mean_with_specials():
    bits = np.array([1, 2, np.inf, np.nan], np.float32).view(np.int32)
    assert mean(NUMPY, bits, finite_only=True).view(np.float32) == 0.75
    assert mean(NUMPY, bits, finite_only=False) == 0x7FC00000
    assert mean(NUMPY, bits[:3], finite_only=False) == 0x7F800000


@settings(max_examples=100)
@given(float_arrays("float32", (3, 9), kinds=FINITE_KINDS))
def test_ranges(x):
    bits = x.view(np.int32)
    span = value_range(NUMPY, bits)
    np.testing.assert_array_equal(absmax(NUMPY, bits).view(np.float32), np.abs(x).max(-1, keepdims=True))
    np.testing.assert_array_equal(span.low.view(np.float32), x.min(-1, keepdims=True))
    np.testing.assert_array_equal(span.high.view(np.float32), x.max(-1, keepdims=True))
    wide = with_zero(NUMPY, span)
    np.testing.assert_array_equal(wide.low.view(np.float32), np.minimum(x.min(-1, keepdims=True), 0))
    np.testing.assert_array_equal(wide.high.view(np.float32), np.maximum(x.max(-1, keepdims=True), 0))
    assert not (wide.low == -(2**31)).any()
    assert not (wide.high == -(2**31)).any()


def test_nan_shows_in_every_statistic():
    x = np.array([[1, -np.nan, 3]], np.float32).view(np.int32)
    assert (absmax(NUMPY, x) > 0x7F800000).all()
    span = with_zero(NUMPY, value_range(NUMPY, x))
    assert span.low == span.high == 0x7FC00000
    assert absmax(NUMPY, x, finite_only=True).view(np.float32) == 3


def plain_sum(x):
    size = 1 << max(x.shape[-1] - 1, 0).bit_length()
    tree = np.concatenate([x, np.zeros((len(x), size - x.shape[-1]), np.float32)], -1)
    with np.errstate(all="ignore"):
        while tree.shape[-1] > 1:
            tree = tree[:, 0::2] + tree[:, 1::2]
    return np.where(np.isnan(tree), np.float32(np.nan), tree)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 7, 64, 100])
def test_sums_of_adjacent_pairs_in_every_library(length):
    """Of each length one program; step by step each addition would be some hundred of them."""
    jitted = jax.jit(lambda x: tree_sum(namespace_of(x), x))
    for kind in ("normals", "wide", "subnormals", "largest"):
        x = fill(kind, (4, length), seed=length)
        want, bits = plain_sum(x).view(np.int32), x.view(np.int32)
        tensor = torch.from_numpy(bits.copy())
        for got in (tree_sum(NUMPY, bits), tree_sum(namespace_of(tensor), tensor), jitted(jnp.asarray(bits))):
            assert_same_bits(got, want)
