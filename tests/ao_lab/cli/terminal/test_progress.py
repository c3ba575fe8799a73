"""Progress: bars on terminals that can show them, a line every few seconds elsewhere, nothing of quick work."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ao_lab.cli.terminal import progress
from experiments.harness.measuring import bar as bar_of_experiments

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setattr(progress, "INTERVAL", 0.05)


def wait_for(capsys, words):
    """What stderr has said when it has said this."""
    said = ""
    until = time.monotonic() + 30
    while words not in said and time.monotonic() < until:
        time.sleep(0.02)
        said += capsys.readouterr().err
    return said


def test_lines_come_every_ten_seconds():
    """As it is where nobody sets another interval."""
    code = "from ao_lab.cli.terminal import progress; print(progress.INTERVAL)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(done.stdout) <= 10.0


def test_one_long_step_is_not_silent(capsys, often):
    """Lines go on while nothing is stepped; they say how far the work is."""
    with progress.track_progress("quantize", 7) as work:
        work.at(2, "layers[0].weight")
        said = wait_for(capsys, "quantize 2 of 7")
        said += wait_for(capsys, "quantize 2 of 7")
    lines = said.splitlines()
    assert len(lines) >= 2
    assert all(re.fullmatch(r"ao-lab: quantize 2 of 7, layers\[0\]\.weight, \d+ s", line) for line in lines)


def test_the_innermost_work_is_told_of(capsys, often):
    with progress.lines("reproduce"):
        assert "ao-lab: reproduce, " in wait_for(capsys, "reproduce, ")
        with bar_of_experiments("training", 650) as step:
            step("2.31 bits per byte")
            step()
            assert "training 2 of 650, 2.31 bits per byte, " in wait_for(capsys, "training 2 of 650")
        assert "ao-lab: reproduce, " in wait_for(capsys, "reproduce, ")
    time.sleep(0.2)
    capsys.readouterr()
    time.sleep(0.2)
    assert capsys.readouterr().err == ""


def test_quick_work_says_nothing(capsys):
    with progress.track_progress("quantize", 2) as work:
        work.step()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("terminal", "term", "live"),
    [
        (True, "xterm-256color", True),
        (True, "", True),
        (True, "dumb", False),
        (True, "unknown", False),
        (False, "xterm", False),
    ],
)
def test_which_terminals_show_bars(monkeypatch, terminal, term, live):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    assert progress.is_live() == live


def test_names_with_brackets_are_no_markup(monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with progress.track_progress("decode", 1) as work:
        work.step("[bold]layers[0][/x]")
    assert "[bold]layers[0][/x]" in capsys.readouterr().err


def test_a_stderr_that_is_closed_ends_no_work(monkeypatch, tmp_path):
    with (tmp_path / "log").open("w") as log:
        monkeypatch.setattr("sys.stderr", log)
    progress.say("nobody hears this")
