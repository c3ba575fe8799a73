"""A cell's three sides compute the same layer, are timed, and leave no choice behind."""

import pytest
import torch

from ao_lab.gemm import choices
from experiments.fp8_training import grid
from experiments.fp8_training.grid import CELL_FORCED, CELL_PLAIN, CELL_TUNED, CellTimes, time_cell


def test_a_cell(tmp_path, monkeypatch):
    monkeypatch.setenv("AO_LAB_CACHE", str(tmp_path))
    monkeypatch.setattr("ao_lab.tuning.measure.SECONDS", 0.0)
    monkeypatch.setattr(grid, "SECONDS", 0.0)
    choices.forget()
    found = time_cell((32, 64, 48), device="cpu")
    assert set(found.gpu) == set(found.host) == {CELL_PLAIN, CELL_FORCED, CELL_TUNED}
    assert found.low == "output+input_grad+weight_grad"  # without FP8 units all of it is emulated
    assert min(found.gpu.values()) > 0
    assert found.tuning > 0
    assert not list(choices.choices_for(torch.device("cpu")))
    assert not list(tmp_path.iterdir())
    choices.forget()


def test_speed():
    times = CellTimes({CELL_PLAIN: 2.0, CELL_FORCED: 4.0, CELL_TUNED: 1.0}, {}, "dense", 0.0)
    assert (times.speed(CELL_FORCED), times.speed(CELL_TUNED)) == (0.5, 2.0)
    assert times.speed(CELL_TUNED, CELL_FORCED) == pytest.approx(4.0)
