"""Weights changed in place are quantized again by their own scheme, as `copy_` does."""

import pytest
import torch
from torch import nn

import ao_lab
from ao_lab import QuantizedTensor, quantized
from reference import Scales
from tests.support.quantized_weights import KINDS, SPARSE_KINDS, pair, same, weight


@pytest.mark.parametrize("scheme", KINDS)
def test_sums_are_those_of_a_copy(scheme):
    t, delta = quantized(weight(64, 128), scheme), weight(64, 128, seed=1)
    wanted = quantized(t.dequantize() + 2 * delta, scheme)
    held = t.codes.data_ptr()
    assert t.add_(delta, alpha=2) is t
    assert torch.equal(t, wanted)
    t -= delta
    assert torch.equal(t, quantized(wanted.dequantize() - delta, scheme))
    assert t.codes.data_ptr() == held


@pytest.mark.parametrize("scheme", SPARSE_KINDS)
def test_2_to_4_weights_take_what_leaves_them_2_to_4(scheme):
    t, dense = pair(scheme, 16, 64)
    t.data += dense / 2
    step = 0 if scheme == "bfloat16" else float(dense.abs().max()) / 3
    assert (t.dequantize() - dense * 1.5).abs().max() <= step
    kept = t.dequantize()
    with pytest.raises(ValueError, match="2:4 storage holds at most two elements of every four"):
        t.add_(1)
    assert same(t.dequantize(), kept)


def test_static_inputs_and_views():
    config = ao_lab.Int8StaticActivationInt8WeightConfig(act_quant_scale=torch.tensor(0.02))
    net = nn.Sequential(nn.Linear(64, 32))
    ao_lab.quantize_(net, config)
    t, recipe = net[0].weight, net[0].weight.recipe
    t.data += 0.01
    assert t.recipe == recipe
    assert float(t.input_scale) == pytest.approx(0.02)
    turned, wanted = t.t(), quantized(t.dequantize() + 1, recipe, input_scales=Scales(t.input_scale))
    turned += 1
    assert same(t.dequantize(), wanted.dequantize())


def test_data_of_dense_numbers_is_quantized():
    t = quantized(weight(32, 64), "int8_rowwise")
    view, before = t.detach(), t.dequantize()
    t.data = weight(48, 64, seed=1, dtype=torch.bfloat16)
    assert torch.equal(t, quantized(weight(48, 64, seed=1, dtype=torch.bfloat16), "int8_rowwise"))
    assert same(view.dequantize(), before)
    for other in (torch.ones(64), torch.ones(32, 64, dtype=torch.int32)):
        with pytest.raises(TypeError, match="axes of floating-point numbers to quantize"):
            t.data = other


def test_dense_numbers_take_quantized_ones():
    t, dense = quantized(weight(32, 64), "int4_g32"), torch.ones(32, 64)
    assert same(dense.add_(t), 1 + t.dequantize())
    assert not isinstance(dense.mul_(t), QuantizedTensor)


@pytest.mark.parametrize(
    ("optimizer", "error"),
    [(torch.optim.SGD, ValueError), (torch.optim.AdamW, ValueError), (torch.optim.Adam, NotImplementedError)],
)
def test_weights_that_require_gradients_are_refused(optimizer, error):
    layer = nn.Linear(64, 32)
    ao_lab.quantize_(nn.Sequential(layer), ao_lab.Int8WeightOnlyConfig())
    layer.weight.requires_grad_(True)
    layer(torch.randn(2, 64)).sum().backward()
    with pytest.raises(error, match=r"rounded away.* QATConfig"):
        optimizer([layer.weight], lr=0.01).step()


def test_what_rounding_takes_is_told():
    t = quantized(weight(32, 64), "int4_g32")
    with pytest.warns(UserWarning, match=r"int4_g32: more than half of the change .* beside the weight"):
        t += 1e-3 * weight(32, 64, seed=1)
