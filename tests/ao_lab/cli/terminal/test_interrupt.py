"""Ctrl-C and SIGTERM: one line, what was kept, how to go on; nothing half-written stays."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ao_lab.cli import app
from ao_lab.cli.terminal import interrupt as cli_stop
from tests.support.models.small_llama import save_llama

ROOT = Path(__file__).resolve().parents[4]
SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]

#: A command whose work, a tiny stand-in for minutes, says that it started and goes on in threads that nothing can interrupt.
BUSY = """
import signal, sys, time
# A shell's background jobs ignore SIGINT, and their children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
from experiments.runs import run as runs
from experiments.harness import workers
from ao_lab.cli.app import entry

def run_one(name, settings, places):
    def work(task):
        end = time.monotonic() + 60
        while time.monotonic() < end: pass
    print("started", flush=True)
    for _ in workers.measure_all([1, 2, 3], work, "cpu"): pass

runs.run_one = run_one
sys.argv = ["ao-lab", "reproduce", "formats", "--device", "cpu", "--reports", sys.argv[1]]
entry()
"""


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_reproduce_says_what_was_kept(tmp_path, number, code):
    """At once, though threads compute."""
    environment = {**os.environ, "AO_LAB_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", BUSY, str(tmp_path / "reports")]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "started\n"
    time.sleep(0.5)
    sent = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=50)
    assert time.monotonic() - sent < 40
    assert (process.returncode, out) == (code, "")
    last = err.splitlines()[-1]
    assert last == (
        f"ao-lab: stopped; what was measured is kept in {tmp_path / 'cache'}; the same command goes on from there"
    )
    assert "Traceback" not in err


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (cli_stop.Terminated, 143)])
@pytest.mark.parametrize("existed", [True, False])
def test_quantize_leaves_nothing_half_written(tmp_path, monkeypatch, capsys, error, code, existed):
    """Stopped when the weights are written already; a folder that was there stays, empty."""
    save_llama(tmp_path / "base")
    out = tmp_path / "out"
    if existed:
        out.mkdir()

    def stop(*_):
        assert any(out.iterdir())
        raise error

    monkeypatch.setattr("ao_lab.cli.quantize.copy_the_rest", stop)
    assert app.main(["quantize", str(tmp_path / "base"), str(out), "--config", "int8_rowwise"]) == code
    assert f"stopped; nothing was written to {out}; the same command starts again" in capsys.readouterr().err
    assert list(out.iterdir()) == [] if existed else not out.exists()


def test_a_folder_with_other_files_is_not_touched(tmp_path, capsys):
    save_llama(tmp_path / "base")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    assert (
        app.main(["quantize", str(tmp_path / "base"), str(tmp_path / "out"), "--config", "int8_rowwise"]) == 2
    )
    assert "choose another" in capsys.readouterr().err
    assert (tmp_path / "out" / "mine").read_text() == "mine"


def test_the_signal_is_as_before_afterwards():
    before = signal.getsignal(signal.SIGTERM)
    assert app.main(["--version"]) == 0
    assert signal.getsignal(signal.SIGTERM) is before
