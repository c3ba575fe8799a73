"""`quantize_` one layer at a time: what is kept alive, what an interruption leaves, other devices, the meta device."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import ao_lab
import reference
from ao_lab import (
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    QuantizedTensor,
    SchemeConfig,
    explain,
    load_pretrained,
    quantize_,
    save_pretrained,
)
from ao_lab.checkpoint.model_builder import parameters_without_memory
from ao_lab.gemm.select import PRODUCTS
from ao_lab.quantization import api
from experiments.models.llama import LanguageModel, ModelSettings
from tests.gpu.harness.subject import Asked
from tests.gpu.models import quantize as quantize_on_gpu

pytestmark = pytest.mark.usefixtures("few_objects")

TOKENS = torch.arange(24).reshape(2, 12)


def language_model():
    torch.manual_seed(0)
    return LanguageModel(ModelSettings(layers=2)).eval()


def same_weights(a, b):
    first, second = dict(a.named_parameters()), dict(b.named_parameters())
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def stopping(monkeypatch, after, error):
    """quantize_parameter raises `error` once it has been called `after` times."""
    calls, original = [], api.quantize_parameter

    def stops(*given):
        calls.append(given)
        if len(calls) == after + 1:
            raise error
        return original(*given)

    monkeypatch.setattr(api, "quantize_parameter", stops)


@pytest.fixture
def unwatched():
    """Objects of other tests, many where a process has run a thousand: the collector and its lists pass over them."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("unwatched")
def test_originals_are_freed_one_by_one():
    """After each weight the dense ones that live are those to come."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(6)))
    originals = [weakref.ref(layer.weight.untyped_storage()) for layer in model]
    alive = []

    def progress(name, done, total):
        gc.collect()
        alive.append((name, done, total, sum(ref() is not None for ref in originals)))

    quantize_(model, Int8WeightOnlyConfig(), progress=progress)
    assert alive == [(f"{i}.weight", i + 1, 6, 5 - i) for i in range(6)]


@pytest.mark.usefixtures("unwatched")
def test_live_bytes_stay_near_the_model():
    """All tensors that live, between two weights: never more than the model and one layer."""
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
    before, most = sum(p.numel() * p.element_size() for p in model.parameters()), []

    def progress(name, done, total):
        most.append(sum(s.nbytes() for s in storages()))

    quantize_(model, Int8WeightOnlyConfig(), progress=progress)
    assert max(most) < before
    assert most == sorted(most, reverse=True)
    assert before * 0.25 < most[-1] < before * 0.26


def storages():
    found = {}
    for value in gc.get_objects():
        # Other tests leave fake tensors behind, which have no memory.
        if type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_meta:
            storage = value.untyped_storage()
            found[storage.data_ptr()] = storage
    return list(found.values())


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("done", [0, 3, 14])
def test_an_interruption_leaves_whole_weights_and_goes_on(monkeypatch, done, error):
    model, whole = language_model(), language_model()
    expected = quantize_(whole, Int8WeightOnlyConfig())
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    stopping(monkeypatch, done, error("out of memory"))
    with pytest.raises(error) as caught:
        quantize_(model, Int8WeightOnlyConfig())
    assert f"{done} of 15 weights quantized" in caught.value.__notes__[0]
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, QuantizedTensor):
            assert parameter is before[name][0]
            assert torch.equal(parameter, before[name][1])
        else:
            assert torch.equal(parameter, whole.get_parameter(name))
    report = explain(model)
    assert len(report.changed) == done
    reasons = [layer.reason for layer in report.left if layer.kind == "Linear"]
    assert reasons == ["quantize_ stopped before it; call it again"] * (15 - done)
    assert model(TOKENS).isfinite().all()
    monkeypatch.undo()
    assert quantize_(model, Int8WeightOnlyConfig()) == expected
    assert same_weights(model, whole)


def test_a_shared_weight_is_placed_everywhere_or_nowhere(monkeypatch):
    """An interruption between two places of one weight."""
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64), "c": nn.Linear(64, 64)})
    model["b"].weight = model["a"].weight
    put = api.Change.put
    calls = []

    def half(change, made):
        calls.append(made)
        if len(calls) == 1:
            place, name = next(iter(change.places.values()))
            place._parameters[name] = made
            raise KeyboardInterrupt
        put(change, made)

    monkeypatch.setattr(api.Change, "put", half)
    with pytest.raises(KeyboardInterrupt):
        quantize_(model, Int8WeightOnlyConfig())
    assert isinstance(model["a"].weight, QuantizedTensor)
    assert model["a"].weight is model["b"].weight
    assert not isinstance(model["c"].weight, QuantizedTensor)


def test_what_shapes_say_is_found_before_anything_changes():
    """The second level of NF4's scales takes whole groups in some records: known beforehand, layer by layer."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 96))
    report = quantize_(model, SchemeConfig(scheme="torchao.nf4"))
    assert [layer.changed for layer in report.layers] == [True, False]
    assert "second level" in report.left[0].reason
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(96, 64))
    with pytest.raises(ValueError, match="kernel 'int8' does not take"):
        quantize_(model, SchemeConfig(scheme="int8_g32", activation_scheme="int8_rowwise", kernel="int8"))
    assert not any(isinstance(p, QuantizedTensor) for p in model.parameters())


