"""The public strategies: what they promise, that they find faults and shrink them, and how a failure reads."""

import subprocess
import sys
from dataclasses import replace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st

from ao_lab import testing
from reference import FORMATS, SCHEMES, dequantize, encode, quantize

DTYPES = ["float32", "bfloat16", "float16", "float64"]
QUIET = settings(max_examples=300, database=None, derandomize=True, suppress_health_check=list(HealthCheck))


def widened(x):
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return x.astype(np.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", testing.KINDS)
def test_kinds_hold_what_they_say(kind, dtype):
    x = testing.fill(kind, (4096,), dtype=dtype, seed=1)
    assert x.dtype == np.dtype(getattr(ml_dtypes, dtype, dtype))
    testing.assert_same_bits(testing.fill(kind, (4096,), dtype=dtype, seed=1), x)
    wide, limits = widened(x), ml_dtypes.finfo(x.dtype)
    if kind not in ("normals", "ties", "near_ties"):
        assert {False, True} == set(np.signbit(wide).tolist())
    if kind in testing.FINITE_KINDS:
        assert np.isfinite(wide).all()
    if kind == "subnormals":
        assert ((np.abs(wide) > 0) & (np.abs(wide) < float(limits.smallest_normal))).all()
    if kind == "wide":
        assert (np.abs(wide) >= float(limits.smallest_normal)).all()
        assert len(np.unique(np.frexp(wide)[1])) > 25
    if kind == "largest":
        assert (np.abs(wide) > float(limits.max) * (1 - 5 * float(limits.eps))).all()
    if kind == "specials":
        assert np.isnan(wide).any()
        assert np.isinf(wide).any()


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float4_e2m1fn", "int4", "float8_e5m2"])
def test_ties_lie_half_way(name):
    values = FORMATS[name].values
    values = np.unique(values[np.isfinite(values)]).astype(np.float64)
    ties = testing.ties(name)
    below, above = values[np.searchsorted(values, ties[:-1]) - 1], values[np.searchsorted(values, ties[:-1])]
    np.testing.assert_array_equal(ties[:-1] - below, above - ties[:-1])
    x = testing.fill("near_ties", (512,), fmt=name).astype(np.float64)
    nearest = np.abs(x[:, None] - ties).min(1)
    assert ((nearest > 0) & (nearest <= np.maximum(np.abs(x) * 2.0**-23, 2.0**-149))).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_float_arrays(dtype):
    seen = set()

    @QUIET
    @given(testing.float_arrays(dtype, st.sampled_from([(), (0, 3), (5,), (2, 3)])))
    def collect(x):
        assert x.dtype == np.dtype(getattr(ml_dtypes, dtype, dtype))
        seen.add(x.shape)
        seen.update("nan" for v in widened(x).reshape(-1) if np.isnan(v))

    collect()
    assert {(), (0, 3), (5,), (2, 3), "nan"} <= seen


@pytest.mark.parametrize(
    "name", ["mxfp4", "fp8_128x128", "fp8_1x128", "nf4", "fp8_tensorwise", "torchao.nf4", "te.nvfp4_16x16"]
)
def test_shapes_suit_the_scheme(name):
    seen = set()

    @settings(QUIET, max_examples=60)
    @given(testing.shapes(name, axis=0))
    def collect(shape):
        assert quantize(np.zeros(shape, np.float32), name, axis=0).codes.shape == shape
        seen.add(shape)

    collect()
    assert len(seen) > 5
    assert any(0 in shape for shape in seen)


@pytest.mark.parametrize("maximum", testing.MAXIMA)
def test_blocks_have_the_maximum_asked_for(maximum):
    @settings(QUIET, max_examples=50)
    @given(testing.blocks("mxfp8_e4m3", shape=(6, 32), maxima=[maximum]))
    def check(x):
        assert x.shape == (6, 32)
        for block in x:
            top = np.abs(block).max()
            fraction = float(np.frexp(top)[0]) if np.isfinite(top) else 0.0
            assert {
                "zero": top == 0,
                "power": abs(np.log2(max(fraction, 0.25)) % 1 - 0.5) > 0.49999,
                "target": abs(fraction - 448 / 512) < 1e-6 or fraction > 0.99999,
                "subnormal": 0 < top < 2.0**-126,
                "largest": top > 3.40282e38,
                "wide": np.isfinite(top) and top >= 2.0**-126,
                "nan": np.isnan(block).sum() == 1,
                "infinity": np.isinf(block).sum() == 1,
                "bits": True,
            }[maximum]

    check()


def test_faults_are_found_and_shrunk():
    """Kernels with one wrong rule each, and how small the failing input becomes."""

    def breaks(wrong):
        def differs(x):
            return quantize(x, "mxfp4").codes.tobytes() != quantize(x, wrong).codes.tobytes()

        return differs

    for change in ({"rounding": "nearest_away"}, {"rounding": "toward_zero"}, {"smallest_exponent": -126}):
        wrong = replace(SCHEMES["mxfp4"], **change)
        x = find(testing.blocks("mxfp4", shape=(2, 32)), breaks(wrong), settings=QUIET)
        assert breaks(wrong)(x)
    single = find(testing.float_arrays("float32", (8,)), lambda x: bool(np.isnan(x).any()), settings=QUIET)
    assert np.isnan(single).sum() == 1
    assert (single[~np.isnan(single)] == 0).all()


def test_own_kernel_example():
    """The example of the module text, with a kernel that is right."""

    @settings(max_examples=30)
    @given(testing.blocks("mxfp4", dtype="bfloat16"))
    def test_my_kernel(x):
        expected = quantize(x, "mxfp4")
        mine = quantize.__wrapped__(torch.from_numpy(x.view("int16").copy()).view(torch.bfloat16), "mxfp4")
        testing.assert_same_bits(mine.codes, expected.codes, inputs=x)
        testing.assert_same_bits(mine.scale, expected.scale)

    test_my_kernel()


def test_message_shows_index_bits_and_count():
    x = np.array([[1.0, -0.0], [np.nan, 448]], np.float32)
    got = encode(x, "float8_e4m3fn")
    wrong = got.copy()
    wrong[0, 1], wrong[1, 1] = 0, 0x7F
    with pytest.raises(AssertionError) as caught:
        testing.assert_same_bits(wrong, got, inputs=x)
    assert str(caught.value).splitlines() == [
        "array: 2 of 4 elements differ (uint8, shape (2, 2))",
        "  (0, 1): got 0x00, expected 0x80, input 0x80000000 (-0.0)",
        "  (1, 1): got 0x7f, expected 0x7e, input 0x43e00000 (448.0)",
    ]


def test_bits_count_not_values():
    for one, two in ((0.0, -0.0), (np.nan, -np.nan)):
        with pytest.raises(AssertionError, match="1 of 1 elements differ"):
            testing.assert_same_bits(np.float32(one), np.float32(two))
    quiet, other = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    testing.assert_same_bits(quiet, quiet)
    with pytest.raises(AssertionError, match="got 0x7fc00001"):
        testing.assert_same_bits(other, quiet)


def test_long_lists_are_cut():
    with pytest.raises(AssertionError, match=r"100 of 100 elements differ(.|\n)*and 92 more"):
        testing.assert_same_bits(np.zeros(100), np.ones(100))


def test_shape_and_dtype_count():
    with pytest.raises(
        AssertionError, match=r"got float32 of shape \(2,\), expected float32 of shape \(1, 2\)"
    ):
        testing.assert_same_bits(np.zeros(2, np.float32), np.zeros((1, 2), np.float32))
    with pytest.raises(AssertionError, match="got float16 of shape"):
        testing.assert_same_bits(np.zeros(2, np.float16), np.zeros(2, ml_dtypes.bfloat16))
    with pytest.raises(AssertionError, match="got None, expected float64 array"):
        testing.assert_same_bits(None, np.zeros(2))


def test_libraries_mix():
    x = testing.fill("bits", (3, 5))
    for other in (torch.from_numpy(x), jnp.asarray(x)):
        testing.assert_same_bits(other, x)
    half = testing.fill("bits", (3, 5), dtype="bfloat16")
    testing.assert_same_bits(torch.from_numpy(half.view(np.int16)).view(torch.bfloat16), jnp.asarray(half))


def test_quantized_are_compared_by_part():
    x = testing.fill("normals", (2, 32))
    q = quantize(x, "nvfp4")
    testing.assert_same_quantized(quantize(torch.from_numpy(x), "nvfp4"), q)
    changed = replace(q, scale=q.scale + np.uint8(1), axis=0)
    with pytest.raises(AssertionError, match=r"scale: 4 of 4 elements differ(.|\n)*axis: got 0, expected 1"):
        testing.assert_same_quantized(changed, q)
    with pytest.raises(AssertionError, match="scheme: got Scheme"):
        testing.assert_same_quantized(replace(q, scheme=SCHEMES["mxfp4"]), q)
    with pytest.raises(TypeError, match="two Quantized, got ndarray"):
        testing.assert_same_quantized(dequantize(q), q)


def test_hypothesis_is_imported_only_here():
    code = "import sys, ao_lab; assert 'hypothesis' not in sys.modules; ao_lab.testing.strategies; "
    code += "assert 'hypothesis' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
