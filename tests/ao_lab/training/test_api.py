"""Conversion of models: in place, all or nothing, listed; checkpoints load both ways."""

import copy
import io
from dataclasses import fields

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import ao_lab
from ao_lab.training import layers
from ao_lab.training.float8 import (
    CastConfig,
    Float8GemmConfig,
    Float8LinearConfig,
    ScalingGranularity,
    ScalingType,
)
from ao_lab.training.layers import LowPrecisionLinear
from reference.training.recipe import RECIPES
from tests.ao_lab.training.grouped.test_experts import GroupedExperts
from tests.support.refusals import refused

# What is converted and what stays: everything that a filter accepts is in the report, and nothing is computed past it.


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
    with pytest.raises(ValueError, match=r"supports none of 1 selected layers; conv: .* Conv2d"):
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
    with pytest.raises(
        ValueError, match=r"supports none of 1 selected layers; its weight is torch\.complex64"
    ):
        ao_lab.convert_for_training_(nn.Linear(64, 64, dtype=torch.complex64), "rowwise")


def test_lazy_layers_are_refused_before_any_changes():
    net = nn.Sequential(nn.Linear(64, 64), nn.LazyLinear(64), nn.LazyConv2d(4, 3))
    with pytest.raises(ValueError, match="1: a LazyLinear has no shape yet; run one forward"):
        ao_lab.convert_for_training_(net, "rowwise")
    assert type(net[0]) is nn.Linear
    ao_lab.convert_for_training_(net, "rowwise", lambda module, name: name == "0")
    assert type(net[0]) is LowPrecisionLinear


def model(dtype=torch.bfloat16, outputs=128):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, outputs, bias=False)).to(dtype)


def test_the_module_its_parameters_and_hooks_stay():
    net = model()
    first, weight, seen = net[0], net[0].weight, []
    first.register_forward_hook(lambda *_: seen.append(1))
    names = list(net.state_dict())
    report = ao_lab.convert_for_training_(net, "rowwise")
    assert report.changed == ("0", "2")
    assert net[0] is first
    assert net[0].weight is weight
    assert list(net.state_dict()) == names
    net(torch.randn(5, 128).bfloat16())
    assert seen == [1]
    assert "recipe=rowwise" in repr(net)


@pytest.mark.parametrize("name", RECIPES)
def test_checkpoints_load_both_ways(name):
    trained, plain = model(), model()
    ao_lab.convert_for_training_(trained, name)
    nn.init.normal_(trained[0].weight)
    stored = io.BytesIO()
    torch.save(trained.state_dict(), stored)
    stored.seek(0)
    plain.load_state_dict(torch.load(stored, weights_only=True))
    assert torch.equal(plain[0].weight, trained[0].weight)
    trained.load_state_dict(model().state_dict())


