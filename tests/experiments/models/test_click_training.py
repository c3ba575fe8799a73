"""What a click model is worth, by formulas on few numbers; trainings that begin alike; trainings that learn.

DLRMv2: its exact shapes, and what its layers compute.

Wukong: its exact shapes, floating-point operations beside the published ones, and what its layers compute.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn

import ao_lab
from experiments.data.drawn_ratings import impressions
from experiments.models import dlrm, wukong
from experiments.models.click_models import Tables
from experiments.models.click_training import (
    ClickTraining,
    Quality,
    auc,
    paired,
    predictions,
    quality,
    relative,
    train,
)
from experiments.models.dlrm import DLRM, DLRMV2, DLRMConfig, LowRankCross
from experiments.models.wukong import WUKONG, FactorizationBlock, Wukong, WukongConfig, WukongLayer, layers_of

PLAN = ClickTraining(steps=40, batch=256)


@pytest.fixture(scope="module")
def data():
    return impressions(300, 30, 1280, 0)


def test_quality_is_the_formulas():
    logits, labels = np.array([2.0, -1.0, 0.5, 0.5]), np.array([1.0, 0.0, 0.0, 1.0])
    p = 1 / (1 + np.exp(-logits))
    loss = -np.mean(labels * np.log(p) + (1 - labels) * np.log(1 - p))
    found = quality(logits, labels)
    assert found.log_loss == pytest.approx(loss)
    assert found.entropy == pytest.approx(loss / math.log(2))
    assert found.auc == pytest.approx((1 + 1 + 1 + 0.5) / 4)
    assert found.calibration == pytest.approx(p.mean() / 0.5)
    assert quality(np.array([1e4, -1e4]), np.array([0.0, 1.0])).log_loss == pytest.approx(1e4)
    with pytest.raises(ValueError, match="all 2 labels are 1"):
        quality(np.zeros(2), np.ones(2))


def test_auc_counts_pairs():
    generator = np.random.default_rng(0)
    logits, labels = generator.integers(0, 9, 60).astype(float), generator.integers(0, 2, 60).astype(float)
    pairs = [(a > b) + (a == b) / 2 for a in logits[labels > 0] for b in logits[labels == 0]]
    assert auc(logits, labels) == pytest.approx(np.mean(pairs))


@pytest.mark.parametrize(
    "model", [lambda d: dlrm.DLRM(dlrm.small(d, 8)), lambda d: wukong.Wukong(wukong.small(d, 8))]
)
def test_it_learns(data, model):
    """Better than always saying the share of ones by a twentieth of its log loss."""
    torch.manual_seed(0)
    one = model(data)
    train(one, data, PLAN, 0)
    found = quality(*predictions(one, data, PLAN))
    assert found.entropy < 0.95
    assert found.auc > 0.65


def test_pairs_begin_alike_and_see_the_same(data):
    def make():
        return dlrm.DLRM(dlrm.small(data, 8))

    seen = []
    plan = ClickTraining(steps=2, batch=64, evaluated=100)
    found = paired(make, {"base": None, "same": lambda model: seen.append(model)}, data, plan, (0, 1))
    assert found["base"] == found["same"]
    assert found["base"][0] != found["base"][1]
    assert len(seen) == 2
    assert relative(found["base"], found["same"]).mean == 0
    worse = [Quality(one.log_loss * by, 1, 1, 1) for one, by in zip(found["base"], (1.01, 1.03), strict=True)]
    one = relative(found["base"], worse)
    assert one.mean == pytest.approx(2)
    assert one.half == pytest.approx(12.7062 * math.sqrt(2) / math.sqrt(2))


def test_what_stops_being_finite_is_said(data):
    model = dlrm.DLRM(dlrm.small(data, 8))
    with torch.no_grad():
        model.top[-1].bias.fill_(math.nan)
    with pytest.raises(ValueError, match="the log loss is nan in step 0"):
        train(model, data, ClickTraining(steps=2, batch=16), 0)


TINY = DLRMConfig(
    name="tiny",
    dense=3,
    sizes=(5, 7),
    hots=(1, 3),
    width=8,
    bottom=(4,),
    cross=2,
    rank=4,
    top=(6,),
    norm=True,
)


def test_shapes_are_mlperfs():
    model = DLRM(DLRMV2, device="meta")
    shapes = [(m.in_features, m.out_features) for m in model.modules() if isinstance(m, nn.Linear)]
    cross = [(3456, 512), (512, 3456)] * 3
    top = [(3456, 1024), (1024, 1024), (1024, 512), (512, 256), (256, 1)]
    assert shapes == [(13, 512), (512, 256), (256, 128), *cross, *top]
    assert DLRMV2.multiply_adds == sum(k * n for k, n in shapes)
    assert model.tables.bag.weight.shape == (204_184_588, 128)
    assert sum(DLRMV2.hots) == 214


def test_a_cross_layer():
    torch.manual_seed(0)
    layer, first, x = LowRankCross(6, 2), torch.randn(3, 6), torch.randn(3, 6)
    expected = first * (x @ layer.down.weight.T @ layer.up.weight.T + layer.up.bias) + x
    torch.testing.assert_close(layer(first, x), expected)


def test_tables_are_looked_up_side_by_side():
    """One lookup gives what a bag for each table gives."""
    torch.manual_seed(0)
    tables = Tables((5, 7), (1, 3), 4)
    ids = torch.stack([torch.randint(0, 5, (6,)), *torch.randint(0, 7, (3, 6))], 1)
    weight = tables.bag.weight
    expected = torch.stack([weight[ids[:, 0]], weight[5:][ids[:, 1:]].sum(1)], 1)
    torch.testing.assert_close(tables(ids), expected)


def test_quantized_tables_give_the_sums_of_their_rows():
    torch.manual_seed(0)
    tables = Tables((5, 7), (1, 3), 32)
    ao_lab.apply_mods_(tables, "tables_in_8_bits")
    ids = torch.stack([torch.randint(0, 5, (6,)), *torch.randint(0, 7, (3, 6))], 1)
    weight = tables.bag.weight.dequantize()
    expected = torch.stack([weight[ids[:, 0]], weight[5:][ids[:, 1:]].sum(1)], 1)
    torch.testing.assert_close(tables(ids), expected)


def test_ids_outside_their_table():
    """Id 5 of the first table would be the second's row 0."""
    tables = Tables((5, 7), (1, 3), 4)
    with pytest.raises(ValueError, match="sample 1 has id 5 in column 0, whose table has rows 0 to 4"):
        tables(torch.tensor([[4, 6, 6, 6], [5, 0, 0, 0]]))
    with pytest.raises(ValueError, match="sample 0 has id -1 in column 3"):
        tables(torch.tensor([[4, 6, 6, -1]]))
    with pytest.raises(ValueError, match=r"take \(B, 4\)"):
        tables(torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="2 tables and 1 bags"):
        Tables((5, 7), (1,), 4)


