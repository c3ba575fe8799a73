"""Floors by hand, what checkpointing keeps, and rows of single layers without a GPU."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from experiments.fp8_training.deadline import Deadline
from experiments.fp8_training.methods import OURS, PLAIN, Method
from experiments.fp8_training.speed import blocks, checkpointing, grid, linear
from experiments.fp8_training.speed.floor import Rates, floor_seconds

RATES = Rates(float8=2e3, bfloat16=1e3, copy=1e2)
MINE = Method(library=OURS, recipe="rowwise")


def test_floors_by_hand():
    m, k, n = 32, 64, 128
    one = 2 * m * k * n
    elements = m * k + k * n + m * n
    assert floor_seconds((m, k, n), "", RATES) == pytest.approx(3 * one / 1e3)
    # Two bytes read, one written in each of two layouts.
    assert floor_seconds((m, k, n), "rowwise", RATES) == pytest.approx(3 * one / 2e3 + 4 * elements / 1e2)
    # No Hopper multiplies MX blocks; elements of 4 bits take half a byte.
    assert floor_seconds((m, k, n), "mxfp4", RATES) == pytest.approx(3 * one / 1e3 + 3 * elements / 1e2)
    # The weight gradient is dense: its operands are not cast, x and g are written once.
    high = 2 * one / 2e3 + one / 1e3 + (3 * (m * k + m * n) + 4 * k * n) / 1e2
    assert floor_seconds((m, k, n), "rowwise_with_gw_hp", RATES) == pytest.approx(high)


def test_errors_and_times_of_a_layer():
    bench = linear.Bench.of("cpu", 0, Deadline(None))
    found = linear.measure(bench, (32, 64, 32), (PLAIN, MINE, Method(library=OURS, recipe="nothing")))
    assert {key[0] for key in found} == {linear.EAGER}
    plain, mine, failed = found.values()
    assert plain["time over bfloat16"] == (1.0, "ratio")
    assert plain["error of the output"][0] < 0.004 < mine["error of the output"][0] < 0.06
    assert next(iter(failed)).startswith("status: error: ValueError: unknown recipe 'nothing'")
    late = linear.measure(linear.Bench.of("cpu", 0, Deadline(-1.0)), (32, 64, 32), (PLAIN,))
    assert [*late[linear.EAGER, "bfloat16"]] == ["status: not run: the -1 s of this run did not reach it"]


def test_a_wrong_product_gets_no_time(monkeypatch):
    monkeypatch.setattr(Method, "prepare", lambda self, model: model[0].weight.data.neg_())
    bench = linear.Bench.of("cpu", 0, Deadline(None))
    found = linear.measure(bench, (32, 64, 32), (PLAIN, MINE))[linear.EAGER, MINE.name]
    assert [*found] == ["status: wrong: the output differs by 2.000 of its size"]


def test_every_second_product_is_kept_in_both_passes():
    decide = checkpointing.policy()

    class Pass:
        def __init__(self, again):
            self.is_recompute = again

    mm, silu = torch.ops.aten.mm.default, torch.ops.aten.silu.default
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    kept = [decide(Pass(again), one) for again in (False, True) for one in (mm, silu, mm, attention, mm)]
    save, again = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    assert kept == [save, again, again, save, save] * 2
    with pytest.raises(ValueError, match="checkpointing is none"):
        checkpointing.apply([], "some")


@pytest.mark.parametrize("kind", [checkpointing.SECOND, checkpointing.PER_OP])
def test_checkpointed_layers_give_the_same_gradients(kind):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8)) for _ in range(2)))
    x = torch.randn(4, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    checkpointing.apply(model, kind)
    assert torch.equal(torch.autograd.grad(model(x).sum(), x)[0], expected)


def test_groups_and_cells_are_those_of_the_published_tables():
    assert len(grid.CELLS) == 36 * 6
    assert {group.length for group in blocks.GPU_GROUPS if group.shape.layers == 2} == {4096, 8192}
    settings = [(group.shape.name, group.setting) for group in blocks.GPU_GROUPS]
    assert len(set(settings)) == len(settings)
    assert PLAIN.name == blocks.GPU_GROUPS[0].methods[0].name == "bfloat16"


def test_a_cell_has_values_of_all_three_sides_or_says_why_not(monkeypatch):
    monkeypatch.setattr(grid.grid_cell, "SECONDS", 0.0)
    found = grid.measure("cpu", 0, (32, 32, 32))
    assert [one.name for one in found] == ["bfloat16", grid.FORCED.name, grid.TUNED.name]
    assert found[PLAIN]["speed over bfloat16, kernels"][0] == 1.0
    assert all(values["time"][0] >= values["time of kernels"][0] > 0 for values in found.values())
    failed = grid.measure("cpu", 0, (32, 32, 0))
    assert all("status: ok" not in values and len(values) == 1 for values in failed.values())
