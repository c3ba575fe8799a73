"""Rows: nothing lost, nothing doubled, files whole."""

import importlib.metadata
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from experiments.harness import measuring, revision
from experiments.harness import rows as tidy
from experiments.harness.paths import NAME, Busy, Paths, shown
from experiments.harness.rows import PARTIAL, ROOT, Journal, Row, publish, read, table_name, write
from tests.experiments.harness import tiny

# Runs of `reproduce` that are killed at random moments lose no row and double none; two at once are refused.

#: How many runs are killed: each draws its moment anew, so that nightly ones fall into more of them.
KILLS = (pytest.param(50, marks=pytest.mark.nightly),)


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
        for taken, name, way in ((places, "cache", "AO_LAB_CACHE="), (other, "reports", "--reports")):
            with (
                pytest.raises(
                    Busy, match=rf"process {os.getpid()} works in .*{name}; wait for it, or .*{way}"
                ),
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
    # What is committed under reports/ is not a user's.
    assert Paths.default(own=True) == Paths(ROOT / ".cache" / "ao_lab", ROOT / "own_reports")
    monkeypatch.setattr("experiments.harness.paths.is_clone", lambda: False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for own in (False, True):
        assert Paths.default(own=own) == Paths(tmp_path / "home" / ".cache" / "ao_lab", tmp_path / "reports")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("AO_LAB_REPORTS", str(tmp_path / "r"))
    assert Paths.default() == Paths(tmp_path / "xdg" / "ao_lab", tmp_path / "r")
    assert Paths.default(tmp_path / "given").reports == tmp_path / "given"
    assert shown(tmp_path / "given") == "given"


def row(method="a", value=1.5, table="quality/quick/x", **other):
    values = {
        "experiment": "ptq",
        "table": table,
        "setting": "weights",
        "method": method,
        "metric": "m",
        "value": value,
        "unit": "dB",
        "device": "cpu",
        "seed": 0,
    }
    return Row(**{**values, **other})


def test_rows_survive_a_round_trip(tmp_path):
    made = [row("a,b", 1 / 3), row('quote"', math.inf, published=2.5), row("nan", math.nan)]
    write(tmp_path / "rows.csv", made)
    back = read(tmp_path / "rows.csv")
    assert back[0].method == "a,b"
    assert back[0].value == pytest.approx(1 / 3, rel=1e-8)
    assert back[1] == made[1]
    assert math.isnan(back[2].value)


def test_a_file_that_is_missing_has_no_rows(tmp_path):
    assert read(tmp_path / "none.csv") == []


def test_wrong_columns_are_named(tmp_path):
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="columns"):
        read(tmp_path / "rows.csv")


def test_a_journal_resumes_and_doubles_nothing(tmp_path):
    path = tmp_path / "journal.csv"
    first = Journal(path)
    first.add([row("a"), row("b")])
    again = Journal(path)
    assert again.finished("quality/quick/x", "weights", "a")
    assert not again.finished("quality/quick/x", "weights", "c")
    again.add([row("b", 2.0), row("c")])
    assert [(kept.method, kept.value) for kept in read(path)] == [("a", 1.5), ("b", 2.0), ("c", 1.5)]


def test_rows_are_published_as_they_come_but_not_too_often():
    """The first at once, later ones together when some seconds have passed."""
    told, now = [], iter([100.0, 100.0, 104.9, 105.0, 105.0])
    journal = Journal(publish=lambda rows: told.append([one.method for one in rows]), clock=lambda: next(now))
    for method in "abc":
        journal.add([row(method)])
    assert told == [["a"], ["a", "b", "c"]]


def test_published_rows_need_not_be_measured_again(tmp_path):
    """What the journal has of its own comes first."""
    path = tmp_path / "journal.csv"
    Journal(path).add([row("a", 2.0)])
    made = Journal(path, [row("a"), row("b")])
    assert [(one.method, one.value) for one in made.rows] == [("a", 2.0), ("b", 1.5)]


def test_a_compressed_file_has_the_same_rows_and_the_same_bytes(tmp_path):
    origin = {
        "kernel": "scaled_mm",
        "date": "2026-11-28T10:00:00Z",
        "commit": "0832d6b6",
        "versions": "torch 2.11.0; a, b",
    }
    made = [row("a,b", 1 / 3, **origin), row("c")]
    for name in ("rows.csv", "rows.csv.gz"):
        write(tmp_path / name, made)
    assert read(tmp_path / "rows.csv.gz") == read(tmp_path / "rows.csv")
    assert read(tmp_path / "rows.csv.gz")[0].versions == origin["versions"]
    before = (tmp_path / "rows.csv.gz").read_bytes()
    write(tmp_path / "rows.csv.gz", made)
    assert (tmp_path / "rows.csv.gz").read_bytes() == before
    assert before[:2] == b"\x1f\x8b"


def test_a_row_says_when_where_and_with_what_it_was_measured(tmp_path):
    settings = tiny.settings(tmp_path)
    made = settings.rows(
        "formats",
        "k",
        "d",
        "s",
        "m",
        {"time": (1.0, "us"), **measuring.kernel("gemv"), **measuring.status("ok")},
    )
    assert [(one.metric, one.kernel) for one in made] == [("time", "gemv"), ("status: ok", "gemv")]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", made[0].date)
    assert made[0].commit == revision.commit()
    assert made[0].versions == revision.versions("cpu")
    assert f"torch {importlib.metadata.version('torch')}" in made[0].versions


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "rows.csv"
    write(path, [row("a")])

    def broken(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(tidy.os, "replace", broken)
    with pytest.raises(KeyboardInterrupt):
        write(path, [row("b")])
    assert [kept.method for kept in read(path)] == ["a"]
    assert list(tmp_path.iterdir()) == [path]


def test_publishing_replaces_a_run_as_a_whole(tmp_path):
    path = tmp_path / "rows.csv"
    gpu = row("a", device="GPU")
    full = row("a", table="quality/full/x")
    publish(path, [row("a"), row("gone"), gpu, full])
    publish(path, [row("a", 2.0, table="quality/quick/y")])
    kept = read(path)
    assert sorted((r.table, r.method, r.device, r.value) for r in kept) == [
        ("quality/full/x", "a", "cpu", 1.5),
        ("quality/quick/x", "a", "GPU", 1.5),
        ("quality/quick/y", "a", "cpu", 2.0),
    ]


def test_a_run_on_another_corpus_replaces_only_that_corpus(tmp_path):
    """Versions of one corpus replace each other; `row.key` and the names of tables are as ever."""
    path = tmp_path / "rows.csv"
    old, new, prose = (
        row("a", table=f"quality/quick/{name}")
        for name in ("sympy-1.13.0-aaaaaaaa", "sympy-1.14.0-bbbbbbbb", "prose-1-cccccccc")
    )
    for one in (old, prose, new):
        publish(path, [one])
    assert {one.table for one in read(path)} == {new.table, prose.table}
    names = ("prose-1-cccccccc", "llama-3.2-3b-random", "synthetic")
    assert [tidy.corpus_source(name) for name in names] == ["prose", "", ""]


def test_table_names_have_three_parts():
    assert tidy.table_parts(table_name("a", "b", "c")) == ("a", "b", "c")
    with pytest.raises(ValueError, match="slash"):
        table_name("a/b", "c", "d")
    with pytest.raises(ValueError, match="kind/scale/data"):
        replace(row(), table="a").place  # noqa: B018


def test_a_journal_is_of_one_commit_and_one_version_of_the_libraries(tmp_path, monkeypatch):
    places = Paths(tmp_path, tmp_path)
    before = places.journal("ptq", "quick", "cpu", "model")
    assert before.name.endswith(f"-{revision.state()}.csv")
    assert importlib.metadata.version("torch") in before.name
    assert importlib.metadata.version("numpy") in before.name
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0")
    assert places.journal("ptq", "quick", "cpu", "model") != before
