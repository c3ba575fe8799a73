"""A calibration says on stderr how far it is, unless the caller is told, or wants silence."""

import logging
import time

import pytest
import torch
from torch import nn

import ao_lab
from ao_lab import progress as lines
from ao_lab.transforms import telling as told


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setattr(lines, "INTERVAL", 0.01)
    monkeypatch.setattr(told, "BEFORE_A_BAR", 0.01)


class Slow(nn.Linear):
    """A layer whose data take a while."""

    def forward(self, x):
        """As a linear layer."""
        time.sleep(0.1)
        return super().forward(x)


def calibrated(**options):
    model = nn.Sequential(Slow(32, 32), nn.Linear(32, 32))
    ao_lab.quantize_(
        model, ao_lab.SchemeConfig(scheme="int4_g32"), calibration=[torch.randn(32, 32)] * 2, methods=(ao_lab.Clip(),),
        blocks="", **options,
    )  # fmt: skip


def test_a_calibration_says_how_far_it_is(capsys, often):
    calibrated()
    said = capsys.readouterr().err.splitlines()
    assert all(line.startswith("ao-lab: quantize") for line in said)
    assert any(
        line.startswith("ao-lab: quantize 0 of 2, inputs of the blocks, batch 1 of 2, ") for line in said
    )


def test_a_terminal_has_a_bar_that_comes_after_a_while_and_leaves(capsys, often, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    calibrated()
    said = capsys.readouterr().err
    assert "0/2" in said
    assert "ao-lab: " not in said
    monkeypatch.setattr(told, "BEFORE_A_BAR", 3600.0)
    calibrated()
    assert "0/2" not in capsys.readouterr().err


@pytest.mark.parametrize("how", ["progress=False", "a function", "the logger", "another rank"])
def test_silence(how, capsys, often, monkeypatch):
    """A function is told in place of stderr; of several processes the first speaks."""
    seen, options = [], {}
    if how == "progress=False":
        options["progress"] = False
    if how == "a function":
        options["progress"] = lambda name, done, total: seen.append((name, done, total))
    if how == "the logger":
        monkeypatch.setattr(logging.getLogger("ao_lab"), "level", logging.ERROR)
        logging.getLogger("ao_lab").manager._clear_cache()
    if how == "another rank":
        monkeypatch.setattr(told, "_is_first", lambda: False)
    calibrated(**options)
    assert capsys.readouterr().err == ""
    assert (seen[-1:] == [("1.weight", 2, 2)]) == (how == "a function")


def test_rounding_shows_nothing_unless_it_is_asked_to(capsys, monkeypatch):
    """progress=True shows any call; what is no function and no answer is refused before anything changes."""
    shown = []
    monkeypatch.setattr(
        told, "track_progress", lambda name, **_: shown.append(name) or lines.track_progress(name)
    )
    model, config = nn.Sequential(nn.Linear(32, 32)), ao_lab.SchemeConfig(scheme="int4_g32")
    with pytest.raises(
        TypeError, match=r"progress is a function of \(name, done, total\), True .*, got 'bar'"
    ):
        ao_lab.quantize_(model, config, progress="bar")
    ao_lab.quantize_(model, config)
    assert shown == []
    ao_lab.quantize_(nn.Sequential(nn.Linear(32, 32)), config, progress=True)
    assert shown == ["quantize"]
