"""The gate before the clock: a result that differs from the reference in one bit gets no time."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import reference
from experiments.harness.measuring import Wrong
from experiments.kernels.cases import CASES
from experiments.kernels.operations import Sample
from experiments.kernels.run import check, raw, same, samples
from tests.experiments.harness.fake_watch import SHAPE, broken, flipped, measured, specified, values_of


@pytest.mark.parametrize("name", list(CASES))
def test_the_reference_passes_the_gate(name):
    fast, one = SimpleNamespace(**specified()), CASES[name].operation.startswith("linear")
    inputs = CASES[name].make(fast, SHAPE, "cpu", 0)
    # One row of inputs gives a number for each row of the weight.
    assert check(CASES[name], fast, inputs, SHAPE) >= (64 if one else 1000)


@pytest.mark.parametrize(
    ("name", "function", "change"),
    [
        ("quantize.mxfp8_e4m3", "quantize", flipped("codes")),
        ("quantize.mxfp8_e4m3", "quantize", flipped("codes", (0, 0))),
        ("quantize.mxfp8_e4m3", "quantize", flipped("scale")),
        ("quantize.fp8_128x128", "quantize", flipped("scale")),
        ("quantize.mxfp4.packed", "quantize", flipped("codes")),
        ("quantize.int4_g128_asymmetric", "quantize", flipped("zero")),
        ("quantize.mxfp8_e4m3.axis0", "quantize", flipped("codes", (5, -1))),
        ("quantize.fp8_tensorwise", "quantize", lambda q: replace(q, scale=q.scale * 2)),
        ("quantize.nvfp4.packed", "quantize", lambda q: replace(q, outer=q.outer * 2)),
        ("quantize.nf4", "quantize", flipped("codes")),
        ("both.mxfp8_e4m3", "quantize_both", lambda made: (made[0], flipped("codes", (0, 0))(made[1]))),
        ("rms_norm.fp8_rowwise", "rms_norm_quantize", lambda made: (flipped("codes")(made[0]), None)),
        ("rms_norm.fp8_rowwise.residual", "rms_norm_quantize", lambda made: (made[0], made[1] * 2)),
        ("swiglu.fp8_rowwise", "swiglu_quantize", flipped("codes")),
        ("dequantize.int4_g128", "dequantize", lambda values: values * 2),
        ("fake_quantize.int4_g32", "fake_quantize", lambda values: values.float()),
        ("encode.float8_e4m3fn", "encode", lambda codes: codes ^ 1),
        ("linear.int8_rowwise", "linear", lambda y: y * 1.02),
        ("linear.int4_g64_asymmetric_bf16", "linear", lambda y: y + y.abs().max() / 64),
        ("linear_of_codes.int8_rowwise", "linear_of_codes", lambda y: y * 1.01),
        ("linear_of_codes.fp8_rowwise", "linear_of_codes", lambda y: y * 1.02),
        ("linear_pair.int8_rowwise", "linear_pair", lambda made: (made[0], made[1] * 1.02)),
        ("linear_pair.int4_g128", "linear_pair", lambda made: (made[1], made[0])),
        ("linear_swiglu.int8_rowwise", "linear_swiglu", lambda y: y * (1 + 2.0**-7)),
        ("linear_swiglu.int4_g128", "linear_swiglu", lambda y: y.flip(1)),
        (
            "saturation_mask.int4_g128_asymmetric",
            "quantize.saturation.fake_quantize_with_mask",
            lambda made: (-made[0], None),
        ),
    ],
)
def test_a_wrong_kernel_gets_no_time(name, function, change, tmp_path):
    fast = broken(function, change)
    inputs = CASES[name].make(reference, SHAPE, "cpu", 0)
    with pytest.raises(Wrong):
        check(CASES[name], fast, inputs, SHAPE)
    values = values_of(measured(tmp_path, [name], fast=fast), name)
    assert "time" not in values
    assert [metric for metric in values if metric.startswith("status: wrong: ")] != []


def test_samples_are_whole_blocks_at_both_ends():
    assert samples(CASES["quantize.fp8_rowwise"], (524289, 4096)) == [Sample(0, 32), Sample(524257, 524289)]
    assert samples(CASES["quantize.fp8_128x128"], (16384, 4096)) == [Sample(0, 128), Sample(16256, 16384)]
    assert samples(CASES["quantize.mxfp8_e4m3.axis0"], (16384, 4096)) == [Sample(0, 32), Sample(4064, 4096)]
    assert samples(CASES["small.fp8_rowwise"], (16, 4096)) == [Sample(0, 16)]


def test_bits_are_compared_and_not_values():
    assert same(("x", torch.tensor([0.0, float("nan")]), np.array([0.0, np.nan], np.float32))) == 2
    with pytest.raises(Wrong, match="1 of 2"):
        same(("x", torch.tensor([0.0, -0.0]), torch.zeros(2)))
    with pytest.raises(Wrong, match="the reference has"):
        same(("x", torch.zeros(2), torch.zeros(3)))
    with pytest.raises(Wrong, match="nothing"):
        same(("x", None, torch.zeros(3)))
    assert raw(torch.tensor(1.0, dtype=torch.bfloat16)).tolist() == 0x3F80
