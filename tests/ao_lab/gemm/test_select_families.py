"""What `explain` says of ranges of rows: families of kernels for weights of each kind, on a GPU that CPU tensors pass for."""

import platform

import pytest
import torch
from torch import nn

import ao_lab
from ao_lab import explain, quantize_
from ao_lab.gemm import codes, select
from ao_lab.gemm.dense import is_host
from fast.gemm import problem
from fast.gemm.choose import codes_of_layer
from tests.ao_lab.gemm.capability import set_capability

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="triton has no packages for this system")
BF16 = torch.bfloat16


@pytest.fixture
def gpu(monkeypatch):
    """A Hopper GPU."""
    set_capability(monkeypatch, (9, 0))
    monkeypatch.setattr(ao_lab.QuantizedTensor, "is_cuda", True)
    for module in (select, codes):
        monkeypatch.setattr(module, "is_host", lambda device: False)
    monkeypatch.setattr(problem, "device_of", lambda device: problem.HOPPER)


def families(config, layout="", shape=(256, 384)):
    """The ranges of a layer, as a report has them."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(*shape)).to(BF16).requires_grad_(False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ao_lab.QuantizedTensor, "is_cuda", False)
        quantize_(net, config)
        if layout:
            net[0].weight = nn.Parameter(net[0].weight.to_layout(layout), requires_grad=False)
    report = explain(net)
    (layer,) = report.changed
    told = ", ".join(map(str, layer.families))
    assert f"\n    {told}" in str(report)
    return told


@pytest.mark.parametrize(
    ("config", "layout", "told"),
    [
        (
            ao_lab.Int4WeightOnlyConfig(), "preshuffled",
            "1-4 rows sm90_w4a16_gemv, 5-64 rows triton_small_m, 65 rows and more sm90_w4a16_gemm",
        ),
        (
            ao_lab.Int4WeightOnlyConfig(), "",
            "1 row triton_gemv_w4a16, 2-32 rows triton_gemm_small_m, 33 rows and more torch_dequantize",
        ),
        (
            ao_lab.Int8DynamicActivationInt8WeightConfig(), "",
            "1 row triton_gemv_w8a8, 2-2944 rows triton_int_scaled_mm, 2945 rows and more sm90_s8_gemm",
        ),
        (
            ao_lab.Float8DynamicActivationFloat8WeightConfig(), "",
            "1 row triton_gemv_w8a8, 2 rows and more torch_scaled_mm",
        ),
        (ao_lab.Int4WeightOnlyConfig(kernel="dequantize"), "", "torch_dequantize"),
        (ao_lab.Int4WeightOnlyConfig(kernel="reference"), "", "reference"),
    ],
    ids=str,
)  # fmt: skip
def test_ranges(gpu, config, layout, told):
    assert families(config, layout) == told


@pytest.mark.parametrize("shape", [(576, 1000), (512, 1000), (576, 1024)], ids=str)
def test_ranges_of_lengths_that_are_filled(gpu, shape):
    """Kernels in CUDA C++ take whole tiles alone."""
    told = families(ao_lab.Int4WeightOnlyConfig(group_size=32), "preshuffled", shape)
    assert told == "1-128 rows triton_small_m, 129 rows and more torch_dequantize"


@pytest.mark.parametrize(
    "config", [ao_lab.Int8DynamicActivationInt8WeightConfig(), ao_lab.Float8DynamicActivationFloat8WeightConfig(),
               ao_lab.Float8DynamicActivationFloat8WeightConfig(granularity=ao_lab.PerRow())], ids=str,
)  # fmt: skip
def test_what_is_told_of_codes_is_what_is_done(gpu, config):
    """A product asks `multiplies_codes`, `explain` asks `choose`: one rule, told and done."""
    net = nn.Sequential(nn.Linear(1024, 1024)).to(BF16).requires_grad_(False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ao_lab.QuantizedTensor, "is_cuda", False)
        quantize_(net, config)
    w = net[0].weight.t()
    scheme = codes.activation(w)
    for rows in (1, 2, 16, 17, 24, 33, 64, 65, 128, 300):
        x = torch.empty((rows, 1024), dtype=BF16, device="meta")
        p = problem.of_codes(scheme, w.scheme, (1024, 1024), rows, BF16, w.device)
        ours = not codes_of_layer(scheme, w.scheme, p).name.startswith("torch")
        assert codes.multiplies_codes(x, w) == ours, rows


def test_none_on_a_cpu():
    net = nn.Sequential(nn.Linear(256, 384)).to(BF16).requires_grad_(False)
    quantize_(net, ao_lab.Int4WeightOnlyConfig())
    assert is_host(net[0].weight.device)
    assert explain(net).changed[0].families == ()
