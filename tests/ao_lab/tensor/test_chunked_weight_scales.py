"""Scales that are kept in float16: tiny weights keep their values, and ordinary ones their codes."""

import pytest
import torch
from torch import nn

from ao_lab import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    Recipe,
    quantize_,
    quantized,
    save_pretrained,
)
from ao_lab.config.recipe import named
from ao_lab.tensor.chunked import quantized_weight

CONFIGS = {
    "fp8": Float8WeightOnlyConfig(),
    "int8": Int8WeightOnlyConfig(),
    "int8 inputs": Int8DynamicActivationInt8WeightConfig(),
    "int4": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
}


def tiny(largest, dtype=torch.float16, shape=(8, 256)):
    torch.manual_seed(0)
    x = torch.randn(shape)
    return (x / x.abs().max() * largest).to(dtype)


def error(values, x):
    return float((values.float() - x.float()).norm() / x.float().norm())


@pytest.mark.parametrize("largest", [1e-4, 1e-5, 1e-6])
@pytest.mark.parametrize("name", CONFIGS)
def test_rows_of_tiny_float16_weights_are_not_lost(tmp_path, name, largest):
    """Near the error of float32 scales, and what readers have, whose scales are float16."""
    x = tiny(largest)
    x[3] = 0
    errors = []
    for config in (CONFIGS[name], CONFIGS[name].for_layout("compressed-tensors")):
        model = nn.Sequential(nn.Linear(256, 8, bias=False).half())
        model[0].weight.data.copy_(x)
        quantize_(model, config)
        errors.append(error(model[0].weight.dequantize(), x))
    weight = model[0].weight
    assert errors[1] <= max(2 * errors[0], 0.02 if name != "int4" else 0.13)
    assert torch.equal(
        weight.scale.half().float()[weight.scale > 2.0**-60], weight.scale[weight.scale > 2.0**-60]
    )
    assert not weight.dequantize()[3].any()
    saved = save_pretrained(model, tmp_path, layout="compressed-tensors")
    assert not any("scales: readers" in line for line in saved.limits)


@pytest.mark.parametrize(
    "scheme", ["fp8_rowwise_cast", "int8_rowwise_cast", "int4_g32_cast", "fp8_128x128_cast"]
)
@pytest.mark.parametrize(
    ("largest", "dtype"), [(0.05, torch.float16), (1e-6, torch.bfloat16), (1e-6, torch.float32)]
)
def test_other_weights_keep_their_bits(scheme, largest, dtype):
    x, recipe = tiny(largest, dtype, (128, 256)), Recipe(weight=named(scheme))
    ours, plain = quantized_weight(x, recipe), quantized(x, recipe)
    assert torch.equal(ours.codes, plain.codes)
    assert torch.equal(ours.scale, plain.scale)


def test_rows_beside_tiny_ones_keep_their_bits():
    x, recipe = tiny(0.05), Recipe(weight=named("int4_g32_cast"))
    x[2, :32] = tiny(1.5e-7)[2, :32]
    ours, plain = quantized_weight(x, recipe), quantized(x, recipe)
    others = [row for row in range(8) if row != 2]
    assert torch.equal(ours.codes[others], plain.codes[others])
    assert torch.equal(ours.codes[2, 16:], plain.codes[2, 16:])
    assert not torch.equal(ours.codes[2], plain.codes[2])
    assert error(ours.dequantize()[2, :32], x[2, :32]) < 0.5
    assert error(plain.dequantize()[2, :32], x[2, :32]) == 1


def test_blocks_of_several_rows():
    x, recipe = tiny(1e-6, shape=(128, 256)), Recipe(weight=named("fp8_128x128_cast"))
    assert error(quantized(x, recipe).dequantize(), x) == 1
    assert error(quantized_weight(x, recipe).dequantize(), x) < 0.03
