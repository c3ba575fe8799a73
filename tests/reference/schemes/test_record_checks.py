"""Records that mean nothing are refused when they are made, with the rule and the way out; and odd but sound ones work."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import ao_lab
import reference
from reference import SCHEMES, Scales, Zero
from reference.formats.rounding import MODES
from reference.formats.storage import storage_dtype

X = np.random.default_rng(0).standard_normal((8, 512)).astype(np.float32)
SCALE_FIELDS = [
    ({"block": 0}, "block is"), ({"block": (0, 4)}, "block is"), ({"block": "flat:0"}, "block is"),
    ({"block": -2}, "block is"), ({"block": (1, -1)}, "block is"), ({"block": "row"}, "block is"),
    ({"block": [32, 32]}, "block is"), ({"block": 32.0}, "block is"), ({"block": (1, 2, 3)}, "block is"),
    ({"storage": "float64"}, "nearest are"),
    ({"target": 0}, "target"), ({"target": float("nan")}, "target"), ({"target": 1e-50}, "target"),
    ({"target": 1e60}, "target"), ({"floor": ("scael", 1.0)}, "floor is one of"),
    ({"floor": ("stored", 0.0)}, "positive number"), ({"floor": ("scale", "small")}, "tiny"),
    ({"storage": "float8_e4m3fn"}, "value of its storage"),
    ({"storage": "float8_e4m3fn", "floor": ("stored", "eps")}, "'eps' is a name"), ({"rule": "floor"}, "ratio_pow2"),
    ({"rule": "flor"}, "rule is one of"), ({"statistic": "max"}, "statistic is one of"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "words"), SCALE_FIELDS)
def test_scale_fields(fields, words):
    with pytest.raises(ValueError, match=words):
        replace(SCHEMES["fp8_rowwise"].scale, **fields)


def with_scale(name, **fields):
    return replace(SCHEMES[name], scale=replace(SCHEMES[name].scale, **fields))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: replace(SCHEMES["mxfp8_e4m3"], overflow="bogus"), "overflow is one of"),
        # What `fake_quantize_vjp` marks saturated elements with is its own business.
        (
            lambda: replace(SCHEMES["mxfp8_e4m3"], overflow="mark"),
            "overflow is one of saturate, nonfinite, inf, nan;",
        ),
        (lambda: replace(SCHEMES["mxfp8_e4m3"], overflow="inf"), "no code for overflow"),
        (lambda: replace(SCHEMES["mxfp4"], overflow="nonfinite"), "no code for overflow"),
        (lambda: replace(SCHEMES["mxfp4"], rounding="bogus"), "rounding to float4_e2m1fn is one of"),
        (lambda: replace(SCHEMES["nf4"], rounding="up"), "rounding to nf4"),
        (lambda: replace(SCHEMES["torchao.nf4"], rounding="stochastic"), "rounding to nf4_torchao"),
        (lambda: replace(SCHEMES["mxint8"], zero=Zero()), "zero point needs"),
        (lambda: replace(SCHEMES["int4_g32_asymmetric"], element="float8_e4m3fn"), "zero point needs"),
        (lambda: replace(SCHEMES["int8_rowwise_asymmetric"], element="uint8"), "signed element"),
        (lambda: replace(SCHEMES["mxfp4"], outer=SCHEMES["nvfp4"].outer), "no outer scale"),
        (lambda: replace(SCHEMES["mxfp4"], element="float4"), "nearest are"),
        (lambda: with_scale("mxfp4", storage="float8_e4m3fn"), "float8_e8m0fnu"),
        (lambda: with_scale("fp8_rowwise", storage="int8"), "outer scale"),
        (lambda: with_scale("nf4", storage="float32"), "scales that are codes"),
        (lambda: replace(SCHEMES["int8_g32_asymmetric"], element="mxint8"), "binary point; use int8"),
    ],
)
def test_scheme_fields(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    "record",
    [
        with_scale("mxfp8_e4m3", block=16, rule="rceil"),
        with_scale("fp8_rowwise", rule="ratio_pow2"),
        with_scale("fp8_rowwise", storage="float8_e8m0fnu", floor=None, rule="ratio_pow2"),
        with_scale("int8_rowwise", block=(4, 64)),
        replace(SCHEMES["int4_g32_asymmetric"], element="uint4"),
    ],
    ids=["mx16", "pow2", "e8m0", "tiles", "unsigned"],
)
def test_variants_work(record):
    """Signal to noise of a sound variant is that of its bits: above 16 dB for four bits, 25 for eight."""
    error = reference.fake_quantize(X, record) - X
    decibel = 10 * np.log10((X**2).sum() / (error**2).sum())
    assert decibel > (16 if record.format.bits == 4 else 25)


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_every_rounding_mode_counts(name):
    """In every scheme: random words move codes, and the directed modes differ from nearest; codebooks refuse them."""
    x = np.tile(X, (4, 1))
    if SCHEMES[name].format.kind == "codebook":
        with pytest.raises(ValueError, match="rounding"):
            replace(SCHEMES[name], rounding="stochastic")
        return
    low, high = np.zeros(x.shape, np.uint32), np.full(x.shape, 2**32 - 1, np.uint32)
    stochastic = replace(SCHEMES[name], rounding="stochastic")
    codes = [reference.quantize(x, stochastic, random_bits=words).codes for words in (low, high)]
    truncated = reference.quantize(x, replace(SCHEMES[name], rounding="toward_zero")).codes
    assert np.array_equal(codes[0], truncated)
    assert (codes[0] != codes[1]).mean() > 0.1
    for mode in set(MODES) - {"stochastic", "nearest_even", "nearest_away"}:
        other = reference.quantize(x, replace(SCHEMES[name], rounding=mode)).codes
        assert (other != reference.quantize(x, name).codes).any(), mode


@pytest.mark.parametrize("name", [name for name in SCHEMES if "." not in name and name != "nf4"])
def test_given_scales_of_zero_make_no_nan(name):
    if SCHEMES[name].scale.power_of_two:
        return
    scales = reference.choose_scales(X, name)
    zero = Scales(
        np.zeros_like(scales.scale),
        None if scales.outer is None else np.zeros_like(scales.outer),
        scales.zero,
    )
    assert np.isfinite(reference.dequantize(reference.quantize(X * 0, name, scales=zero))).all()
    assert np.isfinite(reference.dequantize(reference.quantize(X, name, scales=zero))).all()


def test_plain_objects_as_scales_are_refused():
    for scales in (Scales(0.5), Scales([0.5] * 8), 0.5):
        with pytest.raises((ValueError, TypeError), match="choose_scales"):
            reference.quantize(X, "fp8_rowwise", scales=scales)
    with pytest.raises(ValueError, match="one uint32 per element"):
        reference.quantize(X, replace(SCHEMES["mxfp4"], rounding="stochastic"), random_bits=[1])


def test_fake_quantization_takes_random_bits_as_quantize_does():
    record = replace(SCHEMES["mxfp4"], rounding="stochastic")
    bits = reference.random_bits(X.shape, seed=0)
    for call, words in (
        (lambda: reference.fake_quantize(X, record), "needs random_bits"),
        (lambda: reference.fake_quantize_vjp(X, X, record), "needs random_bits"),
        (lambda: reference.fake_quantize(X, "mxfp4", random_bits=bits), "takes no random_bits"),
        (lambda: reference.fake_quantize_vjp(X, X, "mxfp4", random_bits=bits), "takes no random_bits"),
        (lambda: reference.fake_quantize(X, record, random_bits=bits[:1]), "one uint32 per element"),
        (lambda: reference.fake_quantize_vjp(X, X, record, random_bits=bits[:1]), "one uint32 per element"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_integer_storage_goes_by_kind():
    """Two's complement of any name is kept as int8; unsigned integers and everything else as unsigned codes."""
    kept = {
        name: storage_dtype(name)
        for name in ("int8", "int8_nan", "mxint8", "uint8", "float8_e4m3fn", "bfloat16", "float32")
    }
    assert kept == {"int8": "int8", "int8_nan": "int8", "mxint8": "int8", "uint8": "uint8", "float8_e4m3fn": "uint8",
                    "bfloat16": "uint16", "float32": "float32"}  # fmt: skip


