"""`quantize` and `dequantize`: values against exact fractions, every shape, given scales, and what is refused.

The order of operations, where it decides: elements and scales within an ulp of a tie.

`x / s` and `x * (1 / s)` differ in the last bit of a quarter of all cases, which shows in a code only next to a tie. So these
inputs are built from ties: each test rebuilds the documented operations with NumPy's float32 and the casts of ml_dtypes, and
makes sure that another order would have given another answer.
"""

from dataclasses import replace
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from ao_lab.testing.strategies import (
    FINITE_KINDS,
    MAXIMA,
    assert_same_bits,
    assert_same_quantized,
    blocks,
    fill,
    float_arrays,
    shapes,
    ties,
)
from reference import SCHEMES, Scales, choose_scales, dequantize, quantize, quantize_both
from tests.support import exact_quantizers as truth
from tests.support.record_samples import NAMES, STRUCTURES, sampled
from tests.support.refusals import refused

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


def elements_both_paths(x, name):
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
    q = elements_both_paths(x, f"fp8_rowwise{suffix}")
    assert_same_bits(q.scale, scale)
    assert_same_bits(q.codes, want.view(np.uint8), inputs=x)
    assert (want != (x / scale).astype(want.dtype)).any()


@pytest.mark.parametrize("seed", SEEDS)
def test_torchao_inference_divides(seed):
    rng = np.random.default_rng(seed)
    x = near_element_ties("float8_e4m3fn", random_scales(rng, 500), 448, rng)
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(448)
    q = elements_both_paths(x, "torchao.fp8_rowwise_inference")
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
        q = elements_both_paths(x, "nvfp4")
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
    q = elements_both_paths(x, "int8_rowwise_asymmetric")
    assert_same_bits(q.scale[:, 0], scale)
    assert_same_bits(q.zero[:, 0], want, inputs=low)
    assert (want != np.clip(-128 - np.rint(low * (ONE / scale)), -128, 127)).any()
    codes = np.clip(np.rint(x * (ONE / scale)[:, None]) + want[:, None], -128, 127).astype(np.int8)
    assert_same_bits(q.codes, codes.view(np.uint8), inputs=x)


FINITE = [kind for kind in MAXIMA if kind not in ("nan", "infinity", "bits")]
FEW = settings(max_examples=40)
ONES = np.ones((2, 256), np.float32)


def finite_blocks(name, shape):
    return blocks(name, shape=shape, maxima=FINITE) | float_arrays("float32", shape, kinds=FINITE_KINDS)


def both_paths(x, name):
    """NumPy's fast paths, and the general rule as torch tensors on other devices run it."""
    quantized = quantize(x, name)
    general = quantize.__wrapped__(torch.from_numpy(x.copy()), name)
    assert_same_quantized(general, quantized, inputs=x)
    return quantized


@FEW
@given(finite_blocks("mxfp4", (3, 32)))
def test_mxfp4_equals_exact_fractions(x):
    q = both_paths(x, "mxfp4")
    for row, codes, scale in zip(x, q.codes, q.scale, strict=True):
        assert (codes.tolist(), int(scale[0])) == truth.mxfp4(row)


@FEW
@given(finite_blocks("fp8_rowwise", (2, 24)))
def test_fp8_rowwise_equals_exact_fractions(x):
    q = both_paths(x, "fp8_rowwise")
    for row, codes, scale in zip(x, q.codes, q.scale, strict=True):
        assert (codes.tolist(), Fraction(float(scale[0]))) == truth.fp8_rowwise(row)


@FEW
@given(finite_blocks("int8_rowwise_asymmetric", (2, 24)))
def test_int8_asymmetric_equals_exact_fractions(x):
    q = both_paths(x, "int8_rowwise_asymmetric")
    for row, codes, scale, zero in zip(x, q.codes, q.scale, q.zero, strict=True):
        assert (codes.tolist(), Fraction(float(scale[0])), int(zero[0])) == truth.int8_asymmetric(row)


