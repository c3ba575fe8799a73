"""Weights times a power of two in place: scales change and codes stay."""

import pytest
import torch

from ao_lab import quantized
from tests.support.quantized_weights import same, weight

SCHEMES = (
    "int8_rowwise", "int4_g32_asymmetric", "int4_g32_bf16", "mxfp4", "nvfp4", "nf4", "ternary_g32",
    "torchao.fp8_rowwise_training", "torchao.int4_g32_tinygemm", "compressed_tensors.nvfp4",
)  # fmt: skip


@pytest.mark.parametrize("scheme", SCHEMES)
def test_powers_of_two(scheme):
    t = quantized(weight(128, 256, seed=1), scheme)
    dense, codes = t.dequantize(), t.codes.clone()
    t.div_(4)
    assert same(t.dequantize(), dense / 4)
    t.mul_(torch.tensor(8.0)).mul_(0.5)
    assert same(t.dequantize(), dense)
    assert torch.equal(t.codes, codes)


def test_scales_stay_in_their_range():
    for scheme in ("int8_rowwise", "mxfp8_e4m3", "int4_g32_bf16", "nvfp4"):
        t = quantized(weight(4, 256), scheme)
        dense = t.dequantize()
        for factor in (2.0**-140, 2.0**140, 2.0**300):
            with pytest.raises(ValueError, match="leave the range of their storage"):
                t.mul_(factor)
        assert same(t.dequantize(), dense)


@pytest.mark.parametrize("factor", [3, 0, -2, float("inf"), torch.ones(256) * 1.5])
def test_other_factors_quantize_again(factor):
    t = quantized(weight(4, 256), "int8_rowwise")
    wanted = quantized(t.dequantize() * factor, "int8_rowwise")
    assert t.mul_(factor) is t
    assert torch.equal(t.codes, wanted.codes)
    assert torch.equal(t.scale.nan_to_num(), wanted.scale.nan_to_num())
