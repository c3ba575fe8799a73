"""QAT composed with training recipes: rounded operands, then the recipe's products; either part ends by its own call."""

import pytest
import torch
from torch import nn

import ao_lab
import fast
from ao_lab.qat.layers import QATLinear
from ao_lab.qat.low_precision import LowPrecisionQATLinear
from ao_lab.training.autograd import training_linear
from reference.training import RECIPES

K, N = 128, 64
CONFIGS = {
    "weights alone": ao_lab.Int4WeightOnlyConfig(group_size=32),
    "inputs too": ao_lab.Int8DynamicActivationIntxWeightConfig(weight_dtype="int4"),
}


def model(**options):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(K, N, dtype=torch.bfloat16), nn.SiLU(), nn.Linear(N, K, dtype=torch.bfloat16)
    )


def prepared(config, **options):
    made = model()
    ao_lab.quantize_(made, ao_lab.QATConfig(config, step="prepare", **options))
    return made


def rows(count=32):
    return torch.randn(count, K, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
@pytest.mark.parametrize("name", CONFIGS)
def test_operands_are_rounded_then_cast(name, recipe):
    made = prepared(CONFIGS[name])
    layer = made[0]
    qat = layer.qat.recipe
    ao_lab.convert_for_training_(made, recipe)
    assert type(layer) is LowPrecisionQATLinear
    x, g = rows().requires_grad_(), torch.randn(32, N).bfloat16()
    found = torch.autograd.grad(layer(x), (x, layer.weight, layer.bias), g)
    w = fast.fake_quantize(layer.weight, qat.weight)
    rounded = x if qat.activation is None else fast.fake_quantize(x, qat.activation)
    y = training_linear(rounded, w, layer.bias, RECIPES[recipe])
    assert torch.equal(layer(x), y)
    expected = torch.autograd.grad(y, (x, layer.weight, layer.bias), g)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    plain = training_linear(x, layer.weight, layer.bias, RECIPES[recipe])
    assert not torch.equal(y, plain)  # it is rounded


def test_either_part_ends_by_its_own_call():
    made, alone = (prepared(CONFIGS["weights alone"]) for _ in range(2))
    names = list(made.state_dict())
    converted = ao_lab.convert_for_training_(made, "rowwise")
    assert converted.changed == ("0", "2")
    assert list(made.state_dict()) == names == list(model().state_dict())
    assert "rowwise" in str(ao_lab.explain(made))
    ao_lab.convert_from_training_(made)
    assert type(made[0]) is QATLinear
    ao_lab.convert_for_training_(made, "rowwise")
    for one in (made, alone):
        ao_lab.quantize_(one, ao_lab.QATConfig(CONFIGS["weights alone"], step="convert"))
    assert type(made[0]) is nn.Linear
    assert not hasattr(made[0], "low_precision")
    assert torch.equal(made[0].weight.quantized.codes, alone[0].weight.quantized.codes)


def test_learned_scales_stay_as_they_are():
    made = prepared(CONFIGS["weights alone"], learn_scales=True)
    with pytest.raises(ValueError, match="learned or static scales"):
        ao_lab.convert_for_training_(made, "rowwise")
    assert type(made[0]) is QATLinear


def test_converted_twice_says_so():
    made = prepared(CONFIGS["weights alone"])
    ao_lab.convert_for_training_(made, "rowwise")
    with pytest.raises(ValueError, match=r"trains by recipe .rowwise. already"):
        ao_lab.convert_for_training_(made, "tensorwise")


def test_their_weights_are_gathered_whole():
    made = prepared(CONFIGS["weights alone"])
    converted = ao_lab.convert_for_training_(made, "rowwise", fsdp_float8_all_gather=True)
    assert set(converted.gathered_whole) == {"0", "2"}
    assert "rounds its weight" in str(converted)


def test_under_autocast_inputs_are_cast_and_then_rounded(monkeypatch):
    """As QAT alone does, and the served layer: what is rounded is what it will get."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(K, N))
    ao_lab.quantize_(made, ao_lab.QATConfig(CONFIGS["inputs too"], step="prepare"))
    ao_lab.convert_for_training_(made, "rowwise")
    x = torch.randn(32, K)
    with torch.autocast("cpu", torch.bfloat16):
        rounded, weight = made[0].operands(x)
    assert torch.equal(rounded, fast.fake_quantize(x.bfloat16(), made[0].qat.recipe.activation))
    assert torch.equal(weight, fast.fake_quantize(made[0].weight, made[0].qat.recipe.weight))


def test_tune_measures_what_the_layer_multiplies():
    from ao_lab.tuning.samples import _training_recorder

    made = prepared(CONFIGS["weights alone"])
    ao_lab.convert_for_training_(made, "rowwise")
    found = {}
    made[0].register_forward_hook(_training_recorder("0", found))
    made(rows())
    (sample,) = found.values()
    assert torch.equal(sample.w, fast.fake_quantize(made[0].weight, made[0].qat.recipe.weight))
