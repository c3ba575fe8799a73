"""What models do to quantized weights in place: other dtypes and devices while outputs are alive, rescaling, lookups."""

import copy
import gc

import pytest
import torch
from torch import nn

import ao_lab
from ao_lab import QuantizedTensor, quantize_

pytestmark = pytest.mark.usefixtures("few_objects")

CHANGES = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "to a dtype": lambda m: m.to(torch.float16),
    "to a device": lambda m: m.to("meta"),
    "to where it is": lambda m: m.to("cpu"),
}


def model():
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8))
    quantize_(made, ao_lab.Int8WeightOnlyConfig())
    return made


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_models_change_while_an_output_is_alive(change):
    """The graph of the output keeps the weights that it was computed with."""
    changed, kept = model(), model()
    x = torch.randn(2, 64, requires_grad=True)
    y, expected = changed(x), kept(x)
    change(changed)
    gc.collect()
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
    net = model()
    dense, view, alias = net[0].weight.dequantize(), net[0].weight.t(), net[0].weight.detach()
    net.half()
    gc.collect()
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
