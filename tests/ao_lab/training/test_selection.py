"""What is converted and what stays: everything that a filter accepts is in the report, and nothing is computed past it."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import ao_lab
from ao_lab.training import layers
from ao_lab.training.layers import LowPrecisionLinear
from tests.ao_lab.training.grouped.test_experts import GroupedExperts


def both(module, name):
    return True


def test_what_a_filter_accepts_is_listed():
    net = nn.ModuleDict({
        "fc": nn.Linear(64, 64),
        "conv": nn.Conv2d(16, 16, 1),
        "lstm": nn.LSTM(16, 16),
        "table": nn.EmbeddingBag(16, 16),
        "pair": nn.Bilinear(16, 16, 16),
        "norm": nn.LayerNorm(16),
        "attention": nn.MultiheadAttention(16, 2),
        "experts": GroupedExperts("loop"),
    })  # fmt: skip
    report = ao_lab.convert_for_training_(net, "rowwise", both, experts=False)
    assert report.changed == ("fc", "experts.shared")
    assert {*report.left} == {
        "conv", "lstm", "table", "pair", "attention", "attention.out_proj", "experts",
    }  # fmt: skip
    assert report.left["conv"] == "recipes train nn.Linear and batched experts, and this is a Conv2d"
    assert report.left["experts"] == "experts=False"
    assert "without calling it" in report.left["attention.out_proj"]
    assert "2 of 9 layers" in str(report)
    with pytest.raises(ValueError, match=r"takes none of conv: conv: .* Conv2d"):
        ao_lab.convert_for_training_(net, "rowwise", lambda module, name: name == "conv")


def encoder(**options):
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(64, 2, 64, dropout=0.0, batch_first=True, **options)


def test_the_fast_path_of_encoders_is_refused():
    """In eval mode torch multiplies with the dense weights there, past the layers."""
    net = nn.ModuleDict({"encoder": encoder(), "head": nn.Linear(64, 64)})
    with pytest.raises(ValueError, match=r"fast path of encoder .*set_fastpath_enabled\(False\)"):
        ao_lab.convert_for_training_(net, "rowwise")
    assert not any(isinstance(module, LowPrecisionLinear) for module in net.modules())
    report = ao_lab.convert_for_training_(net, "rowwise", lambda module, name: name == "head")
    assert report.changed == ("head",)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        one = encoder()
        assert ao_lab.convert_for_training_(one, "rowwise").changed == ("linear1", "linear2")
        x = torch.randn(2, 5, 64)
        with torch.no_grad():
            assert torch.equal(one.eval()(x), one.train()(x))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_after_an_error_nothing_has_changed():
    """Neither linear layers nor experts."""
    net = nn.ModuleDict({"fc": nn.Linear(64, 64), "experts": GroupedExperts("loop")})
    kinds = [type(module) for module in net.modules()]
    held = net["fc"](torch.randn(2, 64))
    with pytest.raises(ValueError, match="held by the graph"):
        ao_lab.convert_for_training_(net, "tensorwise", fsdp_float8_all_gather=True)
    assert [type(module) for module in net.modules()] == kinds
    assert not any("low_precision" in vars(module) for module in net.modules())
    held.sum().backward()


@pytest.mark.parametrize(
    "add",
    [
        parametrizations.weight_norm,
        parametrizations.orthogonal,
        parametrizations.spectral_norm,
        lambda layer: parametrize.register_parametrization(layer, "weight", nn.Identity()),
    ],
)
@pytest.mark.parametrize("gathered", [False, True])
def test_parametrizations_stay(add, gathered):
    """Added to a converted layer they outlast its conversion back, and what they compute is the plain layer's."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64))
    ao_lab.convert_for_training_(net, "tensorwise", fsdp_float8_all_gather=gathered)
    add(net[0])
    x = torch.randn(32, 64)
    net(x).sum().backward()
    assert parametrize.is_parametrized(net[0], "weight")
    assert ao_lab.convert_from_training_(net) == ("0",)
    assert isinstance(net[0], nn.Linear)
    assert not isinstance(net[0], LowPrecisionLinear)
    net.eval()
    assert torch.equal(net(x), nn.functional.linear(x, net[0].weight, net[0].bias))
    assert all(type(p) is nn.Parameter for p in net.parameters())
    assert torch.equal(copy.deepcopy(net)(x), net(x))
    parametrize.remove_parametrizations(net[0], "weight")
    assert type(net[0]) is nn.Linear


@pytest.fixture
def nothing_traced(monkeypatch):
    """As in a process that has compiled no layer yet."""
    monkeypatch.setattr(layers, "_traced", [])


def test_a_head_that_is_read_but_not_called(nothing_traced):
    net = nn.ModuleDict({"body": nn.Linear(64, 64), "head": nn.Linear(64, 64)})
    ao_lab.convert_for_training_(net, "rowwise")
    nn.functional.linear(net["body"](torch.randn(4, 64)), net["head"].weight).sum().backward()
    with pytest.warns(UserWarning, match="forward never ran: head did not train"):
        ao_lab.convert_from_training_(net)
    assert "forward_ran" not in vars(net["body"])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_nothing_is_said_where_it_is_not_known(nothing_traced):
    """Of a model that did not run, and of layers that a compiled program may have run."""
    net = nn.ModuleDict({"body": nn.Linear(64, 64), "head": nn.Linear(64, 64)})
    ao_lab.convert_for_training_(net, "rowwise")
    ao_lab.convert_from_training_(net)
    ao_lab.convert_for_training_(net, "rowwise")
    net["body"](torch.randn(4, 64))
    torch.compile(net["head"], backend="aot_eager", fullgraph=True)(torch.randn(4, 64))
    ao_lab.convert_from_training_(net)


def test_dtypes_that_no_recipe_takes_are_left():
    net = nn.Sequential(nn.Linear(64, 64, dtype=torch.complex64), nn.Linear(64, 64))
    assert (
        "torch.complex64, and recipes take float32" in ao_lab.convert_for_training_(net, "rowwise").left["0"]
    )
    with pytest.raises(ValueError, match=r"takes none of the model itself: its weight is torch\.complex64"):
        ao_lab.convert_for_training_(nn.Linear(64, 64, dtype=torch.complex64), "rowwise")


def test_lazy_layers_are_refused_before_any_changes():
    net = nn.Sequential(nn.Linear(64, 64), nn.LazyLinear(64), nn.LazyConv2d(4, 3))
    with pytest.raises(ValueError, match="1: a LazyLinear has no shape yet; run one forward"):
        ao_lab.convert_for_training_(net, "rowwise")
    assert type(net[0]) is nn.Linear
    ao_lab.convert_for_training_(net, "rowwise", lambda module, name: name == "0")
    assert type(net[0]) is LowPrecisionLinear