@FEW
@given(finite_blocks("nvfp4", (2, 32)))
def test_nvfp4_equals_exact_fractions(x):
    q = both_paths(x, "nvfp4")
    codes, scales, outer = truth.nvfp4(x)
    assert q.codes.reshape(-1).tolist() == codes
    assert q.scale.reshape(-1).tolist() == scales
    assert Fraction(float(q.outer)) == outer


@FEW
@given(finite_blocks("fp8_rowwise", (2, 24)))
def test_dequantize_is_the_rounded_product(x):
    q = quantize(x, "fp8_rowwise")
    values = reference.decode(q.codes, "float8_e4m3fn")
    for row, scale, got in zip(values, q.scale, dequantize(q), strict=True):
        products = [truth.float32(Fraction(float(v)) * Fraction(float(scale[0]))) for v in row]
        # An overflow stops at the largest float.
        limited = [
            np.copysign(truth.LARGEST, v) if p is None else p for p, v in zip(products, row, strict=True)
        ]
        assert [Fraction(float(v)) for v in got] == limited


@pytest.mark.parametrize("name", sampled(STRUCTURES))
def test_every_shape_and_given_scales(name):
    """Scales chosen before and given again change nothing, for odd, empty and partial shapes."""

    @settings(max_examples=12)
    @given(st.data())
    def check(data):
        axis = data.draw(st.sampled_from([-1, 0]))
        x = data.draw(blocks(name, shape=shapes(name, axis=axis), axis=axis, dtype="bfloat16"))
        q = quantize(x, name, axis=axis)
        assert q.codes.shape == q.shape == x.shape == dequantize(q).shape
        scales = choose_scales(x, name, axis=axis)
        assert_same_bits(q.scales, scales)
        again = quantize(x, name, axis=axis, scales=scales)
        # The exact scale, before it was rounded for storage, is not kept.
        if SCHEMES[name].codes_from == "stored":
            assert_same_quantized(again, q, inputs=x)

    check()


@pytest.mark.parametrize(
    "name", ["mxfp4", "fp8_rowwise", "nvfp4", "int4_g32_asymmetric", "fp8_128x128", "nf4"]
)
def test_memory_layout_does_not_matter(name):
    wide = fill("normals", (64, 6, 256), seed=5)
    views = [wide[::2, 1], wide[::-1, 2, ::-1], wide.transpose(1, 2, 0)[:, ::2], np.asfortranarray(wide)]
    for view in views:
        assert_same_quantized(quantize(view, name), quantize(np.ascontiguousarray(view), name))
    tensor = torch.from_numpy(wide.copy()).permute(1, 2, 0)[:, ::2]
    expected = quantize(wide.transpose(1, 2, 0)[:, ::2], name)
    assert_same_quantized(quantize(tensor, name), expected)
    assert_same_quantized(quantize.__wrapped__(tensor, name), expected)


def test_read_only_input_is_left_alone():
    x = ONES.copy()
    x.setflags(write=False)
    quantize(x, "mxfp4")
    assert_same_bits(x, ONES)


def test_float64_is_rounded_to_float32_first():
    x = fill("normals", (4, 32), dtype="float64") * 2.0**-130
    x[0, :3] = [1e300, -1e300, 3.4028235677973366e38]
    with np.errstate(over="ignore"):
        narrow = np.clip(x, -np.finfo(np.float32).max, np.finfo(np.float32).max).astype(np.float32)
    assert_same_quantized(quantize(x, "int8_rowwise"), quantize(narrow, "int8_rowwise"))


def test_static_scales_saturate():
    scales = Scales(np.full((1, 1), 0.5, np.float32))
    q = quantize(np.array([[1000.0, -1000.0, 3.0, 0.26]], np.float32), "int8_rowwise", scales=scales)
    assert dequantize(q).tolist() == [[63.5, -64.0, 3.0, 0.5]]
    q = quantize(np.array([[1000.0, -1000.0]], np.float32), "fp8_rowwise", scales=scales)
    assert dequantize(q).tolist() == [[224.0, -224.0]]


def test_a_bare_array_is_a_block_scale():
    scale = np.full((2, 1), 0.25, np.float32)
    assert_same_quantized(
        quantize(ONES, "fp8_rowwise", scales=scale), quantize(ONES, "fp8_rowwise", scales=Scales(scale))
    )


