"""Weights that a prepared call dequantizes have the reference's bits, and what that call is not for is left to others."""

from dataclasses import replace

import pytest
import torch

import fast
import reference
from fast.cpu import prepared_dequantize
from fast.cpu.prepared_dequantize import prepared
from tests.fast.cpu.test_dequantize import same_bits, stored

SHAPE = (136, 128)
#: Rows and groups, zero points, packed codes, floats with NaN and with infinities, scales rounded to the result's dtype.
RECORDS = ("int8_rowwise", "int4_g32_asymmetric", "fp8_rowwise_e5m2", "compressed_tensors.int8_channel")
#: Scales that are codes, two levels, a scale of scales.
CODED = ("mxfp8_e4m3", "nvfp4", "nf4")


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(prepared_dequantize, "SOON", 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", RECORDS)
def test_bits_are_the_reference_s(scheme, dtype):
    """Of large scales, and of small ones whose numbers are subnormal in bfloat16."""
    w = stored(scheme, SHAPE)
    for factor in (1.0, 2.0**-118):
        w = replace(w, scale=w.scale * factor)
        call = prepared(w, dtype)
        assert same_bits(call(w.codes, w.scale, None, w.zero), reference.dequantize(w, dtype))


def test_scales_that_leave_the_loop_s_range_are_the_reference_s():
    w = stored("fp8_rowwise", SHAPE)
    call = prepared(w, "bfloat16")
    for number in (float("nan"), float("inf"), 0.0, 2.0**125):
        scale = w.scale.clone()
        scale[3] = number
        assert call(w.codes, scale) is None
    codes = w.codes.clone()
    codes[5, 7] = 0x7F
    assert call(codes, w.scale) is None
    q = replace(w, codes=codes)
    for _ in range(2):  # prepared, then found
        got, want = fast.dequantize(q, torch.bfloat16), reference.dequantize(q, "bfloat16")
        assert torch.equal(got.isnan(), want.isnan())
        assert same_bits(got.nan_to_num(7.0), want.nan_to_num(7.0))


def test_what_changes_in_place_is_read_anew():
    w = stored("int8_rowwise", SHAPE)
    before = fast.dequantize(w, torch.bfloat16)
    w.scale.mul_(0.5)
    w.codes[0] = 3
    after = fast.dequantize(w, torch.bfloat16)
    assert not torch.equal(before, after)
    assert same_bits(after, reference.dequantize(w, "bfloat16"))


def test_what_the_loop_is_not_for_is_left_to_others():
    assert prepared(stored("int8_rowwise", (8, 128)), "bfloat16") is None  # soon done by torch
    assert prepared(stored("int8_rowwise", (512, 40)), "bfloat16") is None  # rows end within a step
    assert prepared(stored("int8_rowwise", SHAPE), "float16") is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", CODED)
def test_scales_that_are_codes(scheme, dtype):
    w = stored(scheme, SHAPE)
    call = prepared(w, dtype)
    assert same_bits(call(w.codes, w.scale, w.outer, w.zero), reference.dequantize(w, dtype))
