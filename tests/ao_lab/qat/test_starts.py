"""Learned scales that start where methods with data put them: those of the calibrated model, and what is refused."""

import copy

import pytest
import torch
from torch import nn

import ao_lab
from ao_lab import GPTQ, HQQ, Clip, FqnToConfig, PerGroup, QATConfig, quantize_

INT3 = ao_lab.IntxWeightOnlyConfig("int3", PerGroup(32))
PATHS = ("layers.0.proj", "layers.1.proj", "head")
CONFIGS = {
    "symmetric": INT3,
    "zero points": ao_lab.Int4WeightOnlyConfig(group_size=32),
    "inputs too": ao_lab.Int8DynamicActivationIntxWeightConfig("int4", PerGroup(32)),
}


class Block(nn.Module):
    """A layer of one's own, as decoders have them."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(64, 64)

    def forward(self, x):
        return torch.relu(self.proj(x))


class Net(nn.Module):
    """Two blocks, and a layer outside of them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(64, 32)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture(scope="module")
def batches():
    generator = torch.Generator().manual_seed(1)
    weights = torch.linspace(0.1, 4, 64)
    return [torch.randn(32, 64, generator=generator) * weights for _ in range(4)]


def prepared(config, batches):
    net = Net()
    quantize_(net, QATConfig(config, learn_scales=True), calibration=batches, methods=(Clip(),))
    return net


def kinds(net):
    return [type(one).__name__ for one in (net.layers[0].proj, net.layers[1].proj, net.head)]


def test_what_methods_leave_starts_as_the_configuration_says(batches):
    net, plain = Net(), Net()
    config = QATConfig(INT3, learn_scales=True, scale_start="error")
    quantize_(net, config, calibration=batches, methods=(Clip(),))
    quantize_(plain, config)
    assert torch.equal(net.head.qat_scale, plain.head.qat_scale)
    assert not torch.equal(net.layers[0].proj.qat_scale, plain.layers[0].proj.qat_scale)


@pytest.mark.parametrize("name", CONFIGS)
def test_training_starts_at_the_calibrated_model(name, batches):
    calibrated, net = Net(), prepared(CONFIGS[name], batches)
    quantize_(calibrated, CONFIGS[name], calibration=batches, methods=(Clip(),))
    plain = Net()
    quantize_(plain, QATConfig(CONFIGS[name], learn_scales=True))
    assert not torch.equal(plain.layers[0].proj.qat_scale, net.layers[0].proj.qat_scale)
    for path in PATHS:
        stored = calibrated.get_submodule(path).weight.quantized
        assert torch.equal(net.get_submodule(path).qat_scale, stored.scale)
        assert torch.equal(net.get_submodule(path).weight, Net().get_submodule(path).weight)
    assert net.layers[0].proj.qat_scale.requires_grad
    quantize_(net, QATConfig(CONFIGS[name], step="convert"))
    for path in PATHS:
        ours, theirs = (one.get_submodule(path).weight.quantized for one in (net, calibrated))
        assert torch.equal(ours.codes, theirs.codes)
        assert ours.zero is None or torch.equal(ours.zero, theirs.zero)


def test_methods_without_data_patterns_and_filters(batches):
    net = Net()
    quantize_(net, QATConfig(INT3, learn_scales=True), methods=(HQQ(),))
    calibrated = Net()
    quantize_(calibrated, INT3, methods=(HQQ(),))
    assert torch.equal(net.head.qat_scale, calibrated.head.weight.quantized.scale)
    net = Net()
    named = FqnToConfig({"layers.1.proj": QATConfig(INT3, learn_scales=True), "head": None})
    quantize_(net, named, calibration=batches, methods=(Clip(),))
    assert kinds(net) == ["Linear", "QATLinear", "Linear"]
    net, seen = Net(), []
    chosen = {id(net.layers[0].proj)}
    quantize_(
        net,
        QATConfig(INT3, learn_scales=True),
        lambda module, name: id(module) in chosen,
        calibration=batches,
        methods=(Clip(),),
        progress=lambda name, done, total: seen.append((name, total)) if name.endswith(".weight") else None,
    )
    assert seen == [("layers.0.proj.weight", 1)]
    assert kinds(net) == ["QATLinear", "Linear", "Linear"]


def test_a_block_of_zeros_can_leave_zero(batches):
    net = Net()
    net.layers[0].proj.weight.data[3, :32] = 0
    quantize_(net, QATConfig(INT3, learn_scales=True), calibration=batches, methods=(Clip(),))
    scale = net.layers[0].proj.qat_scale
    assert scale[3, 0] == scale.max()


@pytest.mark.parametrize(
    ("config", "methods", "message"),
    [
        (QATConfig(INT3, learn_scales=True), (Clip(), GPTQ()), "starts learned scales at those of Clip"),
        (QATConfig(INT3), (Clip(),), "does not; leave methods and calibration out here"),
        (QATConfig(INT3, step="convert"), (Clip(),), "does not; leave methods and calibration out here"),
    ],
)
def test_refused_with_nothing_changed(config, methods, message, batches):
    net = Net()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match=message):
        quantize_(net, config, calibration=batches, methods=methods)
    assert kinds(net) == ["Linear"] * 3
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_an_error_of_calibration_changes_nothing(batches):
    net = Net()
    with pytest.raises(ValueError):
        quantize_(
            net, QATConfig(INT3, learn_scales=True), calibration=[torch.full((32, 64), torch.nan)], methods=(Clip(),)
        )  # fmt: skip
    assert kinds(net) == ["Linear"] * 3