def test_training_learns():
    """Forty steps of every recipe: the loss falls to a tenth, as bfloat16's does."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 128, generator=generator).bfloat16()
    y = torch.randint(16, (64,), generator=generator)
    for name in RECIPES:
        net = model(outputs=16)
        ao_lab.convert_for_training_(net, name, pad=True)
        optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
        losses = []
        for _ in range(40):
            loss = nn.functional.cross_entropy(net(x).float(), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0] / 10, name


def test_layers_that_a_recipe_cannot_take_are_listed():
    net = model(outputs=10)
    report = ao_lab.convert_for_training_(net, "rowwise")
    assert report.changed == ("0",)
    assert "out_features = 10 is no multiple of 16" in report.left["2"]
    assert "1 of 2 layers train by rowwise; on CPUs quantized operands are multiplied in float32" in str(
        report
    )
    # A model that trains says so itself; a layer without quantize_ is none that it missed.
    lines = str(ao_lab.explain(net)).splitlines()
    assert lines[0] == "1 of 2 layers train by rowwise"
    assert lines[1] == "  0.weight  trains by recipe 'rowwise'"
    assert lines[2].startswith("  2.weight  left: convert_for_training_ did not convert it")
    assert str(ao_lab.convert_from_training_(net)) == "1 modules no longer train in low precision\n  0"
    odd = nn.ModuleDict({"a": nn.Linear(30, 32), "b": nn.Linear(32, 30)})
    with pytest.raises(
        ValueError, match=r"a: in_features = 30 .*pad=True pads it.*; b: out_features = 30 .*pad=True"
    ):
        ao_lab.convert_for_training_(odd, "mxfp8")
    assert type(net[2]) is nn.Linear


def test_padding_takes_them():
    """Columns of zeros change nothing: the same outputs as of a layer that has them."""
    net = model(outputs=10)
    wide = copy.deepcopy(net)
    wide[2] = nn.Linear(256, 16, bias=False).bfloat16()
    with torch.no_grad():
        wide[2].weight.zero_()[:10] = net[2].weight
    x = torch.randn(7, 128).bfloat16()
    for one in (net, wide):
        ao_lab.convert_for_training_(one, "rowwise", pad=True)
    assert torch.equal(net(x), wide(x)[:, :10])


@pytest.mark.parametrize("rows", [1, 7, 31, 33])
def test_any_number_of_rows(rows):
    net = model()
    ao_lab.convert_for_training_(net, "mxfp8")
    x = torch.randn(rows, 128).bfloat16().requires_grad_()
    y = net(x)
    y.float().square().sum().backward()
    assert y.shape == (rows, 128)
    assert x.grad.shape == x.shape
    assert x.grad.isfinite().all()


def test_no_rows():
    net = model()
    ao_lab.convert_for_training_(net, "rowwise")
    assert net(torch.empty(0, 128).bfloat16()).shape == (0, 128)


def test_wrong_calls_change_nothing():
    net = model(outputs=10)
    refused(ValueError, "unknown recipe 'rowise'", ao_lab.convert_for_training_, net, "rowise")
    with pytest.raises(ValueError, match="filter_fn refused all"):
        ao_lab.convert_for_training_(net, "rowwise", lambda module, name: False)
    with pytest.raises(ValueError, match="supports none of 1 selected layers; 2: out_features = 10"):
        ao_lab.convert_for_training_(net, "rowwise", lambda module, name: name == "2")
    refused(TypeError, r"torch\.nn\.Module", ao_lab.convert_for_training_, "net", "rowwise")
    assert not any(isinstance(module, LowPrecisionLinear) for module in net.modules())


def test_a_second_conversion_says_what_is_there():
    net = model()
    ao_lab.convert_for_training_(net, "rowwise")
    with pytest.raises(
        ValueError, match=r"trains with recipe .rowwise. already; ao_lab.convert_from_training_"
    ):
        ao_lab.convert_for_training_(net, "mxfp8")
    assert ao_lab.convert_from_training_(net) == ("0", "2")
    ao_lab.convert_for_training_(net, "mxfp8")


def test_tied_layers_are_converted_once():
    net = model()
    net.append(net[2])
    assert ao_lab.convert_for_training_(net, "rowwise").changed == ("0", "2", "3")
    assert ao_lab.convert_from_training_(net) == ("0", "2", "3")


def test_inputs_of_another_dtype_and_autocast():
    net = model(torch.float32)
    ao_lab.convert_for_training_(net, "rowwise")
    x = torch.randn(4, 128)
    refused(TypeError, r"inputs are torch.bfloat16.*autocast", net, x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert net(x).dtype == torch.bfloat16


def test_explain_and_deepcopy():
    net = model()
    ao_lab.convert_for_training_(net, "rowwise")
    assert "trains by recipe 'rowwise'" in str(ao_lab.explain(net))
    again = copy.deepcopy(net)
    x = torch.randn(4, 128).bfloat16()
    assert torch.equal(again(x), net(x))
    refused(ValueError, "convert_from_training_", ao_lab.quantize_, net, ao_lab.Int8WeightOnlyConfig())


# torch's tracer makes an instance of the function, of which torch itself warns.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", ["rowwise", "tensorwise", "mxfp8"])
def test_compiled_in_one_graph(name):
    net = model()
    ao_lab.convert_for_training_(net, name)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    grads = []
    for step in (net, compiled):
        net.zero_grad()
        step(torch.ones(16, 128).bfloat16()).float().sum().backward()
        grads.append(net[0].weight.grad.clone())
    assert torch.equal(*grads)


# Compiled layers with an open number of rows.

#: A block of 32 rows or several: torch itself compiles one scale along an axis apart from several.
TWO = ("mxfp8", "mxfp6")
#: The others draw random numbers, and run between compiled programs.
TRACED = tuple(name for name, recipe in RECIPES.items() if not recipe.is_stochastic)


# torch's tracer makes an instance of the function, of which torch itself warns.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "name", ["rowwise", *(pytest.param(one, marks=pytest.mark.nightly) for one in TRACED if one != "rowwise")]
)
def test_one_program_for_any_number_of_rows(name):
    """The bits of the layer that is not compiled, whether blocks divide the rows or not."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64))
    ao_lab.convert_for_training_(net, name, pad=True)
    torch.compiler.reset()
    programs, aot_eager = [], torch._dynamo.lookup_backend("aot_eager")

    def counted(*given):
        programs.append(given)
        return aot_eager(*given)

    compiled = torch.compile(net, backend=counted, dynamic=True, fullgraph=True)
    for rows in (8, 33, 64, 100):
        x = torch.randn(rows, 64)
        made = []
        for step in (compiled, net):
            net.zero_grad()
            y = step(x)
            y.square().sum().backward()
            made.append((y.detach(), net[0].weight.grad.clone()))
        assert torch.equal(made[0][0], made[1][0])
        assert torch.equal(made[0][1], made[1][1])
    torch.compiler.reset()
    assert len(programs) == (2 if name in TWO else 1)


