"""Speed: a wrong result is not timed, and a missing library has a row that says so."""

import dataclasses
import importlib.metadata
import time

import numpy as np
import pytest
import torch

from experiments.harness.measuring import Wrong
from experiments.harness.paths import Paths
from experiments.harness.rows import read
from experiments.linear.tables import OF_OURS
from experiments.report.results import Results
from experiments.runs import run as harness
from experiments.speed import page, run
from experiments.speed.run import COMPARISONS, Comparison, Pair, target_of
from tests.experiments.harness import tiny

X = np.random.default_rng(0).standard_normal((64, 128), dtype=np.float32)


def test_a_wrong_result_is_not_timed():
    def refuse():
        raise ValueError("3 of 4 codes differ")

    comparison = Comparison("ours", "theirs", "numpy", lambda x: Pair(list, list, refuse), "numpy")
    with pytest.raises(ValueError, match="codes differ"):
        run.compared(comparison, X)


@pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda comparison: comparison.name)
def test_ours_is_right(comparison):
    if comparison.missing:
        pytest.skip(f"{comparison.library} is not installed")
    comparison.build(X).check()


def test_a_missing_library_has_a_row_that_says_so(tmp_path):
    comparison = Comparison("ours", "theirs", "no_such_library", lambda x: pytest.fail("made"), "numpy")
    rows = run.rows_of(tiny.settings(tmp_path), "ours", "theirs", run.compared(comparison, X))
    assert [row.metric for row in rows] == ["bar", "peer missing: install no_such_library"]
    (section,) = page.sections(rows)
    assert section.tables[0].lines[0][-1] == "peer missing: install no_such_library"


def test_ratios_are_theirs_over_ours(monkeypatch, tmp_path):
    times = iter([9.0, 9.0] + [1.0, 2.0] * run.REPEATS)
    monkeypatch.setattr(run, "seconds", lambda call: next(times))
    comparison = Comparison("ours", "theirs", "numpy", lambda x: Pair(list, list, list), "numpy")
    values = run.compared(comparison, X)
    assert values["ratio"] == values["ratio, 20%"] == (2.0, "ratio")
    rows = run.rows_of(tiny.settings(tmp_path), "ours", "theirs", values)
    (section,) = page.sections(rows)
    assert section.tables[0].lines[0][2:6] == ["2.00", "2.00", "2.00", "1.00"]
    assert section.tables[0].lines[0][-1] == "yes"
    assert section.tables[0].columns[8:11] == ["threads", "ours: cores busy", "baseline: cores busy"]
    assert section.tables[0].lines[0][8] == "1"
    assert all(section.tables[0].lines[0][9:11])
    target = target_of(Results(rows), "theirs", "ours")
    assert (target.value, target.limit, target.reached) == (2.0, 1.0, True)
    assert target_of(Results(rows), "theirs", "other") is None


def test_cores_busy_counts_the_processor_and_not_the_clock():
    assert run.cores_busy(lambda: time.sleep(0.02)) < 0.5


def test_libraries_of_other_versions_are_timed_again(tmp_path, monkeypatch):
    before = run.subject(tiny.settings(tmp_path))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.0")
    assert run.subject(tiny.settings(tmp_path)) != before


def test_speed_is_published_when_it_is_named(tmp_path, monkeypatch):
    def settings_for(scale, device, cache):
        return dataclasses.replace(tiny.settings(cache), text=None)

    monkeypatch.setattr("experiments.runs.run.settings_for", settings_for)
    # Neither the corpus nor the model is needed.
    monkeypatch.setattr("experiments.data.corpus.load", lambda: pytest.fail("the corpus was loaded"))
    monkeypatch.setattr(run, "COUNTS", {"quick": 2**16})
    monkeypatch.setattr(run, "REPEATS", 2)
    monkeypatch.setattr(run, "IMPORTS", {"json": ("sys", "json")})
    monkeypatch.setattr(run, "COMPARISONS", COMPARISONS[:1])
    monkeypatch.setattr(run, "LAYERS", ())
    places = Paths(tmp_path / "cache", tmp_path / "reports")
    harness.reproduce(["speed"], paths=places)
    assert {row.method for row in read(places.data / "speed.csv")} == {COMPARISONS[0].name, "import json"}
    assert COMPARISONS[0].name in (places.reports / "speed.md").read_text()
    assert 'href="speed.html"' in (places.reports / "index.html").read_text()
    assert "(speed.md)" in (places.reports / "README.md").read_text()


def test_import_times_come_from_fresh_processes(monkeypatch):
    monkeypatch.setattr(run, "IMPORT_REPEATS", 1)
    assert 0 <= run.import_times("sys", "json")["time"][0] < 5000
    with pytest.raises(ValueError, match="no_such_module"):
        run.import_times("sys", "no_such_module")


@pytest.mark.parametrize("scheme", run.ONE_ROW)
def test_layers_are_checked_before_they_are_timed(scheme, monkeypatch):
    monkeypatch.setattr(run, "SIZE", 256)
    x = np.random.default_rng(0).standard_normal(256 * 257, dtype=np.float32)
    pair = run.cpu_linear_pair(x, scheme, torch.float32, False)
    pair.check()
    assert pair.ours().shape == pair.theirs().shape == (1, 256)
    monkeypatch.setattr(run.reference, "linear_error_bound", lambda *_: torch.zeros(1))
    with pytest.raises(ValueError, match=scheme):
        pair.check()


@pytest.mark.parametrize("name", ["int8", "fp8 dynamic, rows"])
def test_layers_with_several_rows_are_checked_too(name, monkeypatch):
    monkeypatch.setattr(run, "SIZE", 384)
    x = np.random.default_rng(0).standard_normal(2 * 384, dtype=np.float32)
    (comparison, *_) = run.comparisons(OF_OURS[name], torch.bfloat16)
    pair = comparison.build(x)
    pair.check()
    assert comparison.name == f"2 rows, {name}, bfloat16"
    assert pair.ours().shape == pair.theirs().shape == (2, 384)
    monkeypatch.setattr("experiments.linear.tables.LIMIT", 0.0)
    with pytest.raises(Wrong, match="outputs differ"):
        pair.check()