def test_second_level_that_does_not_divide_names_the_tensor():
    with pytest.raises(ValueError, match=r"tensor of shape \(8, 512\) has 64 scales"):
        reference.quantize(X, "torchao.nf4")


def test_axis_may_be_numpys_integer_but_no_float():
    q = reference.quantize(X, "mxfp4", axis=np.int64(1))
    assert q.axis == 1
    import jax.numpy as jnp

    reference.quantize(jnp.asarray(X), "mxfp4", axis=1)
    for axis in (1.0, True):
        with pytest.raises(TypeError, match="axis is an integer"):
            reference.quantize(jnp.asarray(X), "mxfp4", axis=axis)


def test_quantized_tensors_are_compared_by_identity():
    q = reference.quantize(X, "mxfp4")
    assert q == q
    assert q != reference.quantize(X, "mxfp4")
    assert len({q, q}) == 1


def test_ao_lab_fake_quantize_takes_part_in_autograd():
    x = torch.from_numpy(X.copy()).requires_grad_()
    ao_lab.fake_quantize(x, "int8_rowwise").sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    assert np.array_equal(ao_lab.fake_quantize(X, "mxfp4"), reference.fake_quantize(X, "mxfp4"))


def test_float64_under_jax_without_x64_is_refused():
    import jax.numpy as jnp

    q = reference.quantize(jnp.asarray(X), "mxfp4")
    with pytest.raises(ValueError, match="jax_enable_x64"):
        reference.dequantize(q, "float64")
