"""Rows that are quantized some at a time have the reference's bits."""

import pytest
import torch

import fast
import reference
from fast.cpu import fake_quantize as by_rows
from reference import SCHEMES
from tests.fast.cpu.test_decoder import normal, same_bits

SOME = (
    "int8_rowwise",
    "int8_rowwise_asymmetric",
    "fp8_rowwise",
    "mxfp8_e4m3",
    "mxfp4",
    "nvfp4",
    "fp8_tensorwise",
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", SOME)
def test_bits_are_the_reference_s(scheme, dtype, monkeypatch):
    monkeypatch.setattr(by_rows, "PART", 3 * 64)
    x = normal(2, 5, 64).to(dtype)
    x[0, 1, 3], x[1, 2, 5], x[1, 4] = float("nan"), float("inf"), 0.0
    x[0, 3, ::2] = -0.0
    want = reference.fake_quantize(x, scheme)
    got = by_rows.fake_quantize(x, SCHEMES[scheme], -1)
    assert torch.equal(got.isnan(), want.isnan())
    assert same_bits(got.nan_to_num(7.0), want.nan_to_num(7.0))
    assert same_bits(fast.fake_quantize(x, scheme).nan_to_num(7.0), want.nan_to_num(7.0))


def test_blocks_along_other_axes_are_left_to_the_reference():
    assert by_rows.fake_quantize(normal(128, 128), SCHEMES["fp8_128x128"], -1) is None
    assert by_rows.fake_quantize(normal(64, 64), SCHEMES["int8_rowwise"], 0) is None
