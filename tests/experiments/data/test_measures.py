"""Sizes against arithmetic by hand."""

import pytest
import torch

import fast
from experiments.data.measures import Stored, stored, stored_plain
from experiments.models.quantized_model import quantized_model
from tests.experiments.harness import tiny

# A 256 x 512 tensor: bits of elements, then bytes of scales, of the outer level, of zero points.
BY_HAND = {
    "fp8_tensorwise": (8, 4, 0, 0),
    "fp8_rowwise": (8, 256 * 4, 0, 0),
    "fp8_128x128": (8, 2 * 4 * 4, 0, 0),
    "mxfp8_e4m3": (8, 256 * 16, 0, 0),
    "mxfp6_e2m3": (6, 256 * 16, 0, 0),
    "mxfp4": (4, 256 * 16, 0, 0),
    "nvfp4": (4, 256 * 32, 4, 0),
    "int3_g64": (3, 256 * 8 * 4, 0, 0),
    "int4_g128_asymmetric": (4, 256 * 4 * 4, 0, 256 * 4),
    "torchao.int4_g128_tinygemm": (4, 256 * 4 * 2, 0, 256 * 4 * 2),
    # 2048 blocks of 64; 8 blocks of 256 scales; one mean.
    "nf4": (4, 2048, 8 * 4, 4),
}


@pytest.mark.parametrize("scheme", BY_HAND)
def test_a_tensor_takes_what_it_takes(scheme):
    bits, scales, outer, zeros = BY_HAND[scheme]
    q = fast.quantize(torch.randn(256, 512), scheme)
    assert stored(q) == Stored(256 * 512 * bits // 8, scales, outer, zeros)


def test_a_model_takes_the_sum_of_its_parts(tmp_path):
    model = tiny.settings(tmp_path).trained.model
    made = quantized_model(model, "mxfp4", None)
    weights = sum(layer.weight.numel() for layer in model.linears().values())
    others = sum(parameter.numel() for parameter in model.parameters()) - weights
    # By hand: q and o 256 x 256, k and v 128 x 256, gate, up, down and lm_head 256 x 256; embedding and three norms.
    assert weights == 2 * 256 * 256 + 2 * 128 * 256 + 4 * 256 * 256
    assert others == 256 * 256 + 3 * 256
    assert made.linears == Stored(weights // 2, weights // 32)
    assert made.others == Stored(others * 4)
    assert (made.linears + made.others).total == weights // 2 + weights // 32 + others * 4


def test_plain_tensors_count_their_dtype():
    assert stored_plain(torch.zeros(3, 5, dtype=torch.bfloat16)).total == 30
