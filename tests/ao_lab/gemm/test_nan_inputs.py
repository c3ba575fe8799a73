"""A NaN in a layer's input stays a NaN in that row, whatever quantizes the inputs; other rows are what they were."""

import pytest
import torch
from torch import nn

import ao_lab
from ao_lab import Recipe, SchemeConfig, quantize_, quantized
from ao_lab.gemm.dense import loses_nan
from reference import SCHEMES, Scales

#: Schemes of weight and inputs, and static scales of inputs.
STATIC = [
    ("int8_rowwise", "int8_tensorwise", Scales(torch.tensor(0.03))),
    (
        "int8_rowwise",
        "torchao.int8_tensorwise_asymmetric",
        Scales(torch.tensor(0.03), None, torch.tensor(3, dtype=torch.int8)),
    ),
    ("int4_g32", "int8_tensorwise", Scales(torch.tensor(0.03))),
    ("fp8_tensorwise", "fp8_tensorwise", Scales(torch.tensor(0.01))),
    ("nvfp4", "nvfp4", Scales(None, torch.tensor(0.001))),
]
X = torch.linspace(-2, 2, 5 * 64).reshape(5, 64)
WITH_NAN = X.clone()
WITH_NAN[3, 7] = float("nan")


def layer(weight, activation, scales, **options):
    made = nn.Linear(64, 32)
    recipe = Recipe(weight=SCHEMES[weight], activation=SCHEMES[activation], **options)
    made.weight = nn.Parameter(quantized(made.weight, recipe, input_scales=scales), requires_grad=False)
    return made


def check(m, x=X, bad=WITH_NAN):
    y, made = m(x), m(bad)
    assert made[..., 3, :].isnan().all()
    rest = [0, 1, 2, 4]
    assert torch.equal(made[..., rest, :], y[..., rest, :])
    assert y.isfinite().all()


@pytest.mark.parametrize(("weight", "activation", "scales"), STATIC)
@pytest.mark.parametrize("kernel", ["auto", "dequantize", "reference"])
def test_static_scales(weight, activation, scales, kernel):
    with torch.no_grad():
        check(layer(weight, activation, scales, kernel=kernel))


def test_compiled_and_with_a_gradient():
    m = layer("int8_rowwise", "int8_tensorwise", Scales(torch.tensor(0.03)))
    check(m)
    with torch.no_grad():
        check(torch.compile(m, fullgraph=True, backend="aot_eager"))
        check(m, X.bfloat16()[None], WITH_NAN.bfloat16()[None])


def test_static_and_calibrated_configurations():
    made, calibrated = nn.Linear(64, 32), nn.Linear(64, 32)
    quantize_(made, ao_lab.Int8StaticActivationInt8WeightConfig(act_quant_scale=torch.tensor(0.02)))
    quantize_(calibrated, ao_lab.Int8StaticActivationInt8WeightConfig(), forward_loop=lambda m: m(X))
    for m in (made, calibrated):
        assert loses_nan(m.weight)
        with torch.no_grad():
            check(m)


@pytest.mark.parametrize("scheme", ["int8_rowwise", "fp8_rowwise", "mxfp4", "mxfp8_e4m3"])
def test_dynamic_scales_have_it(scheme):
    m = nn.Linear(64, 32)
    quantize_(m, SchemeConfig(scheme=scheme, activation_scheme=scheme))
    assert not loses_nan(m.weight)
    with torch.no_grad():
        check(m)
