"""Every configuration class, all the way: quantized, saved, loaded, compiled, exported, copied; the same bits everywhere."""

import copy
import io

import pytest
import torch
from torch import nn

import ao_lab
from ao_lab import (
    FqnToConfig,
    MappingType,
    PerAxis,
    PerBlock,
    PerGroup,
    PerRow,
    PerTensor,
    QuantizedTensor,
    explain,
    load_pretrained,
    quantize_,
    save_pretrained,
)

PAIR = (PerBlock((1, 128)), PerBlock((128, 128)))
#: Arguments to try of each class, {} where its defaults are enough.
ARGUMENTS = {
    "Float8DynamicActivationFloat8WeightConfig": [{}, {"granularity": PerRow()}, {"granularity": PAIR}],
    "Float8DynamicActivationInt4WeightConfig": [{}],
    "Float8StaticActivationFloat8WeightConfig": [{"act_quant_scale": 0.02}, {}],
    "Float8WeightOnlyConfig": [{}, {"weight_dtype": torch.float8_e5m2}],
    "Int4WeightOnlyConfig": [{}, {"group_size": 32}],
    "Int8DynamicActivationInt8WeightConfig": [{}, {"act_mapping_type": MappingType.ASYMMETRIC}],
    "Int8DynamicActivationIntxWeightConfig": [{"weight_dtype": torch.int4, "weight_granularity": PerGroup(64)}],
    "Int8StaticActivationInt8WeightConfig": [
        {"act_quant_scale": torch.tensor(0.02)},
        {"act_mapping_type": MappingType.ASYMMETRIC},
    ],
    "Int8WeightOnlyConfig": [{}, {"granularity": PerTensor()}],
    "IntxWeightOnlyConfig": [
        *({"weight_dtype": getattr(torch, f"int{bits}")} for bits in range(1, 9)),
        {"weight_dtype": "int5", "granularity": PerGroup(32), "mapping_type": "ASYMMETRIC"},
        {"weight_dtype": "int2", "granularity": PerAxis(0), "scale_dtype": torch.bfloat16},
    ],
    "LowBitWeightOnlyConfig": [{"bits": 1.58}, {}, {"bits": 1.58, "granularity": PerGroup(64)}, {"bits": 3}],
    "MXDynamicActivationMXWeightConfig": [{}, {"weight_dtype": "float4_e2m1fn_x2"}],
    "MXWeightOnlyConfig": [{}, {"weight_dtype": "fp6_e3m2"}, {"weight_dtype": "fp4_e2m1"}],
    "NF4WeightOnlyConfig": [{}],
    "NVFP4DynamicActivationNVFP4WeightConfig": [{}],
    "NVFP4WeightOnlyConfig": [{}],
    "SchemeConfig": [{"scheme": "mxint8", "activation_scheme": "int8_rowwise"}],
}  # fmt: skip
#: Integers of other widths differ in how their codes are packed, which `test_pack` looks at.
WIDTHS = (torch.int3, torch.int5, torch.int6, torch.int7)
CASES = [
    pytest.param(name, given, marks=pytest.mark.nightly if given.get("weight_dtype") in WIDTHS else ())
    for name, several in ARGUMENTS.items()
    for given in several
]
TOKENS = torch.tensor([[1, 2, 3, 9], [15, 0, 7, 4]])


