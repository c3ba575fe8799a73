"""DLRMv2: its exact shapes, and what its layers compute."""

import pytest
import torch
from torch import nn

import ao_lab
from experiments.models.click_models import Tables
from experiments.models.dlrm import DLRM, DLRMV2, DLRMConfig, LowRankCross

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
