"""The code of zero, on which 2:4 storage of codes rests, and elements that are stored as they are."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
from ao_lab.testing.strategies import assert_same_bits, fill
from reference import SCHEMES, Scale, Scheme, dequantize, quantize
from reference.sparsity.stored_codes import (
    FROM_ZERO_POINT,
    PLAIN_ELEMENTS,
    is_plain,
    quantize_compressed,
    unit_scales,
    unsupported_reason,
    zero_code,
)

# `quantize_compressed` is quantization and compression, whose mask is chosen before anything is rounded.


def weights():
    return fill("normals", (8, 64)).copy()


@pytest.mark.parametrize("name", ["fp8_rowwise", "fp8_tensorwise_e5m2", "int8_rowwise", "mxfp8_e4m3"])
def test_codes_are_those_of_kept_elements(name):
    w = weights()
    scales = reference.choose_scales(w, name)
    made = quantize_compressed(w, name, scales)
    wanted = np.where(reference.prune(w), reference.quantize(w, name, scales=scales).codes, 0)
    assert_same_bits(reference.decompress(*made), wanted)


@pytest.mark.parametrize("name", ["fp8_rowwise", "fp8_tensorwise", "mxfp8_e4m3"])
def test_scales_are_those_of_the_dense_tensor(name):
    """What is pruned is never the largest of its block."""
    w = weights()
    pruned = np.where(reference.prune(w), w, np.float32(0))
    assert_same_bits(reference.choose_scales(w, name).scale, reference.choose_scales(pruned, name).scale)


def test_ties_of_codes_do_not_choose():
    """15 and 15.5 have one code of e4m3; the larger one stays."""
    w = np.array([[15.0, 15.5, 200.0, 0.0]], np.float32)
    made = quantize_compressed(w, "fp8_tensorwise", np.float32(1))
    assert made.metadata.tolist() == [[1 | 2 << 2]]


def test_masks_are_those_of_compress():
    w = weights()
    mask = reference.prune(w, pattern="1:4")
    q = reference.quantize(w, "fp8_rowwise")
    made = quantize_compressed(w, "fp8_rowwise", q.scale, mask)
    assert_same_bits(made.values, reference.compress(q.codes, mask).values)
    assert_same_bits(quantize_compressed(w * mask, "fp8_rowwise", q.scale, None), made)
    with pytest.raises(ValueError, match="are not zero"):
        quantize_compressed(w, "fp8_rowwise", q.scale, None)
    with pytest.raises(ValueError, match="pattern '2:4' only"):
        quantize_compressed(w, "fp8_rowwise", q.scale, "1:4")


STORED = [name for name, scheme in SCHEMES.items() if unsupported_reason(scheme) is None]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nf4", "flattened"),
        ("torchao.int4_g32_tinygemm", "floating-point numbers"),
        ("stretched2_g32", "zeros as other values"),
        ("torchao.fp8_rowwise_inference", "zeros as other values"),
    ],
)
def test_schemes_that_refill_zeros_are_refused(name, reason):
    assert reason in unsupported_reason(SCHEMES[name])
    with pytest.raises(ValueError, match=f"2:4 storage does not hold {name}.*int8_rowwise"):
        zero_code(SCHEMES[name])


def test_what_is_stored():
    assert {
        "int8_rowwise",
        "int4_g128",
        "int4_g128_asymmetric",
        "fp8_rowwise",
        "mxfp4",
        "nvfp4",
        "ternary_g32",
    } <= set(STORED)
    assert zero_code(SCHEMES["int4_g32_asymmetric"]) == FROM_ZERO_POINT


@given(st.sampled_from(STORED), st.integers(0, 2**32 - 1), st.floats(-30, 30))
def test_a_zero_has_its_code_in_every_block(name, seed, exponent):
    scheme = SCHEMES[name]
    draw = np.random.default_rng(seed)
    x = (draw.standard_normal((256, 256)) * 2.0**exponent).astype(np.float32)
    zeros = draw.random(x.shape) < 0.5
    x[zeros] = 0
    q = reference.quantize(x, scheme)
    assert (reference.dequantize(q)[zeros] == 0).all()
    if zero_code(scheme) == FROM_ZERO_POINT:
        count = 256 // q.zero.shape[-1] if q.zero.ndim else 256
        expected = np.repeat(q.zero, count, -1) if q.zero.ndim else np.broadcast_to(q.zero, x.shape)
        expected = expected.view(np.uint8) & (2**scheme.format.bits - 1)
        assert (q.codes[zeros] == expected[zeros]).all()
    else:
        assert (q.codes[zeros] == zero_code(scheme)).all()


@pytest.mark.parametrize("element", PLAIN_ELEMENTS)
def test_plain_elements_are_the_bits_of_every_number(element):
    scheme = PLAIN_ELEMENTS[element]
    bits = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    x = bits.view(ml_dtypes.bfloat16 if element == "bfloat16" else np.float16)
    q = reference.quantize(x, scheme, scales=unit_scales())
    numbers = ~np.isnan(x.astype(np.float32))
    assert (q.codes == bits)[numbers].all()
    assert (reference.dequantize(q, element).view(np.uint16) == bits)[numbers].all()
    assert np.isnan(reference.dequantize(q)[~numbers]).all()
    assert zero_code(scheme) == 0
    assert is_plain(replace(scheme, name="another"))
    assert not is_plain(SCHEMES["int8_rowwise"])


def test_an_empty_block_has_the_code_of_zero_too():
    """0 / 0 becomes `nan_code` where IEEE arithmetic decides; times the scale 0 its value is 0, but its code is another."""
    scale = Scale(block=4, target=6.0)
    scheme = Scheme(name="x", element="float4_e2m1fn", scale=scale, nan="ieee", nan_code=5, dequantize="ieee")
    q = quantize(np.zeros((1, 4), np.float32), scheme)
    assert q.codes.tolist() == [[5] * 4]
    assert not dequantize(q).any()
    assert unsupported_reason(scheme) == "it stores zeros as other values"
