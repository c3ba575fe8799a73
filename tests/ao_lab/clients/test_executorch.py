"""ExecuTorch programs, run by its runtime where it is installed; what it would compute wrongly is refused before."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import ao_lab
from ao_lab import Int8DynamicActivationIntxWeightConfig as Dynamic
from ao_lab import PerAxis, PerGroup, SchemeConfig, export_executorch
from ao_lab.clients.executorch import torchao_tensor

RIGHT = {
    "int4_g32": Dynamic(torch.int4, PerGroup(32)),
    "int4_g64": Dynamic(torch.int4, PerGroup(64)),
    "int4_rowwise": Dynamic(torch.int4, PerAxis(0)),
    "int8_rowwise": Dynamic(torch.int8, PerAxis(0)),
}
INPUTS = "int8_rowwise_asymmetric"
WRONG = {
    "int8 in groups": (Dynamic(torch.int8, PerGroup(32)), "int8_g32 x .*: its blocks and widths"),
    "weights alone": (SchemeConfig(scheme="int8_rowwise"), "int8_rowwise: inputs are int8 with a zero point"),
    "symmetric inputs": (SchemeConfig(scheme="int8_rowwise", activation_scheme="int8_rowwise"), "inputs are int8 with"),
    "zero points": (SchemeConfig(scheme="int4_g32_asymmetric", activation_scheme=INPUTS), "symmetric integers"),
    "floats": (SchemeConfig(scheme="mxfp8_e4m3", activation_scheme=INPUTS), "symmetric integers"),
}  # fmt: skip


def model_of(config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 96, bias=False)).eval()
    ao_lab.quantize_(model, config)
    return model


@pytest.mark.parametrize("name", RIGHT)
def test_torchao_s_tensor_has_the_values(name):
    pytest.importorskip("torchao")
    weight = model_of(RIGHT[name])[0].weight.detach()
    assert torch.equal(torchao_tensor(weight).dequantize(), weight.dequantize())


@pytest.mark.parametrize("case", WRONG)
def test_what_would_be_computed_wrongly_is_refused(case):
    pytest.importorskip("torchao")
    config, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        torchao_tensor(model_of(config)[0].weight.detach())


@pytest.mark.parametrize("change", ["rotation", "static scale", "scales for encoding"])
def test_fields_of_a_weight_that_torchao_s_tensor_has_not_are_refused(change):
    pytest.importorskip("torchao")
    weight = model_of(RIGHT["int4_g64"])[0].weight.detach()
    scheme, message = weight.scheme, "inputs are int8 with"
    if change == "rotation":
        weight, message = weight.with_recipe(rotation=64), "rotated by 64: inputs are not rotated"
    elif change == "static scale":
        weight = weight.remade({**weight.parts, "input_scale": torch.ones(())})
    else:
        scale = replace(scheme.scale, stored="encode")
        weight, message = weight.with_recipe(weight=replace(scheme, scale=scale)), "with float32 scales"
    with pytest.raises(ValueError, match=message):
        torchao_tensor(weight)


@pytest.mark.parametrize("name", RIGHT)
def test_programs_compute_the_layer(name, tmp_path):
    """Inputs may be one step of their scale apart, scales of 4-bit groups half a unit of bfloat16."""
    runtime = pytest.importorskip("executorch.runtime")
    model = model_of(RIGHT[name])[:1]
    x = torch.randn(5, 64)
    path = export_executorch(model, (x,), tmp_path / "model.pte")
    (y,) = runtime.Runtime.get().load_program(path).load_method("forward").execute([x])
    weight = model[0].weight.dequantize().abs()
    step = (x.amax(1).clamp(min=0) - x.amin(1).clamp(max=0)) / 255
    bound = step[:, None] * weight.sum(1) + 2**-8 * x.abs() @ weight.t()
    with torch.no_grad():
        assert ((y - model(x)).abs() <= bound).all()
    assert (bound < 0.1 * y.abs().max()).all()
    assert type(model[0].weight).__name__ == "Parameter" or isinstance(
        model[0].weight, ao_lab.QuantizedTensor
    )


def test_rows_of_int4_are_multiples_of_32():
    """XNNPACK's own refusal is an assertion in the middle of the export."""
    pytest.importorskip("torchao")
    layer = nn.Linear(48, 16)
    ao_lab.quantize_(layer, RIGHT["int4_rowwise"])
    with pytest.raises(ValueError, match=r"its blocks and widths .* of a multiple of 32"):
        torchao_tensor(layer.weight.detach())


def test_other_dtypes_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"weight is torch\.bfloat16; export a float32 model"):
        export_executorch(nn.Linear(32, 32).bfloat16(), (torch.ones(1, 32),), tmp_path / "model.pte")


def test_a_refusal_leaves_the_model_and_no_file(tmp_path):
    pytest.importorskip("executorch.runtime")
    model = model_of(RIGHT["int8_rowwise"])
    table = nn.Embedding(8, 64)
    ao_lab.quantize_(table, SchemeConfig(scheme="int8_rowwise"), lambda module, name: True)
    with pytest.raises(ValueError, match="quantized weights of Embedding"):
        export_executorch(
            nn.Sequential(table, model[0]), (torch.zeros(1, dtype=torch.int64),), tmp_path / "model.pte"
        )
    assert list(tmp_path.iterdir()) == []
    assert isinstance(model[0].weight, ao_lab.QuantizedTensor)
