"""Wukong: its exact shapes, floating-point operations beside the published ones, and what its layers compute."""

import pytest
import torch
from torch import nn

from experiments.models.wukong import WUKONG, FactorizationBlock, Wukong, WukongConfig, WukongLayer, layers_of

TINY = WukongConfig(
    name="tiny", layers=2, half=2, pairs=3, hidden=(8,), features=5, width=4, dense=2, sizes=(3, 4, 5, 6), hots=(1, 1, 2, 1)
)  # fmt: skip


def test_shapes_are_the_papers():
    config = WUKONG["Wukong 22.2 GFLOP"]
    model = Wukong(config, device="meta")
    shapes = [
        (m.in_features, m.out_features)
        for m in model.layers[1].pairs.network.modules()
        if isinstance(m, nn.Linear)
    ]
    assert shapes == [(18432, 8192), (8192, 8192), (8192, 8192), (8192, 15360)]
    assert model.layers[0].pairs.network[0].linear.in_features == 720 * 96
    assert model.layers[1].compression.linear.weight.shape == (96, 192)
    assert isinstance(model.layers[1].residual, nn.Identity)


@pytest.mark.parametrize("name", WUKONG)
def test_operations_are_near_the_published(name):
    """The paper does not print its head and its first projection: 0.81 to 1.14 of the published counts."""
    config = WUKONG[name]
    assert 0.8 < config.training_gflop / config.published < 1.15


def test_operations_are_those_of_the_layers():
    config = layers_of(WUKONG["Wukong 5.6 GFLOP"], 1)
    model = Wukong(config, device="meta")
    per_column = {"columns", "compression", "residual"}
    total = 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            times = config.width if per_column & {*name.split(".")} else 1
            total += module.weight.numel() * times
    products = 720 * config.width * config.pairs
    assert config.multiply_adds == total + products


def test_pairs_are_products_with_learned_columns():
    torch.manual_seed(0)
    block, x = FactorizationBlock(TINY, 5), torch.randn(2, 5, 4)
    block.norm, block.network = nn.Identity(), nn.Linear(15, 8, bias=False)
    columns = block.columns.weight
    expected = torch.stack([one @ one.T @ columns.T for one in x]).flatten(1) @ block.network.weight.T
    torch.testing.assert_close(block(x), expected.reshape(2, 2, 4))


def test_a_layer():
    torch.manual_seed(0)
    layer, x = WukongLayer(TINY, 5), torch.randn(2, 5, 4)
    parts = torch.cat([layer.pairs(x), torch.einsum("nk,bkd->bnd", layer.compression.linear.weight, x)], 1)
    expected = layer.norm(parts + torch.einsum("nk,bkd->bnd", layer.residual.linear.weight, x))
    torch.testing.assert_close(layer(x), expected)


def test_a_logit_a_sample():
    torch.manual_seed(0)
    model, ids = Wukong(TINY), torch.tensor([[0, 1, 2, 3, 4], [1, 1, 2, 3, 4]])
    logits = model(torch.zeros(2, 2), ids)
    assert logits.shape == (2,)
    assert logits[0] != logits[1]
    with pytest.raises(ValueError, match="has no tables; call interact"):
        Wukong(layers_of(WUKONG["Wukong 5.6 GFLOP"], 1), device="meta")(torch.zeros(2, 2), ids)