class Net(nn.Module):
    """An embedding and two linear layers, one with a bias."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Embedding(16, 128)
        self.first = nn.Linear(128, 256)
        self.second = nn.Linear(256, 128, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1, generator=generator)
        self.to(dtype)

    def forward(self, tokens):
        return self.second(nn.functional.silu(self.first(self.table(tokens))))


def config_of(name, given):
    return getattr(ao_lab, name)(**given)


def network(config):
    """A quantized model; static scales that are not given are found with data."""
    net = Net().eval()
    layers = FqnToConfig({"re:first|second": config}) if isinstance(config, ao_lab.SchemeConfig) else config
    waits = config.observer() is not None
    quantize_(net, layers, forward_loop=(lambda model: model(TOKENS)) if waits else None)
    assert [layer.name for layer in explain(net).changed] == ["first.weight", "second.weight"]
    return net


def test_no_class_is_forgotten():
    classes = {
        name
        for name in ao_lab.__all__
        if name.endswith("Config")
        and not ao_lab.HOMES[name].startswith(("ao_lab.qat.", "ao_lab.sparsity.", "ao_lab.training."))
    }
    assert classes == {*ARGUMENTS, "FqnToConfig", "HfConfig"}


@pytest.mark.parametrize(("name", "given"), CASES)
def test_saved_and_loaded(name, given, tmp_path):
    net = network(config_of(name, given))
    with torch.no_grad():
        y = net(TOKENS)
        assert y.isfinite().all()
        for layout in ("auto", "ao_lab"):
            save_pretrained(net, tmp_path / layout, layout=layout)
            other = load_pretrained(tmp_path / layout, Net())
            assert torch.equal(other(TOKENS), y)
            assert other.first.weight.meta == net.first.weight.meta
            assert torch.equal(other.first.weight, net.first.weight)
            assert torch.equal(load_pretrained(tmp_path / layout, other)(TOKENS), y)


@pytest.mark.parametrize(("name", "given"), CASES)
def test_copied(name, given):
    net = network(config_of(name, given))
    with torch.no_grad():
        y = net(TOKENS)
        assert torch.equal(copy.deepcopy(net)(TOKENS), y)
        file = io.BytesIO()
        torch.save(net.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        assert isinstance(state["first.weight"], QuantizedTensor)
        into = network(config_of(name, given))
        for parameter in into.parameters():
            parts = parameter.parts.values() if isinstance(parameter, QuantizedTensor) else [parameter]
            for part in parts:
                if part is not None:
                    part.zero_()
        into.load_state_dict(state)
        assert torch.equal(into(TOKENS), y)
        with torch.device("meta"):
            empty = Net()
        empty.load_state_dict(state, assign=True)
        assert torch.equal(empty(TOKENS), y)


@pytest.mark.parametrize(("name", "given"), CASES)
def test_compiled(name, given):
    torch.compiler.reset()
    net = network(config_of(name, given))
    with torch.no_grad():
        y = net(TOKENS)
        assert torch.equal(torch.compile(net, fullgraph=True, backend="aot_eager")(TOKENS), y)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("name", "given"), CASES)
def test_exported(name, given, strict):
    """By torch.export's own trace; the strict one is the compiler's, which test_compiled takes."""
    check_exported(name, given, strict)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_exported_strictly(name):
    """One configuration of every class."""
    check_exported(name, ARGUMENTS[name][0], strict=True)


def check_exported(name, given, strict):
    net = network(config_of(name, given))
    with torch.no_grad():
        program = torch.export.export(net, (TOKENS,), strict=strict)
        assert torch.equal(program.module()(TOKENS), net(TOKENS))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e-60])
@pytest.mark.parametrize("name", [name for name in ARGUMENTS if "Static" in name])
def test_static_scales_are_positive_and_finite(name, scale):
    with pytest.raises(ValueError, match="positive finite float32"):
        config_of(name, {"act_quant_scale": scale})


def test_a_bilinear_layer_is_no_batch_of_experts():
    model = nn.ModuleDict({"both": nn.Bilinear(32, 32, 32), "one": nn.Linear(32, 32)})
    quantize_(model, ao_lab.Int8WeightOnlyConfig(), lambda module, name: True)
    assert [layer.name for layer in explain(model).changed] == ["one.weight"]
    assert [(layer.name, layer.kind) for layer in explain(model).left] == [("both.weight", "Bilinear")]


def test_other_dtypes_are_refused():
    weight = network(ao_lab.Int8WeightOnlyConfig()).first.weight
    for dtype in (torch.float8_e4m3fn, torch.int8, torch.complex64):
        with pytest.raises(TypeError, match="of 16 bits or more"):
            weight.to(dtype)
