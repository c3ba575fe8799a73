"""A partial run on a new machine goes on from what was published: with the same code, device and libraries, and else not."""

import json
from dataclasses import replace

import pytest

from experiments.fp8_training import run as experiment
from experiments.fp8_training.training import convergence
from experiments.fp8_training.training.plans import PAIRED, PLANS
from experiments.harness.paths import Paths
from experiments.harness.rows import read, table_parts, write
from experiments.runs import run as runs
from tests.experiments.fp8_training.test_run import small  # noqa: F401
from tests.experiments.harness import tiny

PART = {"only": (PAIRED,), "seconds": 400.0}


@pytest.fixture(autouse=True)
def current(monkeypatch):
    """Rows are of the code as it is, until a test says otherwise; no closure of code is read."""
    monkeypatch.setattr("experiments.runs.environment.experiment_hash", lambda name: "now")
    for place in ("experiments.runs.resume.is_current", "experiments.harness.provenance.is_current"):
        monkeypatch.setattr(place, lambda row: row.source_hash == "0" * 12)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Runs one machine after the other, each with an empty cache; returns what it trained."""
    count, real = iter(range(99)), convergence.measure

    def run(**options):
        made, places = [], Paths(tmp_path / f"cache{next(count)}", tmp_path / "reports")

        def measure(settings, plan, trial, checkpoint):
            made.append((trial.recipe, trial.settings.seed))
            return real(settings, plan, trial, checkpoint)

        monkeypatch.setattr(convergence, "measure", measure)
        runs.run_one("fp8_training", replace(tiny.settings(places.cache), **{**PART, **options}), places)
        return made

    return run


def published(folder):
    return read(folder / "reports" / "data" / "fp8_training.csv")


def gaps(folder):
    found = [row for row in published(folder) if table_parts(row.table)[0] == "gaps"]
    return {row.value for row in found if row.metric.endswith("end, seeds")}


def values(rows):
    """What is the same whenever it is trained: no times. Gaps over published values have their digits."""
    return {
        row.key: pytest.approx(row.value, abs=1e-5) if row.unit == "%" else row.value
        for row in rows
        if "time" not in row.metric and row.unit != "byte/s"
    }


ALL = [(recipe, seed) for recipe in ("bf16", "mxfp8") for seed in (0, 1)]


def test_what_is_published_is_not_trained_again_and_counts_in_gaps(machine, tmp_path):
    assert machine() == ALL
    before = published(tmp_path)
    assert gaps(tmp_path) == {2}
    assert machine() == []
    assert values(published(tmp_path)) == values(before)
    # A machine before this one did not come to the last training: the gap is over its rows and new ones.
    path = tmp_path / "reports" / "data" / "fp8_training.csv"
    late = [row for row in before if (row.method, row.seed) == ("mxfp8", 1) or row.table.startswith("gaps")]
    write(path, [row for row in before if row not in late])
    assert machine() == ALL[3:]
    assert gaps(tmp_path) == {2}
    assert values(published(tmp_path)) == values(before)


def test_all_parts_go_on(machine, tmp_path, monkeypatch):
    machine(only=("linear", "blocks", "grid", "faults"))
    before = published(tmp_path)
    assert {table_parts(row.table)[0] for row in before} == {"linear", "blocks", "grid", "faults"}
    for place in (
        "speed.linear.measure",
        "speed.grid.measure",
        "speed.blocks.measure",
        "training.planted.measure",
    ):
        monkeypatch.setattr(f"experiments.fp8_training.{place}", lambda *_: pytest.fail("measured again"))
    machine(only=("linear", "blocks", "grid", "faults"))
    assert published(tmp_path) == before


def test_a_whole_run_measures_all_of_it(machine, monkeypatch):
    monkeypatch.setattr(experiment, "PARTS", {PAIRED: experiment.PARTS[PAIRED]})
    assert machine() == ALL
    assert machine(only=(), seconds=None) == ALL


@pytest.mark.parametrize(
    "change",
    [
        {"source_hash": "then"},
        {"device": "a GPU"},
        {"table": "paired/full/made-1-00000000"},
        {"metric": "status: error: x"},
    ],
)
def test_other_code_devices_scales_and_failures_are_measured_again(machine, tmp_path, monkeypatch, change):
    monkeypatch.setitem(PLANS, "quick", replace(PLANS["quick"], seeds=1, recipes=()))
    assert machine() == ALL[:1]
    path = tmp_path / "reports" / "data" / "fp8_training.csv"
    write(path, [replace(row, **change) for row in published(tmp_path)[:5]])
    assert machine() == ALL[:1]


def test_rows_of_other_libraries_are_not_gone_on_from(machine, tmp_path, monkeypatch, capsys):
    machine()
    monkeypatch.setitem(PLANS, "quick", replace(PLANS["quick"], seeds=1, recipes=()))
    monkeypatch.setattr("experiments.runs.environment.libraries", lambda: {"torch": "9"})
    monkeypatch.setattr("experiments.runs.resume.libraries", lambda: {"torch": "9"})
    assert machine() == ALL[:1]
    assert "published rows of fp8_training are not gone on from: they are of torch" in capsys.readouterr().err
    # The file holds rows of both: nothing says which is of what.
    record = json.loads((tmp_path / "reports" / "data" / "environment.json").read_text())
    (one,) = record.values()
    assert one["rows_of_other_machines"] > 0
    assert machine() == ALL[:1]
    assert "are of other versions of libraries or processors" in capsys.readouterr().err
