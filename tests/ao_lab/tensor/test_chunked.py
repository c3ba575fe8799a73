"""Weights in pieces of rows: the bits of the whole weight at once, for schemes of every structure."""

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
from ao_lab.tensor import chunked
from ao_lab.tensor.chunked import quantized_weight
from ao_lab.tensor.metadata import PARTS
from ao_lab.testing.strategies import assert_same_bits
from tests.support.record_samples import STRUCTURES, sampled

MADE = [
    "int8_tensorwise_asymmetric",
    "int4_tensorwise",
    "int3_rowwise_asymmetric",
    "int4_g32_asymmetric_bf16",
    "int1_g32",
]
SHAPES = [
    ((24, 512), -1),
    ((3, 8, 512), -1),
    ((3, 512, 8), -2),
    ((384, 256), -1),
    ((2, 256, 128), -1),
    ((2, 160, 128), -1),
    ((50, 101), -1),
    ((256, 24), 0),
]
#: Blocks in two dimensions below a scale over the whole tensor.
WHOLE = {"te.nvfp4_16x16"}
#: Extremes that whole-tensor scales must see, wherever they are.
SPECIAL = {
    "plain": [],
    "large": [3e38],
    "zeros": [],
    "infinite": [torch.inf, -2.0],
    "nan": [torch.nan, 5.0],
}


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(chunked, "PIECE", 2048)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("name", [*sampled(STRUCTURES), *MADE])
def test_pieces_are_the_whole(name):
    scheme, cut = named(name), 0
    recipe = Recipe(weight=scheme)
    cases = [(SHAPES[0], kind) for kind in SPECIAL] + [(case, "large") for case in SHAPES[1:]]
    for (shape, axis), kind in cases:
        torch.manual_seed(0)
        x = torch.randn(shape).to(torch.bfloat16) * (kind != "zeros")
        for i, value in enumerate(SPECIAL[kind]):
            x.view(-1)[(i + 1) * x.numel() // 3] = value
        try:
            expected = quantized(x, recipe, axis=axis)
        except ValueError:  # blocks that do not divide the shape
            continue
        made = chunked.quantized_by_rows(x, recipe, axis=axis)
        assert (made.meta, made.shape, made.dtype) == (expected.meta, expected.shape, expected.dtype)
        for part in PARTS:
            a, b = getattr(made, part), getattr(expected, part)
            assert (a is None) == (b is None)
            if a is not None:
                assert_same_bits(a, b)
        cut += chunked.cuts_of(scheme, shape, axis) is not None or chunked.has_scaled_scales(scheme)
    assert (cut == 0) == (name in WHOLE)


def test_pieces_are_small(small_pieces, monkeypatch):
    """No call sees more than a piece, or than the rows of one block."""
    seen, original = [], chunked.fast.quantize
    monkeypatch.setattr(
        chunked.fast, "quantize", lambda x, *a, **k: (seen.append(x.numel()), original(x, *a, **k))[1]
    )
    for name, most in (
        ("nf4", 2048),
        ("int4_g128", 2048),
        ("fp8_128x128", 128 * 256),
        ("nvfp4", 2048),
        ("int8_tensorwise", 2048),
    ):
        seen.clear()
        chunked.quantized_by_rows(torch.randn(3, 256, 256), Recipe(weight=named(name)))
        assert len(seen) > 2
        assert max(seen) <= most


# Scales that are kept in float16: tiny weights keep their values, and ordinary ones their codes.

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
    assert not any("scales: loaders" in line for line in saved.limits)


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
