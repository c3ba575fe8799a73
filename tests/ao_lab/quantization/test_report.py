"""What `print(model)` shows of quantized weights, and that nothing else of a module has changed for it."""

import copy
import pickle

import torch
from torch import nn

from ao_lab import Int4WeightOnlyConfig, Int8WeightOnlyConfig, SparsityConfig, quantize_, sparsify_
from tests.ao_lab.transforms.test_layers import ByLinear


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8, 64), nn.Linear(64, 32), nn.Linear(32, 8, bias=False), ByLinear())


def test_schemes_are_shown():
    model = small()
    before = repr(model)
    quantize_(model, Int4WeightOnlyConfig(group_size=32), lambda m, name: name == "1")
    quantize_(model, Int8WeightOnlyConfig(), lambda m, name: name in ("0", "3"))
    shown = repr(model)
    assert "Linear(in_features=64, out_features=32, bias=True, weight=int4_g32_asymmetric)" in shown
    assert "Linear(in_features=32, out_features=8, bias=False)" in shown
    assert "Embedding(8, 64, weight=int8_rowwise)" in shown
    assert "ByLinear(up=int8_rowwise)" in shown
    assert repr(small()) == before
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert repr(other) == shown
        assert type(other[1]) is nn.Linear
        assert vars(other[1]).keys() == vars(nn.Linear(2, 2)).keys()
        assert list(other.state_dict()) == list(small().state_dict())


def test_compressed_weights_are_shown():
    model = nn.Sequential(nn.Linear(64, 32))
    sparsify_(model, SparsityConfig(storage="dense"))
    quantize_(model, Int8WeightOnlyConfig(sparsity="2:4"))
    assert "weight=int8_rowwise_2:4" in repr(model)


def test_a_module_of_ones_own_keeps_its_text():
    class Own(nn.Linear):
        def extra_repr(self):
            return "own"

    model = nn.Sequential(Own(64, 32), nn.ReLU(inplace=True))
    quantize_(model, Int8WeightOnlyConfig())
    assert "Own(own)" in repr(model)
    assert "ReLU(inplace=True)" in repr(model)
