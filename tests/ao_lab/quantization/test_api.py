"""`quantize_`, `FqnToConfig` and `explain`: which layers, and why."""

import copy
import pickle
import re
from collections import OrderedDict

import pytest
import torch
from torch import nn

import ao_lab
import reference
from ao_lab import (
    FqnToConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    MXWeightOnlyConfig,
    QuantizedTensor,
    SchemeConfig,
    SparsityConfig,
    explain,
    linear_and_experts,
    quantize_,
    sparsify_,
)
from ao_lab.gemm import choices
from experiments.models.llama import LanguageModel, ModelSettings
from tests.ao_lab.transforms.test_layers import ByLinear

TOKENS = torch.arange(24).reshape(2, 12)


def language_model():
    torch.manual_seed(0)
    return LanguageModel(ModelSettings(layers=2)).eval()


class Experts(nn.Module):
    """Batched weights (experts, out, in), and a parameter that is no matrix."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 64, 128))
        self.bias = nn.Parameter(torch.randn(3, 64))
        self.router = nn.Linear(128, 3)

    def forward(self, x):
        best = self.router(x).argmax(-1)
        # Every token twice: products of one row have bits of their own.
        pairs = zip(x[:, None].expand(-1, 2, -1), best.tolist(), strict=True)
        return torch.stack([nn.functional.linear(rows, self.up[i])[0] for rows, i in pairs])


def test_a_language_model_end_to_end():
    model = language_model()
    dense, weights = copy.deepcopy(model), {n: p.detach().clone() for n, p in model.named_parameters()}
    report = quantize_(model, Int8WeightOnlyConfig())
    for name, parameter in model.named_parameters():
        if name.endswith("proj.weight") or name == "lm_head.weight":
            value = reference.dequantize(reference.quantize(weights[name], "int8_rowwise"))
            assert torch.equal(parameter.dequantize(), value)
            dense.get_parameter(name).data.copy_(value)
        else:
            assert torch.equal(parameter, weights[name])
    # Large weights are decoded on the way to the products, whose sums have another order.
    torch.testing.assert_close(model(TOKENS), dense(TOKENS))
    assert len(report.changed) == 15
    assert [(layer.name, layer.reason) for layer in report.left] == [
        ("model.embed_tokens.weight", "Embedding: by default (no filter_fn) only nn.Linear")
    ]
    assert explain(model) == report
    assert "15 of 16 layers" in str(report)


def test_filter_gets_modules_and_names():
    model, seen = language_model(), []
    report = quantize_(
        model, Int8WeightOnlyConfig(), lambda m, name: bool(seen.append((type(m), name))) or "mlp" in name
    )
    assert (nn.Embedding, "model.embed_tokens") in seen
    assert {layer.name.split(".")[-2] for layer in report.changed} == {"up_proj", "gate_proj", "down_proj"}
    assert all(layer.reason == "accepted by filter_fn" for layer in report.changed)
    assert all(layer.reason == "refused by filter_fn" for layer in report.left)


def test_embeddings_have_no_activations():
    model = language_model()
    config = Int8DynamicActivationInt8WeightConfig()
    report = quantize_(model, config, lambda m, name: isinstance(m, nn.Embedding))
    table = model.model.embed_tokens.weight
    assert isinstance(table, QuantizedTensor)
    assert table.recipe.activation is None
    assert report.changed[0].kernel == "embedding"
    value = table.dequantize()
    assert torch.equal(model.model.embed_tokens(TOKENS), nn.functional.embedding(TOKENS, value))


@pytest.mark.parametrize(
    "config",
    [
        Int8WeightOnlyConfig(kernel="dequantize"),
        Int8DynamicActivationInt8WeightConfig(),
        MXWeightOnlyConfig(kernel="dequantize"),
    ],
)
def test_experts(config):
    model, x = Experts(), torch.randn(5, 128)
    expected = quantize_(copy.deepcopy(model), config, lambda m, name: isinstance(m, Experts))
    assert [layer.name for layer in expected.changed] == ["up"]
    dense = copy.deepcopy(model)
    quantize_(model, config, lambda m, name: name == "")
    assert torch.equal(
        model.up.dequantize(),
        reference.dequantize(reference.quantize(dense.up.detach(), config.recipe().weight)),
    )
    if config.recipe().activation is None:
        dense.up.data.copy_(model.up.dequantize())
        assert torch.equal(model(x), dense(x))
    else:
        assert model(x).shape == (5, 64)


def test_a_filter_that_matches_nothing_raises():
    with pytest.raises(ValueError, match=r"matches nothing.*embed_tokens"):
        quantize_(language_model(), Int8WeightOnlyConfig(), lambda m, name: name.endswith("nowhere"))
    with pytest.raises(ValueError, match=r"has no nn\.Linear"):
        quantize_(nn.ReLU(), Int8WeightOnlyConfig())


def test_most_layers_left_by_groups_is_a_warning():
    """One, with groups that divide all, in the words of the configuration; none where the half or more is quantized."""

    def net(*lengths):
        return nn.Sequential(*(nn.Linear(length, 8) for length in lengths))

    said = (
        r"^quantize_: 2 of 3 layers stay unquantized: groups of 128 do not divide their inputs \(576, 960\); "
    )
    with pytest.warns(UserWarning, match=f"{said}group_size=64 or 32 quantizes all of them$"):
        report = quantize_(net(128, 576, 960), Int4WeightOnlyConfig())
    assert report.left[0].reason.endswith("by the block size 128 along axis 1; use group_size=64 or 32")
    grouped = ao_lab.IntxWeightOnlyConfig("int4", ao_lab.PerGroup(128))
    for lora in (None, ao_lab.LoRA(4)):
        config = ao_lab.QATConfig(grouped, step="prepare", lora=lora)
        with pytest.warns(
            UserWarning, match=rf"{said}PerGroup\(64\) or PerGroup\(32\) quantizes all of them$"
        ):
            quantize_(net(128, 576, 960), config)
    quantize_(net(128, 576), Int4WeightOnlyConfig())


def test_shapes_that_blocks_do_not_divide_are_left_and_said():
    model = nn.Sequential(nn.Linear(96, 64), nn.Linear(64, 100))
    report = quantize_(model, Int4WeightOnlyConfig(group_size=64))
    assert "96 elements are not divisible by the block size 64" in report.left[0].reason
    assert report.changed[0].name == "1.weight"
    with pytest.raises(ValueError, match="none of them can be changed"):
        quantize_(model, Int4WeightOnlyConfig(group_size=64))
    with pytest.raises(
        ValueError,
        match=r"^quantize_: groups of 128 divide the inputs of no layer \(96, 160\); use group_size=32$",
    ):
        quantize_(nn.Sequential(nn.Linear(96, 64), nn.Linear(160, 64)), Int4WeightOnlyConfig(group_size=128))
    layers = [nn.Linear(length, 8) for length in (96, 96, 200)]
    with pytest.raises(
        ValueError,
        match=r"no layer \(96, 200\); use group_size=32, which fits 2 of 3 layers; for all of them use group_size=8$",
    ):
        quantize_(nn.Sequential(*layers), Int4WeightOnlyConfig(group_size=128))
    with pytest.raises(
        ValueError, match=r"groups of 7 divide the inputs of no layer \(576\); use group_size=32$"
    ):
        quantize_(nn.Linear(576, 8), Int4WeightOnlyConfig(group_size=7))
    with pytest.raises(
        ValueError, match=r"groups of 4 divide the inputs of no layer \(9\); use one scale per row"
    ):
        quantize_(nn.Linear(9, 4), Int4WeightOnlyConfig(group_size=4), lambda m, name: True)


def test_a_second_call_keeps_what_is_quantized():
    model = language_model()
    quantize_(model, Int8WeightOnlyConfig(), lambda m, name: "mlp" in name)
    before = {n: p for n, p in model.named_parameters() if isinstance(p, QuantizedTensor)}
    report = quantize_(model, Int4WeightOnlyConfig())
    assert all(model.get_parameter(name) is parameter for name, parameter in before.items())
    reasons = {layer.name: layer.reason for layer in report.changed}
    assert reasons["model.layers.0.mlp.up_proj.weight"] == "accepted by filter_fn"
    assert {layer.scheme for layer in report.changed} == {"int8_rowwise", "int4_g128_asymmetric"}


def test_a_kernel_that_cannot_is_found_before_anything_changes():
    model = language_model()
    with pytest.raises(ValueError, match="kernel 'int8' does not take"):
        quantize_(model, SchemeConfig(scheme="mxfp4", kernel="int8"))
    assert not any(isinstance(p, QuantizedTensor) for p in model.parameters())


def test_a_file_of_choices_that_cannot_be_read_stops_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("AO_LAB_CACHE", str(tmp_path))
    model, path = nn.Sequential(nn.Linear(128, 32)), choices.path_of(torch.device("cpu"))
    path.parent.mkdir(parents=True)
    path.write_text('{"format": 3, "device": "NVIDIA B200", "choices": []}')
    choices.forget()
    try:
        with pytest.warns(UserWarning, match=rf"{re.escape(str(path))}.*B200.*not of 'cpu.*remove it"):
            quantize_(model, Int8WeightOnlyConfig())
        assert isinstance(model[0].weight, QuantizedTensor)
    finally:
        choices.forget()


def test_quantizing_twice_says_the_way_out():
    model = nn.Sequential(nn.Linear(128, 32), nn.Linear(32, 128))
    quantize_(model, Int8WeightOnlyConfig())
    message = (
        r"none of them can be changed: 0\.weight, 1\.weight already quantized; .* load the dense model again"
    )
    with pytest.raises(ValueError, match=message):
        quantize_(model, Int4WeightOnlyConfig())


def test_a_filter_is_a_function():
    with pytest.raises(TypeError, match=r"filter_fn is a function .* got '0'; FqnToConfig takes names"):
        quantize_(nn.Sequential(nn.Linear(128, 32)), Int8WeightOnlyConfig(), "0")


def test_shared_weights_stay_shared():
    model = language_model()
    model.lm_head.weight = model.model.embed_tokens.weight
    quantize_(model, Int8WeightOnlyConfig(), lambda m, name: isinstance(m, (nn.Linear, nn.Embedding)))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    other = language_model()
    other.lm_head.weight = other.model.embed_tokens.weight
    report = quantize_(other, Int8WeightOnlyConfig(), lambda m, name: isinstance(m, nn.Linear))
    assert other.lm_head.weight is not other.model.embed_tokens.weight
    assert {layer.name: layer.reason for layer in report.layers}["lm_head.weight"] == (
        "accepted by filter_fn; was shared with model.embed_tokens.weight, which stays dense"
    )


@pytest.mark.parametrize("how", ["without a filter", "linear_and_experts", "_default"])
def test_a_tied_head_stays_unless_it_is_named(how):
    """Quantized it would be stored beside the embedding; any other layer is taken, a head of its own too."""
    config, filter_fn = Int8WeightOnlyConfig(), linear_and_experts if how == "linear_and_experts" else None
    config = FqnToConfig({"_default": config}) if how == "_default" else config
    untied = {layer.name for layer in quantize_(language_model(), config, filter_fn).changed}
    assert "lm_head.weight" in untied
    model = language_model()
    model.lm_head.weight = model.model.embed_tokens.weight
    report = quantize_(model, config, filter_fn)
    assert {layer.name for layer in report.changed} == untied - {"lm_head.weight"}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    reasons = {layer.name: layer.reason for layer in report.left}
    assert "its weight is that of model.embed_tokens, which stays unquantized" in reasons["lm_head.weight"]
    quantize_(model, FqnToConfig({"lm_head": Int8WeightOnlyConfig()}))
    assert type(model.lm_head.weight) is not type(model.model.embed_tokens.weight)


def test_one_weight_in_two_schemes_is_refused():
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)})
    model["b"].weight = model["a"].weight
    config = FqnToConfig({"a": Int8WeightOnlyConfig(), "b": MXWeightOnlyConfig()})
    with pytest.raises(ValueError, match=r"a\.weight and b\.weight share"):
        quantize_(model, config)


def test_other_objects_are_no_configurations():
    with pytest.raises(TypeError, match=r"torchao's under the same names"):
        quantize_(language_model(), object())
    with pytest.raises(TypeError, match="configuration or None"):
        FqnToConfig({"a": 3})
    with pytest.raises(ValueError, match="leave filter_fn out"):
        quantize_(language_model(), FqnToConfig({"_default": Int8WeightOnlyConfig()}), lambda m, name: True)


def test_names_come_before_patterns_and_both_before_the_default():
    model = language_model()
    config = FqnToConfig(
        OrderedDict(
            {
                "_default": Int8WeightOnlyConfig(),
                r"re:model\.layers\.\d+\.mlp\..*": MXWeightOnlyConfig(),
                r"re:.*up_proj.*": SchemeConfig(scheme="nf4"),
                "model.layers.0.mlp.up_proj": SchemeConfig(scheme="mxfp4"),
                "model.layers.0.mlp.up_proj.weight": SchemeConfig(scheme="nvfp4"),
                "model.layers.1.self_attn": None,
                "model.layers.1.mlp.down_proj": None,
            }
        )
    )
    with pytest.raises(ValueError, match=r"'model\.layers\.1\.self_attn' match nothing"):
        quantize_(model, config)
    del config.fqn_to_config["model.layers.1.self_attn"]
    del config.fqn_to_config[r"re:.*up_proj.*"]
    report = {
        layer.name.removesuffix(".weight"): (layer.scheme, layer.reason)
        for layer in quantize_(model, config).layers
    }
    assert report["model.layers.0.mlp.up_proj"] == (
        "nvfp4",
        "FqnToConfig 'model.layers.0.mlp.up_proj.weight'",
    )
    assert report["model.layers.1.mlp.up_proj"][0] == "mxfp8_e4m3_rceil"
    assert report["model.layers.1.mlp.down_proj"] == (
        "",
        "FqnToConfig 'model.layers.1.mlp.down_proj' is None",
    )
    assert report["model.layers.0.self_attn.q_proj"] == ("int8_rowwise", "FqnToConfig '_default'")
    assert report["model.embed_tokens"] == ("", "no name or pattern of FqnToConfig matches it")


def test_the_first_pattern_decides_and_must_match_the_whole_name():
    model = language_model()
    config = FqnToConfig({"re:.*mlp.up_proj": MXWeightOnlyConfig(), "re:.*mlp.*": Int8WeightOnlyConfig()})
    report = {layer.name: layer.scheme for layer in quantize_(model, config).changed}
    # A pattern that matches the parameter's own name comes before one of its module.
    assert set(report.values()) == {"int8_rowwise"}
    with pytest.raises(ValueError, match="'re:mlp' match nothing"):
        quantize_(language_model(), FqnToConfig({"re:mlp": Int8WeightOnlyConfig()}))
    with pytest.raises(ValueError, match="no regular expression"):
        FqnToConfig({"re:(": Int8WeightOnlyConfig()})


def test_integers_and_float8_are_left():
    with pytest.raises(ValueError, match=r"torch\.float8_e4m3fn"):
        quantize_(nn.Linear(64, 64).to(torch.float8_e4m3fn), Int8WeightOnlyConfig())


def test_one_matrix_is_no_batch_of_experts():
    """Positions of a vision model have three axes, too, and are added."""
    model = nn.Sequential(nn.Linear(64, 64))
    model.positions = nn.Parameter(torch.zeros(1, 16, 64))
    report = quantize_(model, Int8WeightOnlyConfig(), lambda m, name: True)
    assert [(layer.name, layer.changed) for layer in report.layers] == [
        ("positions", False),
        ("0.weight", True),
    ]
    assert "not a batch of experts" in report.left[0].reason


def test_attention_of_torch_keeps_its_output():
    """Its fast path reads the output's weight as memory."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    report = quantize_(layer, Int8WeightOnlyConfig())
    assert [item.name for item in report.changed] == ["linear1.weight", "linear2.weight"]


