"""Static scales from data: `forward_loop`, torchao's steps, hooks that never stay, layers that nothing reached."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

import reference
from ao_lab import (
    Float8StaticActivationFloat8WeightConfig,
    FqnToConfig,
    Int8StaticActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    MovingAverage,
    QuantizedTensor,
    calibrate,
    explain,
    load_pretrained,
    quantize_,
    quantized,
    save_pretrained,
)
from ao_lab.config.recipe import named
from ao_lab.transforms.data import Watch
from experiments.models.llama import LanguageModel, ModelSettings

BATCHES = [torch.arange(i, i + 24).reshape(2, 12) for i in (0, 50, 100)]
INT8, FLOAT8 = Int8StaticActivationInt8WeightConfig(), Float8StaticActivationFloat8WeightConfig()
ASYMMETRIC = Int8StaticActivationInt8WeightConfig(act_mapping_type="ASYMMETRIC")


def language_model():
    torch.manual_seed(0)
    return LanguageModel(ModelSettings(layers=2)).eval()


def loop(model):
    with torch.no_grad():
        for batch in BATCHES:
            model(batch)


def inputs_of(model, run):
    """What each linear layer was given, all calls together."""
    seen, handles = {}, []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            handles.append(module.register_forward_pre_hook(
                lambda m, args, name=name: seen.setdefault(f"{name}.weight", []).append(args[0].detach().reshape(-1))
            ))  # fmt: skip
    run(model)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(tensors) for name, tensors in seen.items()}


def hooks(model):
    return [
        hook
        for module in model.modules()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_pre_hooks_with_kwargs.values())
    ]


def assert_scales(model, inputs, scheme):
    for name, x in inputs.items():
        weight, expected = model.get_parameter(name), reference.choose_scales(x, named(scheme))
        assert torch.equal(weight.input_scale, expected.scale)
        assert (weight.input_zero is None) == (expected.zero is None)
        assert weight.input_zero is None or torch.equal(weight.input_zero, expected.zero)


@pytest.mark.parametrize(
    ("config", "scheme"),
    [(INT8, "int8_tensorwise"), (ASYMMETRIC, "int8_tensorwise_asymmetric"), (FLOAT8, "fp8_tensorwise")],
)
def test_scales_are_those_of_all_inputs(config, scheme):
    model = language_model()
    inputs = inputs_of(model, loop)
    dense = {name: p.detach().clone() for name, p in model.named_parameters()}
    report = quantize_(model, config, forward_loop=loop)
    assert len(report.changed) == len(inputs) == 15
    assert_scales(model, inputs, scheme)
    assert hooks(model) == []
    for name in inputs:
        expected = quantized(
            dense[name], config.recipe(), input_scales=reference.choose_scales(inputs[name], named(scheme))
        )
        assert torch.equal(model.get_parameter(name), expected)
    assert model(BATCHES[0]).isfinite().all()


def test_the_scale_that_was_found_is_the_one_that_one_gives():
    layer, x = nn.Linear(64, 32), torch.randn(5, 64)
    other = copy.deepcopy(layer)
    quantize_(layer, INT8, forward_loop=lambda m: m(x))
    given = Int8StaticActivationInt8WeightConfig(act_quant_scale=layer.weight.input_scale)
    quantize_(other, given)
    assert torch.equal(layer(x), other(x))


@pytest.mark.parametrize(
    "kind", [Int8StaticActivationInt8WeightConfig, Float8StaticActivationFloat8WeightConfig]
)
def test_steps_give_the_same_as_the_loop(kind):
    model, other = language_model(), language_model()
    before = dict(model.named_parameters())
    report = quantize_(model, kind(step="prepare"))
    assert report.changed == ()
    assert {layer.reason for layer in report.left if layer.kind == "Linear"} == {
        "inputs are observed; step='convert' quantizes it"
    }
    assert all(p is before[name] for name, p in model.named_parameters())
    loop(model)
    quantize_(model, kind(step="convert"))
    quantize_(other, kind(), forward_loop=loop)
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))
    assert hooks(model) == []


def test_a_prepared_model_is_copied_and_pickled_with_its_statistics():
    model = nn.Sequential(nn.Linear(64, 64))
    quantize_(model, Int8StaticActivationInt8WeightConfig(step="prepare"))
    model(torch.ones(2, 64))
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    model(torch.full((2, 64), 5.0))
    scales = []
    for each in (*copies, model):
        quantize_(each, Int8StaticActivationInt8WeightConfig(step="convert"))
        scales.append(each[0].weight.input_scale.item() * 127)
        assert hooks(each) == []
    assert scales == pytest.approx([1.0, 1.0, 5.0], rel=1e-6)


def test_preparing_again_forgets():
    model = nn.Sequential(nn.Linear(64, 64))
    for value in (5.0, 1.0):
        quantize_(model, Int8StaticActivationInt8WeightConfig(step="prepare"))
        model(torch.full((2, 64), value))
    assert len([hook for hook in hooks(model) if isinstance(hook, Watch)]) == 1
    quantize_(model, Int8StaticActivationInt8WeightConfig(step="convert"))
    assert model[0].weight.input_scale.item() * 127 == pytest.approx(1.0, rel=1e-6)


def test_a_conversion_that_fails_keeps_the_watches():
    """More data can be run, and the next conversion succeeds."""
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)})
    quantize_(model, Int8StaticActivationInt8WeightConfig(step="prepare"))
    model["a"](torch.ones(1, 64))
    with pytest.raises(ValueError, match=r"no input was seen by b\.weight"):
        quantize_(model, Int8StaticActivationInt8WeightConfig(step="convert"))
    assert not isinstance(model["a"].weight, QuantizedTensor)
    model["b"](torch.ones(1, 64))
    assert len(quantize_(model, Int8StaticActivationInt8WeightConfig(step="convert")).changed) == 2


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_hooks_go_whatever_the_loop_raises(error):
    model = language_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def fails(m):
        m(BATCHES[0])
        assert len(hooks(m)) == 30  # each once as a hook, once as one that takes keywords
        raise error

    with pytest.raises(error):
        quantize_(model, INT8, forward_loop=fails)
    assert hooks(model) == []
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_other_hooks_stay():
    model, seen = nn.Sequential(nn.Linear(64, 64)), []
    model[0].register_forward_pre_hook(lambda m, args: seen.append(1))
    quantize_(model, Int8StaticActivationInt8WeightConfig(step="prepare"))
    model(torch.ones(2, 64))
    quantize_(model, Int8StaticActivationInt8WeightConfig(step="convert"))
    model(torch.ones(2, 64))
    assert seen == [1, 1]
    assert len(hooks(model)) == 1


def test_layers_that_nothing_reached_are_named():
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64), "c": nn.Linear(64, 64)})

    def only_a(m):
        m["a"](torch.ones(1, 64))
        nn.functional.linear(torch.ones(1, 64), m["b"].weight)
        m["c"](torch.full((1, 64), torch.nan))

    with pytest.raises(
        ValueError, match=r"no input was seen by b\.weight; NaN or infinity was seen by c\.weight"
    ):
        quantize_(model, INT8, forward_loop=only_a)
    assert not any(isinstance(p, QuantizedTensor) for p in model.parameters())
    assert explain(model).changed == ()
    quantize_(model, INT8, lambda m, name: name == "a", forward_loop=only_a)
    assert isinstance(model["a"].weight, QuantizedTensor)


@pytest.mark.parametrize("statistic", ["minmax", "absmax", "moving_average", "percentile"])
def test_zeros_have_no_range(statistic):
    """A scale of amax 0 says nothing of the inputs to come."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    nn.init.constant_(model[0].bias, -100.0)
    config = Int8StaticActivationInt8WeightConfig(statistic=statistic)
    with pytest.raises(
        ValueError, match=r"no range but that of zeros was seen .* by 2\.weight\. Nothing was"
    ):
        quantize_(model, config, forward_loop=lambda m: m(torch.ones(2, 64)))
    assert not any(isinstance(p, QuantizedTensor) for p in model.parameters())