def test_a_logit_a_sample_depends_on_its_ids():
    torch.manual_seed(0)
    model = DLRM(TINY)
    dense, ids = torch.randn(2, 3).repeat(2, 1), torch.tensor([[1, 2, 3, 4]] * 2 + [[2, 2, 3, 4]] * 2)
    logits = model(dense, ids)
    assert logits.shape == (4,)
    assert (logits[:2] != logits[2:]).all()


TINY_WUKONG = WukongConfig(
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
    block, x = FactorizationBlock(TINY_WUKONG, 5), torch.randn(2, 5, 4)
    block.norm, block.network = nn.Identity(), nn.Linear(15, 8, bias=False)
    columns = block.columns.weight
    expected = torch.stack([one @ one.T @ columns.T for one in x]).flatten(1) @ block.network.weight.T
    torch.testing.assert_close(block(x), expected.reshape(2, 2, 4))


def test_a_layer():
    torch.manual_seed(0)
    layer, x = WukongLayer(TINY_WUKONG, 5), torch.randn(2, 5, 4)
    parts = torch.cat([layer.pairs(x), torch.einsum("nk,bkd->bnd", layer.compression.linear.weight, x)], 1)
    expected = layer.norm(parts + torch.einsum("nk,bkd->bnd", layer.residual.linear.weight, x))
    torch.testing.assert_close(layer(x), expected)


def test_a_logit_a_sample():
    torch.manual_seed(0)
    model, ids = Wukong(TINY_WUKONG), torch.tensor([[0, 1, 2, 3, 4], [1, 1, 2, 3, 4]])
    logits = model(torch.zeros(2, 2), ids)
    assert logits.shape == (2,)
    assert logits[0] != logits[1]
    with pytest.raises(ValueError, match="has no tables; call interact"):
        Wukong(layers_of(WUKONG["Wukong 5.6 GFLOP"], 1), device="meta")(torch.zeros(2, 2), ids)