@pytest.mark.parametrize("name", RECIPES)
def test_layers_of_no_memory(name):
    """Shapes and dtypes of a training step on the meta device, as estimates of memory ask for; it has no autocast."""
    net = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    ao_lab.convert_for_training_(net, name)
    x = torch.ones(16, 128, device="meta", requires_grad=True)
    y = net.to("meta")(x)
    y.sum().backward()
    assert (y.shape, y.device.type, y.dtype) == (x.shape, "meta", x.dtype)
    assert (x.grad.shape, net[0].weight.grad.shape) == (x.shape, (128, 128))


# torchao's configurations mean the recipes of these names.


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_recipes_by_name(name):
    assert Float8LinearConfig.from_recipe_name(name).recipe() is RECIPES[name]


def test_defaults_are_tensorwise():
    assert Float8LinearConfig().recipe() is RECIPES["tensorwise"]
    net = ao_lab.convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)))
    assert isinstance(net[0], LowPrecisionLinear)


def test_fields_reach_the_recipe():
    row = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE, target_dtype=torch.float8_e5m2)
    config = Float8LinearConfig(
        cast_config_weight=row, gemm_config_grad_weight=Float8GemmConfig(use_fast_accum=True)
    )
    recipe = config.recipe()
    assert recipe.output.b.scheme.name == "fp8_rowwise_e5m2"
    assert recipe.input_grad.b.scheme.name == "fp8_rowwise_e5m2"
    assert recipe.output.a.scheme.name == "fp8_tensorwise"
    assert [p.accumulation for p in (recipe.output, recipe.input_grad, recipe.weight_grad)] == [
        "fast",
        "precise",
        "fast",
    ]
    assert (
        Float8LinearConfig(round_scales_to_power_of_2=True).recipe().output.a.scheme.scale.rule
        == "ratio_pow2"
    )


def test_one_cast_for_two_tensors_keeps_its_dtype_apart():
    """torchao fills the dtype in place, so that an instance for inputs and gradients makes gradients e4m3."""
    shared = CastConfig()
    recipe = Float8LinearConfig(cast_config_input=shared, cast_config_grad_output=shared).recipe()
    assert (recipe.output.a.scheme.element, recipe.input_grad.a.scheme.element) == (
        "float8_e4m3fn",
        "float8_e5m2",
    )
    assert shared.target_dtype is None


def test_wrong_configurations():
    with pytest.raises(ValueError, match="tensorwise, rowwise, rowwise_with_gw_hp"):
        Float8LinearConfig.from_recipe_name("blockwise")
    refused(ValueError, "target_dtype", CastConfig, target_dtype=torch.float16)
    with pytest.raises(ValueError, match="both operands of output"):
        Float8LinearConfig(cast_config_input=CastConfig(ScalingType.DISABLED))
    with pytest.raises(TypeError, match="Float8LinearConfig"):
        ao_lab.convert_to_float8_training(nn.Linear(32, 32), config="rowwise")


def test_padding_and_emulation():
    net = nn.Sequential(nn.Linear(20, 30))
    config = Float8LinearConfig(pad_inner_dim=True, emulate=True)
    ao_lab.convert_to_float8_training(net, config=config)
    assert net(torch.randn(3, 20)).shape == (3, 30)


@pytest.mark.parametrize("name", ["CastConfig", "Float8GemmConfig", "Float8LinearConfig"])
def test_fields_and_defaults_are_those_of_torchao(name):
    """Same names in the same order, so that a user switches by changing the import."""
    theirs = getattr(pytest.importorskip("torchao.float8.config"), name)
    ours = getattr(ao_lab, name)
    assert [field.name for field in fields(ours)] == [field.name for field in fields(theirs)]
    for mine, other in zip(fields(ours), fields(theirs), strict=True):
        if isinstance(mine.default, bool | None):
            assert mine.default == other.default, mine.name


def test_padded_layers_and_the_cost_on_a_cpu_are_said():
    net = nn.Sequential(nn.Linear(30, 40), nn.Linear(64, 64), nn.Embedding(3, 4))
    lines = str(ao_lab.convert_for_training_(net, "mxfp8", pad=True)).splitlines()
    assert "several times slower than in bfloat16" in lines[0]
    assert lines[1] == "  0  trains, in_features 30 padded to 32, out_features 40 padded to 64"
    assert lines[2:] == [
        "  1  trains",
        "  2  left: recipes train nn.Linear and batched experts, and this is an Embedding",
    ]


def test_quantized_weights_do_not_train():
    """They would get no gradient; with padding as without."""
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    ao_lab.quantize_(net, ao_lab.Int8WeightOnlyConfig(), lambda module, name: name == "0")
    report = ao_lab.convert_for_training_(net, "rowwise", pad=True)
    assert report.changed == ("1",)
    assert report.left["0"].startswith("its weight is quantized")
    assert "  1  trains" in str(report).splitlines()
    ao_lab.convert_from_training_(net)
    refused(ValueError, "its weight is quantized", ao_lab.convert_for_training_, net[:1], "rowwise", pad=True)
