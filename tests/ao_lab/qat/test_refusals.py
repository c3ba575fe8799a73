"""Quantization-aware training: what is refused, with the reason, and what a refused or broken call leaves behind."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import ao_lab
from ao_lab import SCHEMES, FqnToConfig, QATConfig, QuantizedTensor, SchemeConfig, explain, quantize_
from ao_lab.qat.layers import QATLinear
from tests.ao_lab.config.test_every_config import TOKENS, Net
from tests.support.models.qat_models import everything, in_training, linears

INT4 = ao_lab.Int4WeightOnlyConfig(group_size=32)


def kinds(net):
    return [type(module) for module in net.modules()]


def test_quantized_weights_are_not_trained():
    net = Net(torch.float32)
    quantize_(net, INT4, lambda module, name: name == "first")
    before = kinds(net)
    with pytest.raises(ValueError, match=r"QAT trains dense weights, and first\.weight already quantized"):
        quantize_(net, QATConfig(INT4))
    assert kinds(net) == before
    quantize_(net, QATConfig(INT4), lambda module, name: name == "second")
    assert isinstance(net.first.weight, QuantizedTensor)
    assert type(net.second) is QATLinear


def test_convert_before_prepare():
    net = Net()
    with pytest.raises(
        ValueError, match=r"none of the selected layers is in training \(first.weight.*'prepare'\) first"
    ):
        quantize_(net, QATConfig(INT4, step="convert"), linears)
    assert type(net.first) is nn.Linear


def test_convert_twice():
    """What is quantized already is said to be so, and not sent back to step "prepare" of the same model."""
    net = in_training(INT4)
    quantize_(net, QATConfig(INT4, step="convert"))
    with pytest.raises(
        ValueError, match=r"no layer is in training; 2 weights are quantized already\. Save the model"
    ):
        quantize_(net, QATConfig(INT4, step="convert"))


def test_prepare_twice():
    net = in_training(INT4)
    with pytest.raises(ValueError, match=r"first\.weight, second\.weight are prepared for QAT already"):
        quantize_(net, QATConfig(INT4), everything)
    assert type(net.table) is nn.Embedding
    quantize_(net, QATConfig(INT4), lambda module, name: name == "table")
    quantize_(net, QATConfig(INT4, step="convert"))
    assert all(isinstance(weight, QuantizedTensor) for weight in (net.table.weight, net.second.weight))


def test_other_configurations_leave_layers_in_training():
    net = in_training(INT4, filter_fn=lambda module, name: name == "first")
    report = quantize_(net, INT4)
    assert [layer.name for layer in report.changed] == ["second.weight"]
    assert type(net.first) is QATLinear
    with pytest.raises(ValueError, match="it is prepared for QAT"):
        quantize_(net, INT4, lambda module, name: name == "first")


@pytest.mark.parametrize("other", [ao_lab.Int8WeightOnlyConfig(), ao_lab.Int4WeightOnlyConfig(group_size=64)])
def test_convert_to_something_else(other):
    net = in_training(INT4)
    with pytest.raises(ValueError, match=r"first\.weight was trained as int4_g32_asymmetric, not as"):
        quantize_(net, QATConfig(other, step="convert"))
    assert type(net.first) is QATLinear


def test_what_has_no_gradient():
    random = replace(SCHEMES["int4_g32"], name="random_int4", rounding="stochastic")
    with pytest.raises(ValueError, match="rounds by random words"):
        QATConfig(SchemeConfig(scheme=random))
    for config in (ao_lab.MXWeightOnlyConfig(), ao_lab.NVFP4WeightOnlyConfig(), ao_lab.NF4WeightOnlyConfig()):
        with pytest.raises(ValueError, match="no number that a gradient could move"):
            QATConfig(config, learn_scales=True)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "needs base_config"),
        ({"base_config": INT4, "step": "train"}, ValueError, "step is one of prepare, convert"),
        ({"base_config": "int4_g32"}, TypeError, "base_config is a configuration"),
        ({"base_config": QATConfig(INT4)}, TypeError, "base_config is a configuration"),
        ({"base_config": INT4, "weight_config": "int4_g32"}, ValueError, "for step='prepare' alone"),
        ({"base_config": INT4, "scheme": "int4_g32"}, ValueError, "give them there"),
        ({"base_config": INT4, "start_step": -1}, ValueError, "start_step is a number of steps"),
        ({"base_config": INT4, "scale_gradient": "mean"}, ValueError, "scale_gradient is one of lsq, sum"),
        (
            {"base_config": INT4, "learn_scales": True, "scale_start": "mse"},
            ValueError,
            "scale_start is one of rule, error",
        ),
        ({"base_config": INT4, "scale_start": "error"}, ValueError, "give learn_scales=True as well"),
        (
            {"base_config": INT4, "step": "convert", "learn_scales": True},
            ValueError,
            "belong to step='prepare'",
        ),
    ],
)
def test_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        QATConfig(**arguments)


class Half(nn.Linear):
    """A layer that computes otherwise."""

    def forward(self, x):
        return super().forward(x) / 2


def test_layers_that_compute_otherwise_stay():
    model = nn.Sequential(nn.Linear(64, 64), Half(64, 64), nn.Embedding(4, 64, max_norm=1.0))
    report = quantize_(model, QATConfig(INT4), everything)
    reasons = [layer.reason for layer in report.layers]
    assert [type(layer) for layer in model] == [QATLinear, Half, nn.Embedding]
    assert "a Half may compute otherwise" in reasons[1]
    assert "max_norm" in reasons[2]


def test_static_inputs_need_data():
    net = Net(torch.float32)
    with pytest.raises(ValueError, match="needs calibration"):
        quantize_(net, QATConfig(ao_lab.Int8StaticActivationInt8WeightConfig()))
    assert type(net.first) is nn.Linear


def test_learned_scales_need_numbers():
    model = nn.Sequential(nn.Linear(64, 64, device="meta"))
    with pytest.raises(ValueError, match="on the meta device there are none"):
        quantize_(model, QATConfig(INT4, learn_scales=True))
    quantize_(model, QATConfig(INT4))
    assert model(torch.empty(2, 64, device="meta")).shape == (2, 64)


def test_learned_scales_are_not_dropped_silently():
    net = in_training(INT4, learn_scales=True)
    with pytest.raises(ValueError, match="learned scales, which a dense layer cannot keep"):
        quantize_(net, QATConfig(step="convert"))


def fails_at(call):
    """A function that raises at its n-th call."""
    from ao_lab.qat import api as qat_model

    real, count = qat_model.weight_as_stored, [0]

    def run(*args, **kwargs):
        count[0] += 1
        if count[0] == call:
            raise torch.OutOfMemoryError("no memory")
        return real(*args, **kwargs)

    return run


def test_prepare_is_all_or_nothing():
    net = Net(torch.float32)
    before = kinds(net), list(net.state_dict())
    from ao_lab.qat import api as qat_model

    real, seen = qat_model.first_scales, []

    def run(*args):
        seen.append(args)
        if len(seen) == 2:
            raise torch.OutOfMemoryError("no memory")
        return real(*args)

    with mock.patch.object(qat_model, "first_scales", run), pytest.raises(torch.OutOfMemoryError):
        quantize_(net, QATConfig(INT4, learn_scales=True))
    assert (kinds(net), list(net.state_dict())) == before
    assert not hasattr(net.first, "qat")


def test_convert_goes_on_after_an_error():
    net, twin = in_training(INT4), in_training(INT4)
    with (
        mock.patch("ao_lab.qat.api.weight_as_stored", fails_at(2)),
        pytest.raises(torch.OutOfMemoryError),
    ):
        quantize_(net, QATConfig(INT4, step="convert"))
    assert isinstance(net.first.weight, QuantizedTensor)
    assert type(net.second) is QATLinear
    assert [layer.changed for layer in explain(net).layers] == [False, True, False]
    net(TOKENS).sum().backward()
    quantize_(net, QATConfig(INT4, step="convert"))
    quantize_(twin, QATConfig(INT4, step="convert"))
    assert torch.equal(net(TOKENS), twin(TOKENS))


def test_torchs_fast_path_past_the_layers_is_refused():
    """nn.TransformerEncoderLayer in eval mode reads the weights of its layers and does not call them."""
    layer = nn.TransformerEncoderLayer(64, 4, 64, dropout=0.0, batch_first=True)
    with pytest.raises(ValueError, match="set_fastpath_enabled"):
        quantize_(nn.Sequential(layer), QATConfig(INT4))
    assert type(layer.linear1) is nn.Linear
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        quantize_(layer.eval(), QATConfig(INT4))
        x = torch.randn(2, 5, 64)
        with torch.no_grad():
            y = layer(x)
        assert torch.equal(y, layer(x).detach())
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
    quantize_(nn.TransformerEncoderLayer(64, 4, 64), QATConfig(INT4))


def test_a_shared_weight_ends_in_one_way():
    net = Net(torch.float32)
    net.head = nn.Linear(128, 16, bias=False)
    net.head.weight = net.table.weight
    chosen = lambda module, name: name in ("table", "head")  # noqa: E731
    quantize_(net, QATConfig(INT4), chosen)
    ends = {"table": QATConfig(step="convert"), "head": QATConfig(INT4, step="convert")}
    with pytest.raises(ValueError, match="share one weight, but are to be quantized and dense"):
        quantize_(net, FqnToConfig(ends))
    assert type(net.head) is QATLinear
    quantize_(net, QATConfig(INT4, step="convert"), chosen)


NORMS = {
    "_WeightNorm": torch.nn.utils.parametrizations.weight_norm,
    "_Orthogonal": torch.nn.utils.parametrizations.orthogonal,
    "_SpectralNorm": torch.nn.utils.parametrizations.spectral_norm,
    "WeightNorm": torch.nn.utils.weight_norm,
    "SpectralNorm": torch.nn.utils.spectral_norm,
    "L1Unstructured": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils:FutureWarning")
@pytest.mark.parametrize("named", NORMS)
def test_a_weight_that_something_computes_is_not_converted(named):
    """It trains; convert names what computes it before a layer changes, and converts once it is plain."""
    net = in_training(INT4, filter_fn=linears)
    NORMS[named](net.first)
    net(TOKENS).float().square().mean().backward()
    before = kinds(net)
    with pytest.raises(
        ValueError, match=rf"changed nothing. first\.weight: .*{named}.* computes its weight; torch"
    ):
        quantize_(net, QATConfig(INT4, step="convert"))
    assert kinds(net) == before
    assert not [
        layer for layer in explain(net).layers if "never given" in layer.reason and "parametriz" in layer.name
    ]
    if named.startswith("_"):
        torch.nn.utils.parametrize.remove_parametrizations(net.first, "weight")
        quantize_(net, QATConfig(INT4, step="convert"))
        assert isinstance(net.first.weight, QuantizedTensor)


def test_a_layer_that_was_replaced_is_not_in_training():
    net = in_training(INT4)
    net.second = nn.Linear(256, 10)
    said = "not in QAT (put here after step='prepare')"
    assert {layer.name: layer.reason for layer in explain(net).layers}["second.weight"] == said
    report = quantize_(net, QATConfig(INT4, step="convert"))
    assert {layer.name: layer.reason for layer in report.layers}["second.weight"] == said
    assert [layer.name for layer in report.changed] == ["first.weight"]


def test_a_layer_whose_forward_never_ran_is_named(monkeypatch):
    """A chunked loss multiplies with a head's weight and never calls the head."""
    monkeypatch.setattr("ao_lab.training.layers._traced", [])  # of other tests' compiled programs
    net = in_training(INT4)
    hidden = net.first(net.table(TOKENS).reshape(-1, 128))
    nn.functional.linear(hidden, net.second.weight).square().mean().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    with pytest.warns(UserWarning, match=r"forward never ran: second\.weight did not train"):
        report = quantize_(net, QATConfig(INT4, step="convert"))
    assert [layer.reason for layer in report.changed] == [
        "trained by QAT",
        "forward never ran since step='prepare': it did not train with rounded operands",
    ]
    trained = in_training(INT4)  # by another process, whose weights were loaded
    assert [layer.reason for layer in quantize_(trained, QATConfig(INT4, step="convert")).changed] == [
        "trained by QAT"
    ] * 2