@pytest.mark.parametrize(
    "data", [[torch.ones(1, 64)], torch.ones(1, 64), "text"], ids=["list", "tensor", "str"]
)
def test_batches_are_no_loop(data):
    model = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(TypeError, match=r"forward_loop is a function .*got .*; write lambda model: \[model"):
        calibrate(model, INT8, data)
    with pytest.raises(TypeError, match=r"forward_loop is a function"):
        quantize_(model, INT8, forward_loop=data)
    assert not model[0]._forward_pre_hooks


def test_modules_called_several_times_and_shared_weights_see_everything():
    """One module at two places, and two modules with one weight: one scale, of all inputs."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = self.again = nn.Linear(64, 64)
            self.tied = nn.Linear(64, 64)
            self.tied.weight = self.first.weight

        def forward(self, x):
            return self.tied(input=self.again(self.first(x)))

    torch.manual_seed(0)
    model, x = Model(), torch.randn(3, 64)
    once = model.first(x).detach()
    inputs = torch.cat([x, once, model.first(once).detach()])
    quantize_(model, ASYMMETRIC, forward_loop=lambda m: m(x))
    assert model.tied.weight is model.first.weight
    expected = reference.choose_scales(inputs, named("int8_tensorwise_asymmetric"))
    assert torch.equal(model.first.weight.input_scale, expected.scale)
    assert torch.equal(model.first.weight.input_zero, expected.zero)


def test_autocast_shows_what_the_product_takes():
    layer, x = nn.Linear(64, 64), torch.full((2, 64), 1.001)

    def run(m):
        with torch.autocast("cpu", torch.bfloat16):
            m(x)

    quantize_(layer, INT8, forward_loop=run)
    expected = reference.choose_scales(x.to(torch.bfloat16), named("int8_tensorwise"))
    assert torch.equal(layer.weight.input_scale, expected.scale)
    assert not torch.equal(
        layer.weight.input_scale, reference.choose_scales(x, named("int8_tensorwise")).scale
    )


def test_statistics_are_chosen_by_name_or_function():
    x = [torch.full((1, 64), 1.0), torch.full((1, 64), 9.0)]
    made = {}
    for statistic in ("minmax", "moving_average", lambda: MovingAverage(0.5), "percentile"):
        layer = nn.Linear(64, 64)
        config = Int8StaticActivationInt8WeightConfig(statistic=statistic)
        quantize_(layer, config, forward_loop=lambda m: [m(row) for row in x])
        made[str(statistic)[:6]] = layer.weight.input_scale.item() * 127
    assert list(made.values()) == pytest.approx([9.0, 1.08, 5.0, 9.0], rel=1e-6)


def test_layers_of_several_configurations():
    model = language_model()
    inputs = inputs_of(model, loop)
    config = FqnToConfig({"re:.*mlp.*": FLOAT8, "lm_head": Int8WeightOnlyConfig(), "_default": INT8})
    quantize_(model, config, forward_loop=loop)
    mlp = {name: x for name, x in inputs.items() if "mlp" in name}
    assert_scales(model, mlp, "fp8_tensorwise")
    rest = {name: x for name, x in inputs.items() if "mlp" not in name and name != "lm_head.weight"}
    assert_scales(model, rest, "int8_tensorwise")
    assert model.lm_head.weight.input_scale is None


def test_observers_of_an_earlier_calibration():
    model, other = language_model(), language_model()
    observers = calibrate(model, INT8, loop)
    assert hooks(model) == []
    assert not any(isinstance(p, QuantizedTensor) for p in model.parameters())
    quantize_(model, INT8, observers=observers)
    quantize_(other, INT8, forward_loop=loop)
    assert all(torch.equal(p, other.get_parameter(name)) for name, p in model.named_parameters())
    with pytest.raises(ValueError, match="leave forward_loop out"):
        quantize_(language_model(), INT8, observers=observers, forward_loop=loop)


def test_without_data_there_is_no_scale():
    with pytest.raises(ValueError, match=r"lm_head\.weight|and \d+ more.*needs calibration"):
        quantize_(language_model(), INT8)
    with pytest.raises(ValueError, match="needs calibration"):
        quantize_(language_model(), Int8StaticActivationInt8WeightConfig(step="convert"))
    with pytest.raises(ValueError, match="needs no calibration"):
        quantize_(language_model(), Int8WeightOnlyConfig(), forward_loop=loop)


def test_embeddings_are_not_watched_and_experts_cannot_be():
    model = nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 32))
    report = quantize_(model, INT8, lambda m, name: name != "", forward_loop=lambda m: m(torch.arange(4)))
    assert len(report.changed) == 2
    assert model[0].weight.input_scale is None
    experts = nn.Module()
    experts.up = nn.Parameter(torch.randn(4, 64, 64))
    with pytest.raises(ValueError, match="up: the inputs of batched experts"):
        quantize_(experts, replace(INT8, axis=-1), lambda m, name: True, forward_loop=lambda m: None)


def test_found_scales_are_saved(tmp_path):
    model = language_model()
    quantize_(model, INT8, forward_loop=loop)
    save_pretrained(model, tmp_path)
    again = load_pretrained(tmp_path, language_model())
    assert torch.equal(again(BATCHES[0]), model(BATCHES[0]))


def test_a_method_of_ones_own_makes_the_weight():
    """What GPTQ and its relatives need: the inputs by layer, then the weight."""

    class Halves:
        def __init__(self):
            self.names = []

        def observe(self, name, module, x):
            self.names.append((name, type(module).__name__, tuple(x.shape)))

        def unsupported_reason(self):
            return None if self.names else "no input was seen"

        def weight(self, dense, recipe, axis):
            return quantized(dense / 2, recipe, axis=axis)

    class Config(Int8WeightOnlyConfig):
        def observer(self):
            return Halves()

    layer, x = nn.Linear(64, 64, bias=False), torch.randn(3, 64)
    expected = quantized(layer.weight.detach() / 2, "int8_rowwise")
    observers = calibrate(layer, Config(), lambda m: m(x))
    assert observers["weight"].names == [("weight", "Linear", (3, 64))]
    quantize_(layer, Config(), observers=observers)
    assert torch.equal(layer.weight, expected)


def test_steps_of_torchao_are_understood():
    steps = pytest.importorskip("torchao.quantization.quantize_.common.quantization_step").QuantizationStep
    layer = nn.Linear(64, 64)
    quantize_(layer, Float8StaticActivationFloat8WeightConfig(step=steps.PREPARE))
    layer(torch.full((2, 64), 448.0))
    quantize_(layer, Float8StaticActivationFloat8WeightConfig(step=steps.CONVERT))
    assert layer.weight.input_scale == 1
    with pytest.raises(ValueError, match="step is one of"):
        Float8StaticActivationFloat8WeightConfig(step=steps.PREPARE_FOR_LOADING)
