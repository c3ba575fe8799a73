"""A cell's three sides compute the same layer, are timed, and leave no choice behind."""

import pytest
import torch

from ao_lab.gemm import choices
from experiments.fp8_training.speed import grid_cell
from experiments.fp8_training.speed.grid_cell import FORCED, PLAIN, TUNED, CellTimes, time_cell


def test_a_cell(tmp_path, monkeypatch):
    monkeypatch.setenv("AO_LAB_CACHE", str(tmp_path))
    monkeypatch.setattr("ao_lab.tuning.measure.SECONDS", 0.0)
    monkeypatch.setattr(grid_cell, "SECONDS", 0.0)
    choices.forget()
    found = time_cell((32, 64, 48), device="cpu")
    assert set(found.gpu) == set(found.host) == {PLAIN, FORCED, TUNED}
    assert found.low == "output+input_grad+weight_grad"  # without FP8 units all of it is emulated
    assert min(found.gpu.values()) > 0
    assert found.tuning > 0
    assert not list(choices.choices_for(torch.device("cpu")))
    assert not list(tmp_path.iterdir())
    choices.forget()


def test_speed():
    times = CellTimes({PLAIN: 2.0, FORCED: 4.0, TUNED: 1.0}, {}, "dense", 0.0)
    assert (times.speed(FORCED), times.speed(TUNED)) == (0.5, 2.0)
    assert times.speed(TUNED, FORCED) == pytest.approx(4.0)