def test_the_device_is_where_everything_ends(monkeypatch):
    """With a stand-in for another device: each weight goes there alone, the rest of the model at the end."""
    model, moved, original = language_model(), [], torch.Tensor.to

    def to(tensor, *given, **options):
        moved.append(given)
        return original(tensor, *given, **options)

    expected = language_model()
    quantize_(expected, Int8WeightOnlyConfig())
    monkeypatch.setattr(torch.Tensor, "to", to)
    quantize_(model, Int8WeightOnlyConfig(), device="cpu")
    monkeypatch.undo()
    assert moved.count(("cpu",)) >= 15
    assert same_weights(model, expected)


CONFIGS = [
    Int8WeightOnlyConfig(),
    Int4WeightOnlyConfig(group_size=32),
    Int8DynamicActivationInt8WeightConfig(),
    *(SchemeConfig(scheme=name) for name in ("nf4", "nvfp4", "mxfp4", "mxfp6_e2m3", "fp8_128x128", "int3_g32_asymmetric")),
]  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: str(config.recipe()))
def test_meta_weights_have_the_parts_of_real_ones_and_are_filled(config):
    real = language_model()
    quantize_(real, config)
    with torch.device("meta"):
        model = LanguageModel(ModelSettings(layers=2)).eval()
    report = quantize_(model, config)
    assert [layer.scheme for layer in report.changed] == [str(config.recipe())] * 15
    for name, parameter in real.named_parameters():
        if isinstance(parameter, QuantizedTensor):
            empty = model.get_parameter(name)
            assert empty.is_meta
            assert empty.meta == parameter.meta
            shapes = [
                {k: p if p is None else (p.shape, p.dtype, p.stride()) for k, p in t.parts.items()}
                for t in (empty, parameter)
            ]
            assert shapes[0] == shapes[1]
            assert empty.dequantize().shape == parameter.shape
    assert model(TOKENS.to("meta")).shape == real(TOKENS).shape
    model.load_state_dict(real.state_dict(), assign=True)
    assert same_weights(model, real)


def test_meta_weights_are_made_of_shapes_alone(monkeypatch):
    """By the operators' own shapes: nothing is computed."""

    def computes(*given, **options):
        raise AssertionError("numbers were asked for")

    with torch.device("meta"):
        model = nn.Linear(4096, 4096)
    monkeypatch.setattr(reference, "quantize", computes)
    monkeypatch.setattr(reference, "dequantize", computes)
    quantize_(model, Int4WeightOnlyConfig())
    assert model.weight.dequantize().shape == (4096, 4096)


def test_a_saved_model_fills_one_without_numbers(tmp_path):
    real = language_model()
    quantize_(real, Int4WeightOnlyConfig())
    save_pretrained(real, tmp_path)
    with parameters_without_memory():
        empty = LanguageModel(ModelSettings(layers=2)).eval()
    quantize_(empty, Int4WeightOnlyConfig())
    load_pretrained(tmp_path, empty)
    assert same_weights(empty, real)
    assert torch.equal(empty(TOKENS), real(TOKENS))


