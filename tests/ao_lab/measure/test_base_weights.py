"""Weights beside a base's: scales that moved between quantized layers, and folders of another model."""

import copy

import pytest
import torch
from torch import nn

import ao_lab
from ao_lab.measure.base_weights import other_weights, scaled_beside
from ao_lab.measure.evaluate import _left_out


def pair(seed=0):
    """Two layers of which the second reads the first's outputs."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 96, bias=False), nn.Linear(96, 64, bias=False))


@pytest.mark.parametrize("scheme", ["int4_g32", "mxfp4", "int1_g32"])
def test_scales_that_moved_between_quantized_layers_are_seen(scheme):
    """Rows of the first times s, columns of the second by s: the pair computes the same, each weight's error is that of s."""
    base = pair()
    plain, moved = copy.deepcopy(base), copy.deepcopy(base)
    scales = torch.exp(0.5 * torch.randn(96, generator=torch.Generator().manual_seed(1)))
    with torch.no_grad():
        moved[0].weight.mul_(scales[:, None])
        moved[1].weight.div_(scales)
    for model in (plain, moved):
        ao_lab.quantize_(model, ao_lab.SchemeConfig(scheme=scheme))
    assert scaled_beside(plain, base) == []
    assert scaled_beside(moved, base) == ["0.weight", "1.weight"]
    assert "2 quantized weights (0.weight first) are scaled against" in _left_out(
        (), ["0.weight", "1.weight"]
    )
    assert _left_out((), ()) == ""


def test_unquantized_matrices_say_whether_a_model_is_another():
    generator = torch.Generator().manual_seed(2)
    base, other = (
        nn.Sequential(nn.Embedding.from_pretrained(torch.randn(50, 64, generator=generator)), pair())
        for _ in range(2)
    )
    same = copy.deepcopy(base)
    for model in (same, other):
        ao_lab.quantize_(model, ao_lab.SchemeConfig(scheme="int8_rowwise"))
    assert other_weights(same, base) == ""
    assert other_weights(other, base).startswith(
        "0.weight differs from the unquantized model's by 1.4 of its norm"
    )
