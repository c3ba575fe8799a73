"""Runs of `reproduce` that are killed at random moments lose no row and double none; two at once are refused."""

import json
import os
import subprocess
import sys

import pytest

from experiments.harness.paths import NAME, Busy, Paths, shown
from experiments.harness.rows import PARTIAL, ROOT

#: How many runs are killed: each draws its moment anew, so that nightly ones fall into more of them.
KILLS = (4, pytest.param(50, marks=pytest.mark.nightly))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="runs are forks of one process")
@pytest.mark.parametrize("kills", KILLS)
def test_kills_at_random_moments_lose_and_double_no_row(kills, tmp_path):
    """Corpus, training, two experiments, pages: a tiny run of all that, its training with a checkpoint a step."""
    command = [
        sys.executable,
        "-m",
        "tests.experiments.harness.killed_reproduce",
        str(tmp_path),
        str(kills),
        "18",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["killed"] == kills
    assert found["same"]
    assert (found["lost"], found["partial"]) == ([], [])
    assert min(found["rows"].values()) > 50


def test_two_runs_in_one_folder_are_refused(tmp_path):
    """The second names the process of the first; when that is over, or killed, the folder is free."""
    places = Paths(tmp_path / "cache", tmp_path / "reports")
    other = Paths(tmp_path / "another cache", tmp_path / "reports")
    with places.alone():
        for taken, name in ((places, "cache"), (other, "reports")):
            with (
                pytest.raises(Busy, match=rf"process {os.getpid()} works in .*{name}; wait for it"),
                taken.alone(),
            ):
                pass
    with places.alone():
        assert (tmp_path / "reports" / NAME).exists()


def test_what_killed_runs_left_half_written_is_deleted(tmp_path):
    """And nothing else: neither files of others nor checkpoints."""
    places = Paths(tmp_path / "cache", tmp_path / "reports")
    models = places.cache / "models"
    for folder in (models / f".abc.x{PARTIAL}", places.data, places.figures):
        folder.mkdir(parents=True)
    left = [
        places.data / f".ptq.csv.x{PARTIAL}",
        places.figures / f".a.svg.y{PARTIAL}",
        models / f".abc.x{PARTIAL}/w",
    ]
    kept = [places.data / "ptq.csv", places.reports / f"mine{PARTIAL}", models / "abc.checkpoint"]
    for path in (*left, *kept):
        path.write_text("x")
    with places.alone():
        assert not any(path.exists() for path in left)
        assert not left[-1].parent.exists()
        assert all(path.exists() for path in kept)


def test_reports_and_cache_lie_in_the_clone_or_with_the_user(tmp_path, monkeypatch):
    """Never beside installed packages."""
    for name in ("AO_LAB_CACHE", "AO_LAB_REPORTS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert Paths.default() == Paths(ROOT / ".cache" / "ao_lab", ROOT / "reports")
    monkeypatch.setattr("experiments.harness.paths.is_clone", lambda: False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert Paths.default() == Paths(tmp_path / "home" / ".cache" / "ao_lab", tmp_path / "reports")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("AO_LAB_REPORTS", str(tmp_path / "r"))
    assert Paths.default() == Paths(tmp_path / "xdg" / "ao_lab", tmp_path / "r")
    assert Paths.default(tmp_path / "given").reports == tmp_path / "given"
    assert shown(tmp_path / "given") == "given"