def test_meta_weights_become_empty_ones():
    with torch.device("meta"):
        model = nn.Linear(64, 64)
    quantize_(model, Int4WeightOnlyConfig(group_size=32))
    copy.deepcopy(model)
    model.to_empty(device="cpu")
    assert isinstance(model.weight, QuantizedTensor)
    assert model.weight.dequantize().isfinite().all()


def test_meta_weights_are_not_quantized_elsewhere():
    with torch.device("meta"):
        model = nn.Linear(64, 64)
    with pytest.raises(ValueError, match="quantize_pretrained"):
        quantize_(model, Int8WeightOnlyConfig(), device="cpu")


def test_checks_leave_no_trace():
    """What is asked of fake tensors says nothing about real ones."""
    model = nn.Linear(64, 64)
    config = Int8DynamicActivationInt8WeightConfig(kernel="int8")
    quantize_(model, config)
    assert type(model.weight.codes) is torch.Tensor
    assert PRODUCTS["int8"].unsupported_reason(model.weight.transposed(), torch.float32) is None


@pytest.mark.parametrize(
    "config", [Int4WeightOnlyConfig(), SchemeConfig(scheme="fp8_tensorwise"), SchemeConfig(scheme="nf4")]
)
def test_fake_tensors_are_quantized_as_such(config):
    """As tracers and planners of memory have them, large ones too."""
    with FakeTensorMode():
        model = nn.Linear(2048, 2048)
        quantize_(model, config)
        assert isinstance(model.weight.codes, FakeTensor)
        assert model(torch.randn(2, 2048)).shape == (2, 2048)


def test_the_measurement_for_gpus_runs():
    """tests/gpu/models/quantize.py, on small shapes: every configuration, with the bits of the host."""
    checks = list(quantize_on_gpu.checks(Asked(device="cpu")))
    assert len(checks) == len(quantize_on_gpu.CONFIGS)
    assert [line for _, check in checks for line in check()] == []


# What models do to quantized weights in place: other dtypes and devices while outputs are alive, rescaling, lookups.


CHANGES = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "to a dtype": lambda m: m.to(torch.float16),
    "to a device": lambda m: m.to("meta"),
    "to where it is": lambda m: m.to("cpu"),
}


def int8_layers():
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8))
    quantize_(made, ao_lab.Int8WeightOnlyConfig())
    return made


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_models_change_while_an_output_is_alive(change):
    """The graph of the output keeps the weights that it was computed with."""
    changed, kept = int8_layers(), int8_layers()
    x = torch.randn(2, 64, requires_grad=True)
    y, expected = changed(x), kept(x)
    change(changed)
    gc.collect(1)  # what was just let go; a look at all objects takes seconds
    dtype, device = changed[0].bias.dtype, changed[0].bias.device
    for layer in changed:
        assert isinstance(layer.weight, QuantizedTensor)
        assert isinstance(layer.weight, nn.Parameter)
        assert (layer.weight.dtype, layer.weight.device, layer.weight.codes.device) == (dtype, device, device)
    (got,), (wanted,) = torch.autograd.grad(y.sum(), x), torch.autograd.grad(expected.sum(), x)
    assert torch.equal(got, wanted)
    if device.type != "meta":
        assert torch.equal(changed[0].weight.codes, kept[0].weight.codes)
        assert changed(x.detach().to(dtype)).dtype == dtype


def test_models_change_while_a_view_is_alive():
    net = int8_layers()
    dense, view, alias = net[0].weight.dequantize(), net[0].weight.t(), net[0].weight.detach()
    net.half()
    gc.collect(1)  # what was just let go; a look at all objects takes seconds
    assert (net[0].weight.dtype, view.dtype, alias.dtype) == (torch.float16, torch.float32, torch.float32)
    assert torch.equal(view.dequantize(), dense.t())
    assert torch.equal(alias.dequantize(), dense)


