"""ONNX files run by onnxruntime (and OpenVINO where it is installed): outputs within the bound of float32 sums."""

import numpy as np
import pytest
import torch
from torch import nn

import ao_lab
import reference
from ao_lab import Int8StaticActivationInt8WeightConfig, QuantizedTensor, SchemeConfig, export_onnx
from ao_lab.clients.examples import example_of
from ao_lab.clients.onnx import NBitsLinear, RoundedInputs, _as_operators, onnx_layer

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
#: Weights by float inputs: five of integers, three of floats.
WEIGHTS = (
    "int4_g32_asymmetric", "int4_g128", "int3_rowwise", "int8_g64_asymmetric", "int8_tensorwise", "mxfp8_e4m3", "fp8_rowwise",
    "fp8_128x128_e5m2",
)  # fmt: skip
ROWS, LENGTH, OUT = 5, 256, 48


class Layers(nn.Module):
    """Linear layers side by side, so that one export has them all: weights alone, a scale a token, a static scale."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ModuleList(nn.Linear(LENGTH, OUT) for _ in WEIGHTS)
        self.token, self.static = nn.Linear(LENGTH, OUT, bias=False), nn.Linear(LENGTH, OUT)

    def forward(self, x):
        """The outputs, in order."""
        static = self.static(x)
        # Of three axes onnxruntime makes another graph; of one, outputs have one.
        return (
            *(layer(x) for layer in self.weights),
            self.token(x),
            static,
            self.static(x[None]),
            self.token(x[0]),
        )


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
def written(tmp_path_factory):
    """A model with a layer of each kind, and its file."""
    torch.manual_seed(0)
    model = Layers().eval()
    for layer, name in zip(model.weights, WEIGHTS, strict=True):
        ao_lab.quantize_(layer, SchemeConfig(scheme=name))
    ao_lab.quantize_(model.token, SchemeConfig(scheme="int8_rowwise", activation_scheme="int8_rowwise"))
    ao_lab.quantize_(model.static, Int8StaticActivationInt8WeightConfig(), forward_loop=lambda m: m(inputs()))
    return model, export_onnx(model, (inputs(),), tmp_path_factory.mktemp("onnx") / "layers.onnx")


def test_operators_of_the_file(written):
    model, file = written
    assert file.operators == {
        "DequantizeLinear": 3 + 2 + 1,  # of the static weight once
        "MatMulInteger": 2,
        "MatMulNBits": 5,
        "QuantizeLinear": 2,
    }
    assert file.bytes == file.path.stat().st_size
    assert all(
        isinstance(layer.weight, QuantizedTensor) for layer in [*model.weights, model.token, model.static]
    )


@pytest.mark.parametrize("client", CLIENTS)
def test_outputs_are_within_the_bound_of_sums(written, client):
    """Both stay within `linear_error_bound` of the exact product of the same values."""
    model, file = written
    x = inputs()
    outputs = CLIENTS[client](file.path, x)[: len(WEIGHTS)]
    for layer, name, y in zip(model.weights, WEIGHTS, outputs, strict=True):
        bound = reference.linear_error_bound(x, layer.weight.quantized, layer.bias.detach()).numpy()
        with torch.no_grad():
            wanted = layer(x).numpy()
        assert (np.abs(y - wanted) <= 2 * bound).all(), name
        # A bound that says something: another order of integers, or another zero point, changes a tenth of an output.
        assert bound.max() < 0.01 * np.abs(wanted).max(), name


def test_inputs_are_rounded_to_the_layers_own_integers(written):
    """A scale a token: integers and their sums are equal, so the outputs are, bit for bit."""
    model, file = written
    x = inputs()
    # A scale below its floor: without that the integers would be 127, and the outputs no zeros.
    x[1] = 0
    x[1, 0] = 1e-40
    x[2, 3] = 1e30
    token, static, batched, one = by_onnxruntime(file.path, x)[len(WEIGHTS) :]
    with torch.no_grad():
        assert np.array_equal(token, model.token(x).numpy())
        assert np.array_equal(one, model.token(x[0]).numpy())
        wanted = model.static(x).numpy()
    # QuantizeLinear divides: an element may get the next integer, times the largest weight of the row.
    step = model.static.weight.input_scale * model.static.weight.dequantize().abs().amax(1)
    within = x.clamp(-128 * model.static.weight.input_scale, 127 * model.static.weight.input_scale)
    sums = reference.linear_error_bound(within, model.static.weight.quantized, model.static.bias.detach())
    for found in (static, *batched):
        assert (np.abs(found - wanted) <= step.numpy() + 2 * sums.numpy()).all()
    assert (step < 0.05 * np.abs(wanted).max()).all()


def test_inputs_with_zero_points_are_rounded_as_here():
    """The module's own arithmetic, which standard operators repeat: zeros, one sign, tiny and large tokens."""
    x = inputs()
    x[0], x[1], x[2], x[3] = 0, x[1].abs(), -x[2].abs() * 1e-30, x[3] * 1e30
    q = reference.quantize(x, "int8_rowwise_asymmetric")
    assert torch.equal(RoundedInputs(nn.Identity())(x), reference.dequantize(q))