@FEW
@given(blocks("nvfp4", shape=(2, 64), maxima=FINITE))
def test_outer_scale_alone(x):
    """A fixed outer scale, and block scales chosen with it."""
    whole = quantize(x, "nvfp4")
    assert_same_quantized(quantize(x, "nvfp4", scales=Scales(outer=whole.outer)), whole, inputs=x)
    other = quantize(x, "nvfp4", scales=Scales(outer=np.asarray(np.float32(0.5))))
    assert other.outer == np.float32(0.5)


WRONG_SCALES = {
    "shape": (
        "fp8_rowwise",
        np.ones((2,), np.float32),
        r"float32 of shape \(2, 1\).*got float32 of shape \(2,\)",
    ),
    "dtype": ("fp8_rowwise", np.ones((2, 1)), r"float32 of shape \(2, 1\).*got float64"),
    "codes": ("mxfp4", np.ones((2, 8), np.float32), r"uint8 of shape \(2, 8\).*got float32"),
    "library": ("fp8_rowwise", torch.ones(2, 1), "x's library"),
    "zero missing": (
        "int8_rowwise_asymmetric",
        np.ones((2, 1), np.float32),
        r"zero = int8 of shape \(2, 1\).*got none",
    ),
    "outer missing": ("nvfp4", np.ones((2, 16), np.uint8), r"outer = float32 of shape \(\).*got none"),
    "outer too much": (
        "mxfp4",
        Scales(np.ones((2, 8), np.uint8), outer=np.ones((), np.float32)),
        "outer = none",
    ),
    "empty": ("fp8_rowwise", Scales(), "scale = float32.*got none"),
}


@pytest.mark.parametrize("case", WRONG_SCALES)
def test_wrong_scales_are_refused(case):
    name, scales, message = WRONG_SCALES[case]
    refused(ValueError, f"scheme {name} takes.*{message}", quantize.__wrapped__, ONES, name, scales=scales)


def test_scales_of_another_type():
    with pytest.raises(TypeError, match=r"Scales or an array, got float; see choose_scales"):
        quantize(ONES, "fp8_rowwise", scales=0.5)


@pytest.mark.parametrize(
    "dtype", ["int32", "uint8", "bool", "complex64", ml_dtypes.float8_e4m3fn, ml_dtypes.int4]
)
@pytest.mark.parametrize("function", [quantize, choose_scales])
def test_other_dtypes_are_refused(function, dtype):
    with pytest.raises(TypeError, match=rf"{function.__name__} takes float32.*shape \(2, 32\); convert it"):
        function(np.zeros((2, 32), dtype), "mxfp4")
    if dtype == ml_dtypes.float8_e4m3fn:
        refused(TypeError, "convert it", function, torch.zeros(2, 32).to(torch.float8_e4m3fn), "mxfp4")


def test_unknown_schemes_name_the_nearest():
    refused(ValueError, r"unknown scheme 'mxfp5'; the nearest are .*mxfp4", quantize, ONES, "mxfp5")
    with pytest.raises(ValueError, match=r"unknown scheme 'torchao.mxfp4'; the nearest are .*torchao.mxfp4_"):
        choose_scales(ONES, "torchao.mxfp4")
    refused(TypeError, "by name or as a record, got int", quantize, ONES, 4)


def test_axes_and_shapes_that_are_refused():
    """The errors of `Blocks`, see test_blocks."""
    refused(ValueError, r"33 elements are not divisible", quantize, np.zeros((2, 33), np.float32), "mxfp4")
    refused(ValueError, r"two axes, got shape \(4,\)", quantize, np.zeros(4, np.float32), "fp8_128x128")
    refused(ValueError, r"axis 2 is outside a tensor of shape \(2, 256\)", quantize, ONES, "mxfp4", axis=2)
    refused(TypeError, "axis is an integer", quantize, ONES, "mxfp4", axis=True)