def test_tied_weights_stay_tied():
    net = nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 32, bias=False))
    net[1].weight = net[0].weight
    quantize_(net, ao_lab.Int8WeightOnlyConfig(), lambda module, name: True)
    y = net(torch.tensor([1, 2]))
    net.bfloat16()
    assert y.dtype == torch.float32
    assert net[0].weight is net[1].weight
    assert net[0].weight.dtype == torch.bfloat16


def test_rwkv_rescales_its_weights():
    """It divides weights when it is evaluated and multiplies them to train: outputs are those of the dequantized model."""
    from transformers import RwkvConfig, RwkvForCausalLM

    torch.manual_seed(0)
    size = {"hidden_size": 64, "attention_hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    dense = RwkvForCausalLM(RwkvConfig(vocab_size=64, rescale_every=2, **size)).eval()
    net = copy.deepcopy(dense)
    quantize_(net, ao_lab.SchemeConfig(scheme="int4_g32", kernel="dequantize"))
    for one, other in zip(dense.parameters(), net.parameters(), strict=True):
        if isinstance(other, QuantizedTensor):
            one.data = other.dequantize()
    before = [p.dequantize() for p in net.parameters() if isinstance(p, QuantizedTensor)]
    ids = torch.randint(0, 64, (1, 8))
    with torch.no_grad():
        assert torch.equal(net(ids).logits, dense(ids).logits)
        during = [p.dequantize() for p in net.parameters() if isinstance(p, QuantizedTensor)]
        assert not all(map(torch.equal, before, during))
        assert torch.equal(net.train()(ids).logits, dense.train()(ids).logits)
    after = [p.dequantize() for p in net.parameters() if isinstance(p, QuantizedTensor)]
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("options", [{}, {"padding_idx": 1}, {"sparse": True}, {"scale_grad_by_freq": True}])
@pytest.mark.parametrize(
    "scheme", ["int8_rowwise", "int4_g32_asymmetric_bf16", "mxfp4", "nf4", "fp8_128x128", "fp8_tensorwise"]
)
def test_lookups_are_those_of_a_dense_table(scheme, options):
    """What is out of range raises the same error, whether rows or the whole table are dequantized."""
    table = nn.Sequential(nn.Embedding(128, 256, **options))
    quantize_(table, ao_lab.SchemeConfig(scheme=scheme), lambda module, name: True)
    dense = nn.Embedding.from_pretrained(table[0].weight.dequantize(), **options)
    for index in ([[0, 127], [5, 5]], [], [[1]]):
        index = torch.tensor(index, dtype=torch.int64)
        assert torch.equal(table(index), dense(index))
        assert torch.equal(table(index.int()), dense(index.int()))
    for index in (-1, 128, -129):
        for net in (dense, table):
            with pytest.raises(IndexError, match="index out of range in self"):
                net(torch.tensor([0, index]))
    for index in (torch.tensor([1.0]), torch.tensor([True])):
        for net in (dense, table):
            with pytest.raises(RuntimeError, match="Expected"):
                net(index)


def test_numbers_of_experts_count_from_the_end_too():
    experts = ao_lab.quantized(torch.randn(4, 16, 32), "int8_rowwise")
    assert torch.equal(experts[torch.tensor([-1])].dequantize(), experts.dequantize()[-1:])
    with pytest.raises(IndexError, match="out of range"):
        torch.index_select(experts, 0, torch.tensor([-1]))


def test_tables_that_renormalize_themselves_are_refused():
    table = nn.Sequential(nn.Embedding(8, 32, max_norm=1.0), nn.Linear(32, 32))
    with pytest.raises(ValueError, match=r"0\.weight: max_norm=1\.0 changes rows of the table"):
        quantize_(table, ao_lab.Int8WeightOnlyConfig(), lambda module, name: name == "0")
    assert not isinstance(table[0].weight, QuantizedTensor)
    with pytest.raises(ValueError, match="max_norm"):
        quantize_(table, ao_lab.QATConfig(ao_lab.Int8WeightOnlyConfig()), lambda module, name: name == "0")