def nf4_layer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(LENGTH, OUT)).eval()
    ao_lab.quantize_(model, SchemeConfig(scheme="nf4"))
    return model


def test_nf4_by_hand():
    """The first of two codes in the high half, one scale for 64 elements of the flattened weight."""
    weight = nf4_layer()[0].weight.detach()
    made = onnx_layer(weight, None)
    codes = torch.stack([made.codes >> 4, made.codes & 15], 1).reshape(-1, 64)
    values = torch.tensor(weight.scheme.format.values.tolist())[codes.long()] * made.scale[:, None]
    assert torch.equal(values.reshape(OUT, LENGTH), weight.dequantize())


@pytest.mark.nightly
def test_onnxruntime_computes_nf4(tmp_path):
    model, x = nf4_layer(), inputs()
    file = export_onnx(model, (x,), tmp_path / "nf4.onnx")
    assert file.operators == {"MatMulBnb4": 1}
    (y,) = ort.InferenceSession(file.path).run(None, {"input": x.numpy()})
    bound = reference.linear_error_bound(x, model[0].weight.quantized, model[0].bias.detach()).numpy()
    with torch.no_grad():
        assert (np.abs(y - model(x).numpy()) <= 2 * bound).all()


REFUSED = {
    "nvfp4": (SchemeConfig(scheme="nvfp4"), "0: nvfp4 is no integer times a scale; export_onnx writes"),
    "mxfp4": (SchemeConfig(scheme="mxfp4"), "0: mxfp4 is no integer"),
    "inputs": (
        SchemeConfig(scheme="mxfp8_e4m3", activation_scheme="mxfp8_e4m3"),
        "0: mxfp8_e4m3 is no integer",
    ),
    "scales for encoding": (
        SchemeConfig(scheme="torchao.fp8_rowwise_training"),
        "0: torchao.fp8_rowwise_training is no integer",
    ),
    "groups": (
        SchemeConfig(scheme="int8_g32", activation_scheme="int8_rowwise"),
        "weights are int8_rowwise or",
    ),
    "blocks": (SchemeConfig(scheme="int4_g8"), "blocks of ONNX are 16, 32, 64, 128, 256 elements"),
    "in training": (
        ao_lab.QATConfig(SchemeConfig(scheme="int4_g32"), step="prepare"),
        "0: prepared for quantization-aware training; step='convert'",
    ),
    "adapters": (
        ao_lab.QATConfig(SchemeConfig(scheme="int4_g32"), step="prepare", lora=ao_lab.LoRA(2)),
        "0: adapters on a frozen weight; step='convert' merges them",
    ),
    "dense": (None, r"no quantized weights; call quantize_ first \(torch.onnx.export writes one"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_operator_is_refused_and_nothing_is_written(case, tmp_path):
    config, message = REFUSED[case]
    model = nn.Sequential(nn.Linear(64, 32)).eval()
    if config is not None:
        ao_lab.quantize_(model, config)
    layer = model[0]
    with pytest.raises(ValueError, match=message):
        export_onnx(model, (torch.ones(2, 64),), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []
    assert model[0] is layer


def test_a_language_model_is_exported_without_its_cache_and_for_any_number_of_texts_and_tokens(tmp_path):
    """As it was given, its configuration using a cache; and it does so afterwards. The example is one token, of which torch
    takes a size of 1 for one that is broadcast: such a file fails at a batch of 3."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 32, "num_hidden_layers": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2)).eval()
    ao_lab.quantize_(model, SchemeConfig(scheme="int4_g32"))
    example, any_size = torch.tensor([[5]]), torch.export.Dim.DYNAMIC
    shapes = {"input_ids": {0: any_size, 1: any_size}}
    file = export_onnx(model, (example,), tmp_path / "model.onnx", dynamic_shapes=shapes)
    assert file.operators == {"MatMulNBits": 8}
    assert model.config.use_cache
    session = ort.InferenceSession(file.path)
    for ids in (example, torch.arange(6)[None], torch.arange(27).reshape(3, 9)):
        (logits,) = session.run(None, {"input_ids": ids.numpy()})
        with torch.no_grad():
            wanted = model(ids).logits.numpy()
        assert np.abs(logits - wanted).max() < 2**-14 * np.abs(wanted).max()


class Nested(nn.Module):
    """Inputs of every form that dynamic_shapes has."""

    def forward(self, x, pair, *, named):
        """Nothing."""


def test_examples_are_repeated_along_dynamic_axes_of_size_one_alone():
    d, one = torch.export.Dim, torch.ones(1, 1, 4)
    inputs, kwargs = (one, [one, torch.ones(3, 1)]), {"named": {"a": one, "b": 5}}
    shapes = {
        "x": (d("batch"), None, d.STATIC),
        "pair": [{1: d.AUTO}, {0: d.DYNAMIC, 1: "length"}],
        "named": {"a": {0: 1, 1: None}, "b": None},
    }
    for form in (shapes, tuple(shapes.values())):
        found = example_of(Nested(), inputs, kwargs, form)
        x, (first, second) = found.args
        assert [tuple(t.shape) for t in (x, first, second)] == [(2, 1, 4), (1, 2, 4), (3, 2)]
        assert found.kwargs["named"]["a"] is one
        assert found.repeated == ("x, axis 0", "pair[0], axis 1", "pair[1], axis 1")
    assert example_of(Nested(), inputs, kwargs, None) == (inputs, kwargs, ())


def test_an_error_names_what_was_repeated(tmp_path):
    """Where two sizes of 1 go together and one of them is said to be fixed."""
    layer = nn.Linear(32, 32)
    ao_lab.quantize_(layer, SchemeConfig(scheme="int8_rowwise"))

    class Ends(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x, y):
            return torch.cat([self.layer(x), y], -1)

    with pytest.raises(torch.onnx.OnnxExporterError) as caught:
        export_onnx(
            Ends().eval(), (torch.ones(1, 32), torch.ones(1, 32)), tmp_path / "model.onnx",
            dynamic_shapes={"x": {0: torch.export.Dim.DYNAMIC}, "y": None},
        )  # fmt: skip
    assert "repeated to 2: x, axis 0. Give an example of size 2" in "".join(caught.value.__notes__)
    assert list(tmp_path.iterdir()) == []


class Twice(nn.Linear):
    """A layer that multiplies twice its input."""

    def forward(self, x):
        return super().forward(2 * x)


@pytest.mark.parametrize("own", ["forward", "forward of an object", "hooks"])
def test_layers_that_compute_more_are_refused(own, tmp_path):
    """What stands for a linear layer in the file would leave it out."""
    layer = (Twice if own == "forward" else nn.Linear)(64, 32)
    ao_lab.quantize_(layer, SchemeConfig(scheme="int8_rowwise"))
    if own == "hooks":
        layer.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    if own == "forward of an object":
        layer.forward = lambda x: nn.functional.linear(2 * x, layer.weight)
    with pytest.raises(ValueError, match=f"0: {type(layer).__name__} has .*{own[:5]}.* of its own"):
        export_onnx(nn.Sequential(layer), (torch.ones(2, 64),), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_every_place_of_a_layer_is_exported_and_a_model_that_is_one():
    layer = nn.Linear(32, 32)
    ao_lab.quantize_(layer, SchemeConfig(scheme="int8_rowwise"))
    model = nn.Module()
    model.first = model.second = layer
    with _as_operators(model) as exported:
        assert exported is model
        assert isinstance(model.first, NBitsLinear)
        assert model.second is model.first
    assert model.first is model.second is layer
    with _as_operators(layer) as exported:
        assert isinstance(exported, NBitsLinear)


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