def test_dequantize_refuses():
    q = quantize(ONES, "mxfp4")
    with pytest.raises(ValueError, match=r"have shape \(2, 256\), got \(2, 128\);.*packed=True"):
        dequantize(replace(q, codes=q.codes[:, ::2]))
    refused(TypeError, "takes codes as uint8 or uint16, got float32", dequantize, replace(q, codes=ONES))
    refused(TypeError, r"takes a Quantized.*got an array of dtype uint8", dequantize, q.codes)
    with pytest.raises(
        ValueError, match=r"dtype is one of float32, bfloat16, float16, float64, as a name.*got 'int8'"
    ):
        dequantize(q, "int8")


def test_random_bits_belong_to_stochastic_rounding():
    words = np.zeros(ONES.shape, np.uint32)
    stochastic = replace(SCHEMES["mxfp4"], name="mine", rounding="stochastic")
    refused(ValueError, "takes no random_bits", quantize, ONES, "mxfp4", random_bits=words)
    refused(ValueError, "needs random_bits", quantize, ONES, stochastic)
    with pytest.raises(ValueError, match=r"one uint32 per element.*shape \(2, 256\); got uint8"):
        quantize(ONES, stochastic, random_bits=words.astype(np.uint8))
    x = np.full((1, 32), 4.5, np.float32)
    x[0, 0] = 6
    down = dequantize(quantize(x, stochastic, random_bits=words[:1, :32]))
    up = dequantize(quantize(x, stochastic, random_bits=~words[:1, :32]))
    assert (down[0, 1:] == 4).all()
    assert (up[0, 1:] == 6).all()
    # 4.5 lies a quarter of the way from 4 to 6: so many of evenly spread words round up.
    even = (np.arange(32, dtype=np.uint32) << 27)[None]
    assert (dequantize(quantize(x, stochastic, random_bits=even))[0] == 6).sum() in (8, 9)


@pytest.mark.parametrize("name", NAMES)
def test_variants_are_schemes(name):
    """A record made with `replace` works everywhere, under any name."""
    variant = replace(SCHEMES[name], name="mine")
    x = fill("normals", (64, 256), seed=6)
    q = quantize(x, variant)
    assert q.scheme is variant
    assert_same_bits(choose_scales(x, variant), q.scales)
    assert_same_bits(dequantize(q), dequantize(quantize(x, name)))


def test_a_variant_with_another_block_and_element():
    scheme = SCHEMES["mxfp4"]
    variant = replace(
        scheme, name="mine", element="float6_e2m3fn", scale=replace(scheme.scale, block=8, target=7.5)
    )
    x = fill("normals", (3, 24), seed=7)
    q = quantize(x, variant)
    assert q.scale.shape == (3, 3)
    error = np.abs(dequantize(q) - x).reshape(3, 3, 8)
    assert (error <= np.abs(x).reshape(3, 3, 8).max(-1, keepdims=True) / 16).all()


# `quantize_both` is `quantize` of a matrix and of its transpose, in every library.

X = fill("normals", (64, 96))
# Whole tensor, rows, blocks, tiles, e8m0, two levels, zero points; every one divides both axes.
BOTH_NAMES = [
    "fp8_tensorwise", "fp8_rowwise", "fp8_1x128", "fp8_128x128", "mxfp8_e4m3", "mxfp4", "nvfp4", "int4_g32_asymmetric", "nf4",
]  # fmt: skip


def expected(x, scheme, **options):
    return quantize(x, scheme, **options), quantize(np.ascontiguousarray(x.T), scheme, **options)


@settings(max_examples=30)
@given(
    x=float_arrays("float32", (32, 64)) | float_arrays("bfloat16", (32, 64)),
    name=st.sampled_from(BOTH_NAMES),
    packed=st.booleans(),
)
def test_rows_and_columns(x, name, packed):
    rows, columns = quantize_both(x, name, packed=packed)
    assert (rows.shape, columns.shape) == ((32, 64), (64, 32))
    assert rows.axis == columns.axis == 1
    for result, want in zip((rows, columns), expected(x, name, packed=packed), strict=True):
        assert_same_quantized(result, want, inputs=x)


