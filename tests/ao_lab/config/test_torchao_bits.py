"""Weights that torchao quantizes and ours in torchao's records: the same numbers, bit for bit.

In the house's schemes the bits differ, and how: torchao maps the largest magnitude onto 127.5 or 7.5, so that positive ones
clip, and rounds scales of float8 to the model's dtype.
"""

import pytest
import torch
from torch import nn
from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig, NVFP4WeightOnlyConfig
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    MappingType,
    PerAxis,
    PerGroup,
    quantize_,
)
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

import ao_lab

INT4 = {"weight_dtype": torch.int4, "granularity": PerGroup(32), "scale_dtype": torch.float32}
EMULATED = KernelPreference.EMULATED
# torchao's configuration, ours, and the record that makes ours theirs.
CASES = [
    (Int8WeightOnlyConfig(), ao_lab.Int8WeightOnlyConfig, {}, "torchao.int8_rowwise"),
    (Float8WeightOnlyConfig(), ao_lab.Float8WeightOnlyConfig, {}, "torchao.fp8_rowwise_inference"),
    (IntxWeightOnlyConfig(**INT4), ao_lab.IntxWeightOnlyConfig, INT4, "torchao.int4_g32"),
    (
        IntxWeightOnlyConfig(**INT4, mapping_type=MappingType.ASYMMETRIC),
        ao_lab.IntxWeightOnlyConfig,
        {**INT4, "mapping_type": MappingType.ASYMMETRIC},
        "torchao.int4_g32_asymmetric",
    ),
    (
        IntxWeightOnlyConfig(torch.int8, granularity=PerAxis(0), scale_dtype=torch.float32),
        ao_lab.IntxWeightOnlyConfig,
        {"granularity": PerAxis(0)},
        "torchao.int8_rowwise",
    ),
    (NVFP4WeightOnlyConfig(), ao_lab.NVFP4WeightOnlyConfig, {}, "torchao.nvfp4"),
    (
        MXDynamicActivationMXWeightConfig(kernel_preference=EMULATED),
        ao_lab.MXDynamicActivationMXWeightConfig,
        {"kernel_preference": EMULATED},
        "torchao.mxfp8_e4m3_rceil",
    ),
]


def layer():
    torch.manual_seed(0)
    return nn.Linear(256, 128, bias=False).to(torch.bfloat16)


@pytest.mark.parametrize(("theirs", "kind", "given", "scheme"), CASES)
def test_weights_in_torchaos_records_are_torchaos(theirs, kind, given, scheme):
    one, two = layer(), layer()
    quantize_(one, theirs)
    ao_lab.quantize_(two, kind(**given, scheme=scheme))
    assert torch.equal(two.weight.dequantize(), one.weight.dequantize())


@pytest.mark.parametrize(("theirs", "kind", "given", "scheme"), CASES[:3])
def test_the_houses_bits_are_others(theirs, kind, given, scheme):
    one, two = layer(), layer()
    quantize_(one, theirs)
    ao_lab.quantize_(two, kind(**given))
    assert not torch.equal(two.weight.dequantize(), one.weight.dequantize())
