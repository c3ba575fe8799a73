"""A forward on windows of one shape, replayed: with graphs that replay by calling, since there is no GPU here."""

import logging

import pytest
import torch

from ao_lab.compile.captured_forward import TRIES
from ao_lab.compile.replayed_forward import ReplayedForward


class Calls:
    """Stands in for CUDA graphs on a CPU: a replay computes from where the ids lie, into the result that was recorded."""

    device = "cpu"

    def __init__(self, waits=0, fails=False):
        self.waits, self.fails, self.recorded, self.replays = waits, fails, 0, 0

    def watched(self, run):
        self.waits -= 1
        return run(), self.waits >= 0

    def record(self, run, device):
        self.recorded += 1
        if self.fails:
            raise RuntimeError("operation not permitted")
        result = torch.full_like(run(), float("nan"))  # nothing is computed

        def replay():
            self.replays += 1
            result.copy_(run())

        return replay, result


def call(ids):
    return torch.stack([ids * 2.0, ids + 1.0], -1)


def windows(count, tokens=3):
    return torch.arange(count * tokens).reshape(count, 1, tokens)


@pytest.mark.parametrize("waits", [0, 1, TRIES - 1])
def test_replays_after_a_call_without_waiting(waits):
    graphs = Calls(waits)
    forward = ReplayedForward(call, graphs)
    for ids in windows(8):
        assert torch.equal(forward(ids), call(ids))
    assert (graphs.recorded, graphs.replays) == (1, 8 - waits - 1)


def test_a_model_that_always_waits_stays_eager():
    graphs = Calls(waits=100)
    forward = ReplayedForward(call, graphs)
    for ids in windows(8):
        assert torch.equal(forward(ids), call(ids))
    assert (graphs.recorded, graphs.replays, graphs.waits) == (0, 0, 100 - TRIES)


def test_another_shape_is_eager_and_one_that_cannot_be_recorded_is_told(caplog):
    graphs = Calls()
    forward = ReplayedForward(call, graphs)
    for ids in (*windows(3), *windows(2, tokens=5), *windows(1)):
        assert torch.equal(forward(ids), call(ids))
    assert (graphs.recorded, graphs.replays) == (1, 3)
    graphs = Calls(fails=True)
    forward = ReplayedForward(call, graphs)
    with caplog.at_level(logging.INFO, logger="ao_lab"):
        for ids in windows(4):
            assert torch.equal(forward(ids), call(ids))
    assert graphs.recorded == 1
    assert "not permitted" in caplog.text