@pytest.mark.parametrize("name", BOTH_NAMES)
def test_both_torch(name):
    tensor = torch.from_numpy(X.copy())
    result = quantize_both(tensor, name)
    for q, want in zip(result, expected(X, name), strict=True):
        assert_same_quantized(q, want)
        assert isinstance(q.codes, torch.Tensor)


@pytest.mark.parametrize("name", sampled({"fp8_128x128", "mxfp4"}, ["fp8_128x128", "mxfp4", "nvfp4"]))
def test_both_jax(name):
    """Compiled per copy, and both under the caller's jit and vmap."""
    array = jnp.asarray(X)
    batched = jax.jit(jax.vmap(lambda x: quantize_both(x, name)))(array[None])
    first = jax.tree.map(lambda leaf: leaf[0], batched)
    for result in (quantize_both(array, name), first):
        for q, want in zip(result, expected(X, name), strict=True):
            assert_same_quantized(q, want)


def test_stochastic_words_of_each_copy():
    record = replace(SCHEMES["mxfp4"], name="mxfp4_stochastic", rounding="stochastic")
    words = [reference.random_bits(shape, seed=1, stream=i) for i, shape in enumerate(((64, 96), (96, 64)))]
    rows, columns = quantize_both(X, record, random_bits=tuple(words))
    assert_same_quantized(rows, quantize(X, record, random_bits=words[0]))
    assert_same_quantized(columns, quantize(X.T, record, random_bits=words[1]))
    assert (rows.codes != columns.codes.T).any()
    refused(ValueError, "needs random_bits", quantize_both, X, record)
    refused(ValueError, r"shape \(96, 64\)", quantize_both, X, record, random_bits=(words[0], words[0]))


def test_given_scales_of_either_copy():
    given_rows = choose_scales(X / 2, "fp8_rowwise")
    given_columns = Scales(np.full((96, 1), 0.5, np.float32))
    rows, columns = quantize_both(X, "fp8_rowwise", scales=(given_rows, given_columns.scale))
    assert_same_quantized(rows, quantize(X, "fp8_rowwise", scales=given_rows))
    assert_same_quantized(columns, quantize(X.T, "fp8_rowwise", scales=given_columns))
    rows, columns = quantize_both(X, "fp8_rowwise", scales=(None, given_columns))
    assert_same_quantized(rows, quantize(X, "fp8_rowwise"))
    assert_same_bits(columns.scale, given_columns.scale)


def test_the_second_copy_is_not_made_from_the_first():
    once = quantize(reference.dequantize(quantize(X, "mxfp4")).T, "mxfp4")
    assert (once.codes != quantize_both(X, "mxfp4")[1].codes).any()


@pytest.mark.parametrize("shape", [(0, 32), (32, 0), (0, 0)])
def test_both_empty(shape):
    rows, columns = quantize_both(np.zeros(shape, np.float32), "mxfp4", packed=True)
    assert rows.codes.shape == (shape[0], shape[1] // 2)
    assert columns.codes.shape == (shape[1], shape[0] // 2)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: quantize_both(X[0], "mxfp4"), ValueError, r"a matrix \(M, K\), got float32 of shape \(96,\)"),
        (lambda: quantize_both(X[None], "mxfp4"), ValueError, r"shape \(1, 64, 96\)"),
        (lambda: quantize_both(X.astype(np.int32), "mxfp4"), TypeError, "int32"),
        (lambda: quantize_both(X[:, :80], "mxfp4"), ValueError, "not divisible by the block size 32"),
        (lambda: quantize_both(X[:33], "mxfp4"), ValueError, r"\(96, 33\)"),
        (lambda: quantize_both(X, "mxfp4", scales=Scales()), TypeError, "None or a pair.*got Scales"),
        (lambda: quantize_both(X, "mxfp4", scales=(None,)), TypeError, "scales is None or a pair"),
        (lambda: quantize_both(X, "mxfp4", random_bits=X), TypeError, "random_bits is None or a pair"),
    ],
)  # fmt: skip
def test_both_what_is_refused(call, error, words):
    refused(error, words, call)
