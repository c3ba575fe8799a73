"""`sparsify_` with compressed storage: the pruned weight itself, in half of its bytes and the places."""

import io

import pytest
import torch
from torch import nn

from ao_lab import SparseQuantizedTensor, SparsityConfig, explain, sparsify_
from tests.support.quantized_weights import same

DTYPES = (torch.bfloat16, torch.float16)


def model(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("score", ["magnitude", "wanda"])
def test_weights_are_those_of_dense_storage(dtype, score):
    dense, ours = model(dtype), model(dtype)
    data = None if score == "magnitude" else [torch.randn(16, 64, dtype=dtype)]
    sparsify_(dense, SparsityConfig(score=score), calibration=data, blocks=None if data is None else "")
    config = SparsityConfig(score=score, storage="compressed")
    report = sparsify_(ours, config, calibration=data, blocks=None if data is None else "")
    assert str(config).endswith("compressed")
    for a, b, layer in zip((dense[0], dense[2]), (ours[0], ours[2]), report.changed, strict=True):
        assert isinstance(b.weight, nn.Parameter)
        assert isinstance(b.weight, SparseQuantizedTensor)
        assert not b.weight.requires_grad
        assert same(a.weight.detach(), b.weight.dequantize())
        assert (layer.storage, layer.shape) == ("compressed", tuple(a.weight.shape))
        assert layer.bytes == a.weight.nbytes // 2 + a.weight.numel() // 8 + 4
        assert f"compressed, {layer.bytes} bytes" in str(layer)
    x = torch.randn(3, 64, dtype=dtype)
    with torch.no_grad():
        assert same(ours(x), dense(x))
    told = explain(ours).layers[0]
    assert (told.sparsity, told.storage) == (f"2:4 by {score}", "compressed")


def test_weights_that_are_sparse_already_are_compressed_as_they_are():
    made = model(torch.bfloat16)
    sparsify_(made, SparsityConfig())
    before = made[0].weight.detach().clone()
    sparsify_(made, SparsityConfig(storage="compressed"))
    assert same(made[0].weight.dequantize(), before)


def test_transposed_layers_and_shared_weights():
    transformers = pytest.importorskip("transformers")
    layer = transformers.pytorch_utils.Conv1D(32, 64).to(torch.bfloat16)
    nn.init.normal_(layer.weight)
    dense = layer.weight.detach().clone()
    sparsify_(layer, SparsityConfig(storage="compressed"))
    kept = layer.weight.dequantize()
    assert layer.weight.shape == (64, 32)
    assert ((kept != 0).reshape(16, 4, 32).sum(1) == 2).all()
    assert same(kept[kept != 0], dense[kept != 0])
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        assert layer(x).shape == (3, 32)
    made = model(torch.bfloat16)
    made.add_module("twin", nn.Linear(64, 96, dtype=torch.bfloat16))
    made.twin.weight = made[0].weight
    original = made.twin.weight.detach().clone()
    sparsify_(made, SparsityConfig(storage="compressed"), lambda module, name: name == "0")
    assert same(made.twin.weight.detach(), original)
    assert isinstance(made[0].weight, SparseQuantizedTensor)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"storage": "packed"}, "storage"),
        ({"storage": "compressed", "pattern": "1:4"}, "pattern '2:4' only"),
        ({"storage": "compressed", "pattern": "4:8"}, "pattern '2:4' only"),
    ],
)
def test_configurations(change, message):
    with pytest.raises(ValueError, match=message):
        SparsityConfig(**change)


def test_what_is_refused_changes_nothing():
    made = model(torch.float32)
    before = made[0].weight.detach().clone()
    with pytest.raises(ValueError, match=r"holds bfloat16 and float16, got torch\.float32"):
        sparsify_(made, SparsityConfig(storage="compressed"))
    assert torch.equal(made[0].weight, before)
    made = model(torch.bfloat16)
    sparsify_(made, SparsityConfig(storage="compressed"))
    weight = made[0].weight
    with pytest.raises(ValueError, match="in 2:4 storage already"):
        sparsify_(made, SparsityConfig(storage="compressed"))
    assert made[0].weight is weight


def test_state_dicts():
    made, other = model(torch.bfloat16), model(torch.bfloat16)
    sparsify_(made, SparsityConfig(storage="compressed"))
    file = io.BytesIO()
    torch.save(made.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True), assign=True)
    assert torch.equal(other[0].weight, made[0].weight)