def test_a_quantized_model_is_copied_and_pickled():
    model = language_model()
    report = quantize_(model, Int4WeightOnlyConfig())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(TOKENS), model(TOKENS))
        assert explain(other) == report


def test_quantized_weights_take_no_gradient():
    model = language_model()
    quantize_(model, Int8WeightOnlyConfig())
    model(TOKENS).sum().backward()
    assert model.model.embed_tokens.weight.grad is not None
    assert model.lm_head.weight.grad is None


@pytest.mark.parametrize(
    "made",
    [
        nn.Conv2d(8, 8, 3), nn.Conv1d(8, 8, 3), nn.LSTM(8, 8), nn.GRU(8, 8), nn.Bilinear(8, 8, 8),
        nn.MultiheadAttention(8, 2),
    ],
    ids=lambda module: type(module).__name__,
)  # fmt: skip
def test_what_a_filter_accepts_and_is_no_layer_is_listed(made):
    """With its reason, by explain too; alone it is named in the error."""
    model = nn.Sequential(made, nn.Linear(64, 64))
    report = quantize_(model, Int8WeightOnlyConfig(), lambda m, name: name in ("0", "1"))
    reason = f"{type(made).__name__}: of modules that hold weights nn.Linear, nn.Embedding and batched experts are quantized"
    assert [layer.name for layer in report.changed] == ["1.weight"]
    assert reason in {layer.reason for layer in report.left}
    assert reason in {layer.reason for layer in explain(model).left}
    with pytest.raises(
        ValueError,
        match=f"matches layers, but none of them can be changed.*{type(made).__name__}: of modules",
    ):
        quantize_(nn.Sequential(made), Int8WeightOnlyConfig(), lambda m, name: name == "0")
    with pytest.raises(ValueError, match="none of them can be changed"):
        quantize_(nn.Sequential(made), FqnToConfig({"0": Int8WeightOnlyConfig()}))