@pytest.mark.parametrize("config", [INT4, ao_lab.IntxWeightOnlyConfig(), ao_lab.IntxWeightOnlyConfig("int2")])
@pytest.mark.parametrize("kind", [nn.Linear, nn.Embedding])
def test_a_weight_that_is_no_number_is_seen(config, kind):
    """Under learned scales an integer has no code for NaN: training, and what is stored, show it."""
    net = nn.Sequential(kind(64, 64))
    quantize_(net, QATConfig(config, learn_scales=True), everything)
    x = torch.randn(4, 64) if kind is nn.Linear else torch.arange(64)
    finite = net(x)
    with torch.no_grad():
        net[0].weight[3, 5] = torch.nan
    y = net(x)
    shown = y.isnan().all(0) if kind is nn.Linear else y.isnan().any(1)
    assert shown.nonzero().tolist() == [[3]]
    assert torch.equal(y.nan_to_num()[:1, :3], finite[:1, :3])
    assert y.sum().isnan()
    quantize_(net, QATConfig(config, step="convert"))
    stored = net(x).isnan()
    assert (stored.all(0) if kind is nn.Linear else stored.any(1)).nonzero().tolist() == [[3]]


def test_an_input_that_is_no_number_is_seen():
    config = ao_lab.Int8StaticActivationInt8WeightConfig(act_quant_scale=torch.tensor(0.02))
    net = nn.Sequential(nn.Linear(64, 8))
    quantize_(net, QATConfig(config))
    x = torch.randn(4, 64)
    x[3, 7] = torch.nan
    assert net(x).isnan().any(1).tolist() == [False, False, False, True]


@pytest.mark.parametrize("config", [INT4, QATConfig(INT4), QATConfig(INT4, lora=ao_lab.LoRA(2))], ids=str)
def test_a_layer_without_a_shape_is_named(config):
    """A lazy convolution is in nobody's way."""
    net = nn.ModuleDict({"fc": nn.Linear(32, 32), "late": nn.LazyLinear(4)})
    with pytest.raises(ValueError, match=r"late\.weight of a LazyLinear has no shape yet; run one forward"):
        quantize_(net, config)
    assert type(net["fc"]) is nn.Linear
    quantize_(nn.ModuleDict({"fc": nn.Linear(32, 32), "late": nn.LazyConv2d(4, 3)}), config)
