"""The list of a model's blocks: the longest of one class, by name, or the whole model."""

import pytest
from torch import nn

from ao_lab.calibration.blocks import block_lists, find_blocks
from experiments.models.llama import LanguageModel, ModelSettings


class Block(nn.Module):
    def __init__(self, experts=0):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(experts))


def model_of(**lists):
    return nn.ModuleDict({name: nn.ModuleList(modules) for name, modules in lists.items()})


def test_blocks_of_a_language_model():
    model = LanguageModel(ModelSettings(layers=3))
    found = find_blocks(model)
    assert list(found) == ["model.layers.0", "model.layers.1", "model.layers.2"]
    assert list(found.values()) == list(model.model.layers)


def test_the_longest_list_wins_and_experts_inside_blocks_do_not():
    model = model_of(few=[Block()], blocks=[Block(experts=8), Block(experts=8)])
    assert list(block_lists(model)) == ["few", "blocks"]
    assert list(find_blocks(model)) == ["blocks.0", "blocks.1"]


def test_lists_of_layers_and_of_mixed_classes_are_none():
    model = model_of(
        heads=[nn.Linear(4, 4)] * 5, norms=[nn.LayerNorm(4)] * 5, mixed=[Block(), nn.Sequential(Block())]
    )
    with pytest.raises(ValueError, match=r"has no nn.ModuleList of blocks.*blocks=''"):
        find_blocks(model)
    assert list(find_blocks(model, "mixed")) == ["mixed.0", "mixed.1"]


def test_of_two_equal_lists_one_is_named():
    model = model_of(encoder=[Block(), Block()], decoder=[Block(), Block()])
    with pytest.raises(
        ValueError, match=r"encoder and decoder are lists of 2 blocks each.*name it by blocks="
    ):
        find_blocks(model)
    assert list(find_blocks(model, "decoder")) == ["decoder.0", "decoder.1"]


def test_names():
    model = nn.Sequential(nn.Sequential(Block(), Block()), nn.Linear(4, 4))
    assert list(find_blocks(model, "0")) == ["0.0", "0.1"]
    assert find_blocks(model, "") == {"": model}
    with pytest.raises(ValueError, match=r"blocks='1' is a Linear of 0 of this model"):
        find_blocks(model, "1")
    with pytest.raises(ValueError, match=r"blocks='layer' is no module.*\(here layers\)"):
        find_blocks(model_of(layers=[Block()]), "layer")
    with pytest.raises(TypeError, match=r"blocks is the name of a list of modules, got int: 3"):
        find_blocks(model, 3)
