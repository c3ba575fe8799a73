"""Moving averages of models with quantized weights: what is frozen stays, what differs is quantized again."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import ao_lab
from ao_lab import quantized
from tests.support.quantized_weights import KINDS, SPARSE_KINDS, pair, same, weight


@pytest.mark.parametrize("function", [get_ema_multi_avg_fn(0.5), get_swa_multi_avg_fn()], ids=["ema", "swa"])
def test_averaged_models(function):
    """A frozen base, and what trains beside it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32))
    ao_lab.quantize_(net, ao_lab.Int4WeightOnlyConfig(group_size=32))
    averaged = AveragedModel(net, multi_avg_fn=function)
    averaged.update_parameters(net)
    with torch.no_grad():
        net[1].weight.mul_(3)
    averaged.update_parameters(net)
    assert torch.equal(averaged.module[0].weight, net[0].weight)
    assert torch.equal(averaged.module[1].weight, torch.full((32,), 2.0))


@pytest.mark.parametrize("scheme", KINDS)
def test_weights_that_differ_are_quantized_again(scheme):
    t, other = quantized(weight(64, 128), scheme), quantized(weight(64, 128, seed=1), scheme)
    wanted = quantized(t.dequantize().lerp(other.dequantize(), 0.5), scheme)
    lists = t.clone()
    assert t.lerp_(other, 0.5) is t
    torch._foreach_lerp_([lists], [other], [0.5])
    assert torch.equal(t, wanted)
    assert torch.equal(lists, wanted)
    dense = torch.zeros(64, 128)
    assert same(dense.lerp_(other, torch.tensor(0.5)), other.dequantize() / 2)


@pytest.mark.parametrize("scheme", SPARSE_KINDS)
def test_2_to_4_weights_stay(scheme):
    t, dense = pair(scheme, 16, 64)
    torch._foreach_lerp_([t, torch.zeros(4)], [t.clone(), torch.ones(4)], 0.5)
    assert same(t.dequantize(), dense)


def test_towards_dense_numbers_is_an_optimizers_step():
    t = quantized(weight(64, 128), "int8_rowwise")
    before = t.dequantize()
    with pytest.raises(NotImplementedError, match="towards dense numbers: it takes the average with another"):
        torch._foreach_lerp_([t], [torch.zeros(64, 128)], 0.1)
    assert same(t.dequantize(), before)
