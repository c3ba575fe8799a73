"""What is 2:4, what survives quantization, and bits by hand."""

import pytest
import torch
from torch import nn

from experiments.sparsity.methods import (
    GROUP,
    METHODS,
    STORAGES,
    bits_per_weight,
    inside_blocks,
    is_sparse,
    parts_of,
    prune,
    sparse_layers,
    store,
    stored_as,
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(64, 32, bias=False)])
        self.head = nn.Linear(32, 16, bias=False)

    def forward(self, x):
        return self.head(self.blocks[0](x))


def test_two_of_four_are_counted_in_groups():
    assert is_sparse(torch.tensor([[1.0, 0, 2, 0, 0, 0, 0, 3]]))
    assert not is_sparse(torch.tensor([[0, 1.0, 2, 3, 0, 0, 0, 0]]))


@pytest.mark.parametrize("storage", STORAGES)
def test_pruned_layers_stay_so_when_they_are_quantized(storage):
    model = Model()
    assert sparse_layers(model) == (0, 1)
    prune(model, "magnitude", ())
    store(model, storage)
    assert sparse_layers(model) == (1, 1)
    assert type(model.head.weight) is nn.Parameter


def test_bits_by_hand():
    # Scales of 4 bytes: one for 32 codes of 4 bits, one for a row of 64 codes of 8 bits.
    assert GROUP == 32
    dense = {"": 16, "int4": 4 + 1, "fp8": 8 + 0.5}
    sparse = {"": 8 + 1, "int4": 2 + 1 + 1, "fp8": 4 + 1 + 0.5}
    for storage in STORAGES:
        model = Model()
        store(model, storage)
        assert bits_per_weight(model, sparse=False) == dense[storage]
        assert bits_per_weight(model, sparse=True) == sparse[storage]


def test_names_are_taken_apart_again():
    for method in METHODS:
        for storage in STORAGES:
            assert parts_of(stored_as(method, storage)) == (method, storage)


def test_layers_of_blocks_are_chosen():
    assert inside_blocks(nn.Linear(1, 1), "model.layers.0.mlp.up_proj")
    assert not inside_blocks(nn.Linear(1, 1), "lm_head")
    assert not inside_blocks(nn.LayerNorm(1), "blocks.0.norm1")
