"""Experts: each row by the weight of its own expert, and what of the weights is read."""

import pytest
import torch

from experiments.harness.measuring import Wrong
from experiments.linear.methods import BASE, OF_OURS
from experiments.linear.tables import ExpertLayers, Experts, checked, ends_of, kernel_of

CPU = torch.device("cpu")


def layers(experts=4):
    return ExpertLayers((64, 128), "cpu", 0, experts=experts)


def test_every_row_is_multiplied_by_its_expert():
    made = layers()
    one, (x,) = made.of(BASE, 10)[0], made.inputs(10, 1)
    counts = ends_of(10, 4, CPU).diff(prepend=torch.zeros(1, dtype=torch.int32)).tolist()
    assert sum(counts) == 10
    assert len(set(counts)) > 1
    wanted = [x[row].float() @ one.weight[expert].float().t() for row, expert in enumerate(of_rows(counts))]
    assert torch.allclose(one.product(x, one.weight), torch.stack(wanted), atol=1e-5)
    assert made.data == "4x64x128"


def of_rows(counts):
    return [expert for expert, count in enumerate(counts) for _ in range(count)]


@pytest.mark.parametrize("name", ["int4 g128", "fp8", "mxfp4"])
def test_what_is_stored_is_compared_and_another_order_is_wrong(name):
    made, method = layers(), OF_OURS[name]
    one, (x,) = made.of(method, 12)[0], made.inputs(12, 1)
    dense = made.of(BASE, 12)[0].weight
    assert isinstance(one, Experts)
    assert checked(method, one, one(x), x, dense) < 4e-3
    assert kernel_of(method, one, 12) == "dequantize"
    with pytest.raises(Wrong, match="outputs differ"):
        checked(method, one, one(x).flip(0), x, dense)


def test_rows_of_which_weights_are_made_dense(monkeypatch):
    """More than 64 an expert."""
    made, method = layers(), OF_OURS["int4 g128"]
    one = made.of(method, 8)[0]
    monkeypatch.setattr("experiments.linear.tables.groups_reason", lambda w, dtype: None)
    assert [kernel_of(method, one, rows) for rows in (8, 256, 257)] == ["fused", "fused", "dequantize"]


def test_floors_read_experts_that_have_rows():
    made = layers(8)
    assert made.share_read(2) == 2 / 8
    assert made.share_read(512) == 1.0
