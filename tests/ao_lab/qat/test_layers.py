"""Where learned scales start: block by block at the least squared error, found here by arithmetic on plain arrays."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import ao_lab
import fast
from ao_lab import QATConfig, quantize_
from ao_lab.config.base import SchemeConfig
from ao_lab.config.recipe import named
from ao_lab.qat.layers import PARTS, SMALLEST, first_scales, squared_error
from reference import Scales
from tests.support.distributed.ranks import check_on_ranks

# Layers in training under FSDP2: two ranks on this machine give the bits of one.


def test_two_ranks():
    """Outputs and gradients; weights that are distributed are not converted."""
    check_on_ranks("qat_ranks.py")


SCHEMES = ("int2_g32", "int3_g32", "int3_g64_asymmetric", "int4_rowwise", "int4_tensorwise", "fp8_128x128")


def weight(rows=256, columns=256, dtype=torch.float32):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(5), dtype=torch.float32)
    return (x * 0.05).to(dtype)


def blocks_of(x, scheme, axis):
    """(blocks, elements) of an array, in the order of its scales laid flat with the blocked axis last."""
    x = np.moveaxis(x, axis, -1)
    block = scheme.scale.block
    if block == "tensor":
        return x.reshape(1, -1)
    if isinstance(block, tuple):
        rows, columns = block
        x = x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
        return x.transpose(0, 2, 1, 3).reshape(-1, rows * columns)
    return x.reshape(-1, x.shape[-1] if block == -1 else block)


def errors(x, scheme, axis, scales):
    made = fast.fake_quantize(x, scheme, axis=axis, scales=scales)
    return (blocks_of((made.float() - x.float()).numpy().astype(np.float64), scheme, axis) ** 2).sum(axis=1)


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("name", SCHEMES)
def test_every_block_has_the_least_error(name, axis):
    x, scheme = weight(), named(name)
    rule = fast.choose_scales(x, scheme, axis=axis)
    found = first_scales(x, scheme, axis, "error")
    tried = np.array([errors(x, scheme, axis, Scales(rule.scale * part, None, rule.zero)) for part in PARTS])
    assert errors(x, scheme, axis, found) == pytest.approx(tried.min(axis=0), rel=1e-5)
    part = (found.scale / rule.scale).numpy()
    assert all(np.abs(np.array(PARTS) - one).min() < 1e-6 for one in part.flat)
    if scheme.format.bits < 4:
        # Clipping pays for most blocks of few bits, and the least part is never the best.
        assert (part < 1).mean() > 0.5
    assert part.min() > PARTS[-1]
    if rule.zero is not None:
        assert torch.equal(found.zero, rule.zero)


def test_the_error_by_hand():
    x = torch.tensor([[0.0, 1.0, 2.0, 3.4], [4.0, -4.0, 0.5, 0.0]])
    scheme = named("int3_g4")
    scales = Scales(torch.tensor([[1.0], [1.0]]))
    # 3.4 becomes 3, 4 becomes 3, -4 stays, 0.5 is a tie and becomes 0.
    assert squared_error(x, scheme, -1, scales) == pytest.approx(np.array([[0.16], [1.25]]))


def test_the_larger_of_two_as_good():
    # -3 is exact under 1 (code -3) and under 0.75 (code -4).
    x = torch.tensor([[-3.0, 0.0, 0.0, 0.0]])
    assert first_scales(x, named("int3_g4"), -1, "error").scale.tolist() == [[1.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_zeros_and_nan(dtype):
    x = weight(4, 128, dtype)
    x[0, :32] = 0
    x[1, :32] = torch.nan
    plain = first_scales(weight(4, 128, dtype), named("int3_g32"), -1, "error")
    found = first_scales(x, named("int3_g32"), -1, "error")
    kept = torch.ones_like(found.scale, dtype=torch.bool)
    kept[:2, 0] = False
    assert torch.equal(found.scale[kept], plain.scale[kept])
    zeros = weight(4, 128, dtype)
    zeros[0, :32] = 0
    found = first_scales(zeros, named("int3_g32"), -1, "error")
    assert found.scale[0, 0] == found.scale.flatten()[1:].max()


@pytest.mark.parametrize("start", ["rule", "error"])
@pytest.mark.parametrize("lost", [float("nan"), float("inf")])
def test_a_block_that_is_lost_stays_lost_and_spoils_no_other(start, lost):
    x = weight(4, 128)
    x[0, :32] = 0
    plain = first_scales(x, named("int3_g32"), -1, start)
    x[1, 5] = lost
    found = first_scales(x, named("int3_g32"), -1, start)
    assert found.scale[1, 0].isnan()
    others = torch.ones_like(found.scale, dtype=torch.bool)
    others[1, 0] = False
    assert torch.equal(found.scale[others], plain.scale[others])
    made = fast.fake_quantize(x, named("int3_g32"), scales=found)
    assert made[1, :32].isnan().all()
    assert made.isnan().sum() == 32


def test_empty_weights():
    assert first_scales(torch.empty(0, 32), named("int3_g32"), -1, "error").scale.numel() == 0


@pytest.mark.parametrize("start", ["rule", "error"])
def test_layers_begin_there_and_convert_to_what_they_train_with(start):
    net = nn.Sequential(nn.Linear(256, 256, bias=False))
    net[0].weight.data.copy_(weight())
    config = SchemeConfig(scheme="int3_g32", kernel="reference")
    quantize_(net, QATConfig(config, learn_scales=True, scale_start=start))
    found = first_scales(weight(), named("int3_g32"), -1, start)
    assert torch.equal(net[0].qat_scale, found.scale)
    assert net[0].qat_scale.requires_grad
    x = weight(4)
    y = net(x).detach()
    quantize_(net, QATConfig(config, step="convert"))
    assert torch.equal(net(x), y)
    assert torch.equal(net[0].weight.dequantize(), fast.fake_quantize(weight(), "int3_g32", scales=found))


def test_the_start_is_the_rule_unless_asked():
    x = weight()
    assert QATConfig(ao_lab.Int4WeightOnlyConfig(), learn_scales=True).scale_start == "rule"
    assert torch.equal(first_scales(x, named("int2_g32"), -1).scale, fast.choose_scales(x, "int2_g32").scale)


@pytest.mark.parametrize("kind", ["linear", "embedding"])
def test_a_scale_that_falls_to_zero_or_below_counts_as_the_smallest_and_comes_back(kind):
    """Without the floor a negative scale gives back what saturates with the wrong sign."""
    torch.manual_seed(0)
    module = nn.Linear(64, 4, bias=False) if kind == "linear" else nn.Embedding(4, 64)
    model, config = nn.Sequential(module), SchemeConfig(scheme="int4_g32", kernel="reference")
    chosen = lambda module, name: isinstance(module, (nn.Linear, nn.Embedding))  # noqa: E731
    quantize_(model, QATConfig(config, learn_scales=True), chosen)
    layer = model[0]
    x = torch.randn(64, 64) if kind == "linear" else torch.arange(4)
    target = model(x).detach()
    with torch.no_grad():
        layer.qat_scale[0] = torch.tensor([-0.01, 0.0])
        layer.qat_scale[1, 0] = float("nan")
    assert layer.given().scale[0].tolist() == [SMALLEST, SMALLEST]
    assert layer.given().scale[1, 0].isnan()
    with torch.no_grad():
        layer.qat_scale[1, 0] = SMALLEST / 2
    y = model(x).detach()
    twin = quantized_twin(model, config, chosen)
    assert torch.equal(twin(x), y)
    assert twin[0].weight.dequantize()[0].abs().max() < 1e-30
    optimizer = torch.optim.Adam([layer.qat_scale], lr=1e-3)
    for _ in range(60):
        optimizer.zero_grad()
        (model(x) - target).square().mean().backward()
        optimizer.step()
    assert (layer.qat_scale[:2] > 0.005).all()


def quantized_twin(model, config, chosen):
    twin = copy.deepcopy(model)
    quantize_(twin, QATConfig(config, step="convert"), chosen)
    return twin


def test_a_learned_scale_of_inputs_has_the_same_floor():
    layer = nn.Linear(64, 4)
    config = ao_lab.Int8StaticActivationInt8WeightConfig(act_quant_scale=0.01)
    quantize_(layer, QATConfig(config, learn_scales=True))
    with torch.no_grad():
        layer.qat_input_scale.fill_(-1.0)
    assert layer.given().input_scale.item() == SMALLEST
    layer(torch.randn(3, 64)).sum().backward()
    assert layer.qat_input_scale.grad.abs() > 0
    quantize_(layer, QATConfig(config, step="convert"))
    assert float(layer.weight.input_scale) == SMALLEST