@pytest.mark.parametrize("kind", [Int8WeightOnlyConfig, FqnToConfig])
def test_a_class_in_place_of_a_configuration(kind):
    with pytest.raises(TypeError, match=rf"call it: {kind.__name__}\(\)"):
        quantize_(language_model(), kind)
    with pytest.raises(TypeError, match=r"call it: Int8WeightOnlyConfig\(\)"):
        FqnToConfig({"lm_head": Int8WeightOnlyConfig})


# What `print(model)` shows of quantized weights, and that nothing else of a module has changed for it.


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8, 64), nn.Linear(64, 32), nn.Linear(32, 8, bias=False), ByLinear())


def test_schemes_are_shown():
    model = small()
    before = repr(model)
    quantize_(model, Int4WeightOnlyConfig(group_size=32), lambda m, name: name == "1")
    quantize_(model, Int8WeightOnlyConfig(), lambda m, name: name in ("0", "3"))
    shown = repr(model)
    assert "Linear(in_features=64, out_features=32, bias=True, weight=int4_g32_asymmetric)" in shown
    assert "Linear(in_features=32, out_features=8, bias=False)" in shown
    assert "Embedding(8, 64, weight=int8_rowwise)" in shown
    assert "ByLinear(up=int8_rowwise)" in shown
    assert repr(small()) == before
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert repr(other) == shown
        assert type(other[1]) is nn.Linear
        assert vars(other[1]).keys() == vars(nn.Linear(2, 2)).keys()
        assert list(other.state_dict()) == list(small().state_dict())


def test_compressed_weights_are_shown():
    model = nn.Sequential(nn.Linear(64, 32))
    sparsify_(model, SparsityConfig(storage="dense"))
    quantize_(model, Int8WeightOnlyConfig(sparsity="2:4"))
    assert "weight=int8_rowwise_2:4" in repr(model)


def test_a_module_of_ones_own_keeps_its_text():
    class Own(nn.Linear):
        def extra_repr(self):
            return "own"

    model = nn.Sequential(Own(64, 32), nn.ReLU(inplace=True))
    quantize_(model, Int8WeightOnlyConfig())
    assert "Own(own)" in repr(model)
    assert "ReLU(inplace=True)" in repr(model)
