"""What the host refuses before a kernel could read beyond an array; nothing is launched here."""

from dataclasses import replace

import pytest
import torch

import fast
from fast.kernels import quantizer


@pytest.mark.parametrize(
    ("scheme", "wrong"),
    [
        ("mxfp8_e4m3", {"scale": torch.zeros(4, 1, dtype=torch.uint8)}),
        ("mxfp8_e4m3", {"scale": torch.zeros(4, 2)}),
        ("nvfp4", {"outer": None}),
        ("int4_g32_asymmetric", {"zero": torch.zeros(1, dtype=torch.int8)}),
    ],
)
def test_scales_that_do_not_fit_are_left_to_the_reference(scheme, wrong):
    q = fast.quantize(torch.randn(4, 64, generator=torch.Generator().manual_seed(0)), scheme)
    assert quantizer.dequantize(replace(q, **wrong), "float32") is None
