"""ONNX files run by onnxruntime (and OpenVINO where it is installed): outputs within the bound of float32 sums."""

import numpy as np
import pytest
import torch
from torch import nn

import ao_lab
import reference
from ao_lab import Int8StaticActivationInt8WeightConfig, QuantizedTensor, SchemeConfig, export_onnx

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
#: Weights by float inputs, and the operator of each.
WEIGHTS = {
    "int4_g32_asymmetric": "MatMulNBits", "int4_g128": "MatMulNBits", "int3_rowwise": "MatMulNBits",
    "int8_g64_asymmetric": "MatMulNBits", "int8_tensorwise": "MatMulNBits", "mxfp8_e4m3": "DequantizeLinear",
    "fp8_rowwise": "DequantizeLinear", "fp8_128x128_e5m2": "DequantizeLinear",
}  # fmt: skip
ROWS, LENGTH, OUT = 5, 256, 48


class Layers(nn.Module):
    """Linear layers side by side, so that one export has them all."""

    def __init__(self, count, bias=True):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(LENGTH, OUT, bias=bias) for _ in range(count))

    def forward(self, x):
        """The outputs, in order."""
        return tuple(layer(x) for layer in self.layers)


def inputs():
    torch.manual_seed(1)
    return torch.randn(ROWS, LENGTH)


def by_onnxruntime(path, x):
    return ort.InferenceSession(path).run(None, {"x": x.numpy()})


def by_openvino(path, x):
    """Without its own 8-bit inputs."""
    openvino = pytest.importorskip("openvino")
    exact = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0", "INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(str(path), "CPU", exact)
    return list(compiled(x.numpy()).values())


CLIENTS = {"onnxruntime": by_onnxruntime, "openvino": by_openvino}


@pytest.fixture(scope="module")
def weights_only(tmp_path_factory):
    """A model with a layer of each scheme, and its file."""
    torch.manual_seed(0)
    model = Layers(len(WEIGHTS)).eval()
    for layer, name in zip(model.layers, WEIGHTS, strict=True):
        ao_lab.quantize_(layer, SchemeConfig(scheme=name))
    return model, export_onnx(model, (inputs(),), tmp_path_factory.mktemp("onnx") / "weights.onnx")


def test_operators_of_the_file(weights_only):
    model, written = weights_only
    kinds = list(WEIGHTS.values())
    assert written.operators == {kind: kinds.count(kind) for kind in sorted(set(kinds))}
    assert written.bytes == written.path.stat().st_size
    assert all(isinstance(layer.weight, QuantizedTensor) for layer in model.layers)


@pytest.mark.parametrize("client", CLIENTS)
def test_outputs_are_within_the_bound_of_sums(weights_only, client):
    """Both stay within `linear_error_bound` of the exact product of the same values."""
    model, written = weights_only
    x = inputs()
    outputs = CLIENTS[client](written.path, x)
    with torch.no_grad():
        wanted = model(x)
    for layer, name, y, w in zip(model.layers, WEIGHTS, outputs, wanted, strict=True):
        bound = reference.linear_error_bound(x, layer.weight.quantized, layer.bias.detach())
        assert (np.abs(y - w.numpy()) <= 2 * bound.numpy()).all(), name
        # A bound that says something: another order of integers, or another zero point, changes a tenth of an output.
        assert bound.max() < 0.01 * w.abs().max(), name


class Quantized(nn.Module):
    """A layer with a scale a token, and one with a static scale."""

    def __init__(self):
        super().__init__()
        self.token, self.static = nn.Linear(LENGTH, OUT), nn.Linear(LENGTH, OUT)

    def forward(self, x):
        """Both outputs."""
        return self.token(x), self.static(x)


@pytest.fixture(scope="module")
def quantized_inputs(tmp_path_factory):
    torch.manual_seed(0)
    model = Quantized().eval()
    ao_lab.quantize_(model.token, SchemeConfig(scheme="int8_rowwise", activation_scheme="int8_rowwise"))
    ao_lab.quantize_(model.static, Int8StaticActivationInt8WeightConfig(), forward_loop=lambda m: m(inputs()))
    return model, export_onnx(model, (inputs(),), tmp_path_factory.mktemp("onnx") / "inputs.onnx")


def test_inputs_are_rounded_to_the_layers_own_integers(quantized_inputs):
    """A scale a token: integers and their sums are equal, so the outputs are, bit for bit."""
    model, written = quantized_inputs
    assert written.operators == {"DequantizeLinear": 2, "MatMulInteger": 1, "QuantizeLinear": 1}
    x = inputs()
    x[1] = 0
    x[2, 3] = 1e30
    token, static = by_onnxruntime(written.path, x)
    with torch.no_grad():
        assert np.array_equal(token, model.token(x).numpy())
        wanted = model.static(x)
    # QuantizeLinear divides: an element may get the next integer, times the largest weight of the row.
    step = model.static.weight.input_scale * model.static.weight.dequantize().abs().amax(1)
    sums = reference.linear_error_bound(
        x.clamp(-127 * 8, 127 * 8), model.static.weight.quantized, model.static.bias.detach()
    )
    assert (np.abs(static - wanted.numpy()) <= step.numpy() + 2 * sums.numpy()).all()


REFUSED = {
    "nf4": (SchemeConfig(scheme="nf4"), "0: nf4 is no integer times a scale; export_onnx writes"),
    "mxfp4": (SchemeConfig(scheme="mxfp4"), "0: mxfp4 is no integer"),
    "inputs": (
        SchemeConfig(scheme="mxfp8_e4m3", activation_scheme="mxfp8_e4m3"),
        "0: mxfp8_e4m3 is no integer",
    ),
    "groups": (
        SchemeConfig(scheme="int8_g32", activation_scheme="int8_rowwise"),
        "weights are int8_rowwise or",
    ),
    "blocks": (SchemeConfig(scheme="int4_g8"), "blocks of ONNX are 16, 32, 64, 128, 256 elements"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_operator_is_refused_and_nothing_is_written(case, tmp_path):
    config, message = REFUSED[case]
    model = nn.Sequential(nn.Linear(64, 32)).eval()
    ao_lab.quantize_(model, config)
    layer = model[0]
    with pytest.raises(ValueError, match=message):
        export_onnx(model, (torch.ones(2, 64),), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []
    assert model[0] is layer


def test_other_dtypes_and_modules_are_refused(tmp_path):
    with pytest.raises(ValueError, match="export a float32 model"):
        export_onnx(nn.Linear(32, 32).bfloat16(), (torch.ones(1, 32),), tmp_path / "model.onnx")
    table = nn.Sequential(nn.Embedding(32, 32))
    ao_lab.quantize_(table, SchemeConfig(scheme="int8_rowwise"), lambda module, name: True)
    with pytest.raises(ValueError, match="0: quantized weights of Embedding are not exported"):
        export_onnx(table, (torch.ones(1, dtype=torch.int64),), tmp_path / "model.onnx")


def test_the_model_is_as_it_was_after_an_error(tmp_path, monkeypatch):
    model = nn.Sequential(nn.Linear(64, 32)).eval()
    ao_lab.quantize_(model, SchemeConfig(scheme="int8_rowwise"))
    layer = model[0]

    def broken(*args, **kwargs):
        raise RuntimeError("the exporter's")

    monkeypatch.setattr(torch.onnx, "export", broken)
    with pytest.raises(RuntimeError, match="the exporter's"):
        export_onnx(model, (torch.ones(2, 64),), tmp_path / "model.onnx")
    assert model[0] is layer
    assert list(tmp_path.iterdir()) == []
