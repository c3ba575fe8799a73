"""A partial run on a new machine goes on from what was published: with the same code, device and libraries, and else not."""

import json
from dataclasses import replace

import pytest

from experiments.fp8_training import run as experiment
from experiments.fp8_training.methods import PLAIN
from experiments.fp8_training.speed import linear
from experiments.fp8_training.training import convergence
from experiments.fp8_training.training.plans import PAIRED, PLANS
from experiments.harness.paths import Paths
from experiments.harness.rows import Row, read, table_parts, write
from experiments.runs import resume
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


@pytest.fixture
def here(monkeypatch):
    """Gives the machine other libraries, or another processor."""

    def change(torch="2.13", processor="a"):
        for place in ("experiments.runs.environment", "experiments.runs.resume"):
            monkeypatch.setattr(f"{place}.libraries", lambda: {"torch": torch})
            monkeypatch.setattr(f"{place}.processor", lambda: processor)

    return change


@pytest.fixture
def layers(monkeypatch):
    """The methods of single layers that were measured, shape by shape."""
    made, real = [], linear.measure

    def measure(bench, shape):
        made.append(shape)
        return real(bench, shape)

    monkeypatch.setattr(linear, "measure", measure)
    return made


def lines(folder, kind):
    return [row for row in published(folder) if table_parts(row.table)[0] == kind]


def origins(folder):
    return json.loads((folder / "reports" / "data" / "origins.json").read_text())


def record(folder):
    (one,) = json.loads((folder / "reports" / "data" / "environment.json").read_text()).values()
    return one


def test_rows_of_other_libraries_are_not_gone_on_from(machine, tmp_path, monkeypatch, capsys, here):
    here("2.11")
    machine()
    monkeypatch.setitem(PLANS, "quick", replace(PLANS["quick"], seeds=1, recipes=()))
    here("2.13")
    assert machine() == ALL[:1]
    words = "published rows of fp8_training are not gone on from: "
    assert f"{words}they are of torch 2.11, and 2.13 is installed" in capsys.readouterr().err
    # The table holds rows of both: nothing says which is of what.
    assert record(tmp_path)["rows_of_other_machines"] > 0
    assert not any("/paired/" in name for name in origins(tmp_path))
    assert machine() == ALL[:1]
    assert f"{words}nothing says which versions" in capsys.readouterr().err


def test_a_machine_between_does_not_vouch_for_tables_that_it_did_not_measure(machine, tmp_path, here, layers):
    here("2.11")
    machine(only=("linear",))
    here("2.13")
    machine()
    assert record(tmp_path)["rows_of_other_machines"] == len(lines(tmp_path, "linear"))
    machine(only=("linear",))
    assert len(layers) == 2
    assert record(tmp_path)["rows_of_other_machines"] == 0
    assert {one["libraries"]["torch"] for one in origins(tmp_path).values()} == {"2.13"}
    # Equal libraries go on part by part, whatever came between.
    machine(only=("linear",))
    assert machine() == []
    assert len(layers) == 2


def test_a_table_without_a_corpus_has_one_origin_whatever_was_trained(machine, monkeypatch, here, layers):
    here("2.11")
    machine(only=("linear",))
    real = tiny.settings
    monkeypatch.setattr(
        tiny, "settings", lambda cache: replace(real(cache), text=replace(tiny.corpus(), source="other"))
    )
    machine(only=("linear",))
    assert len(layers) == 1
    here("2.13")
    machine(only=("linear",))
    monkeypatch.setattr(tiny, "settings", real)
    here("2.11")
    machine(only=("linear",))
    assert len(layers) == 3


def test_rows_of_older_code_have_the_origin_that_they_had(machine, tmp_path, monkeypatch, here):
    """Code that is put back finds its own rows, and those alone."""
    here("2.11")
    machine()
    path = tmp_path / "reports" / "data" / "fp8_training.csv"
    write(path, [replace(row, source_hash="then") for row in published(tmp_path)])
    monkeypatch.setitem(PLANS, "quick", replace(PLANS["quick"], seeds=1, recipes=()))
    here("2.13")
    assert machine() == ALL[:1]
    assert machine() == []
    monkeypatch.setattr("experiments.runs.resume.is_current", lambda row: row.source_hash == "then")
    monkeypatch.setitem(PLANS, "quick", replace(PLANS["quick"], seeds=2, recipes=("mxfp8",)))
    assert machine() == ALL


def test_a_run_that_is_killed_as_it_publishes_leaves_no_origin(machine, tmp_path, monkeypatch, here):
    here("2.11")
    machine()
    here("2.13")

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runs.resume, "record_origins", killed)
        with pytest.raises(KeyboardInterrupt):
            machine()
    assert origins(tmp_path) == {}
    here("2.11")
    assert machine() == ALL


@pytest.mark.parametrize(("kind", "taken"), [("linear", True), ("paired", True), ("long", False)])
def test_another_host_of_a_gpu_matters_where_times_stand_side_by_side(kind, taken, here):
    row = Row(
        experiment="fp8_training", table=f"{kind}/full/x", setting="", method="", metric="time", value=1.0, unit="ms",
        device="a GPU", seed=0, source_hash="",
    )  # fmt: skip
    here(processor="slow")
    known = {resume.origin_name(row): resume.origin_here()}
    here(processor="quick")
    assert (resume.Comparison(experiment, known).difference(row) is None) == taken


@pytest.mark.parametrize("kind", ["linear", "blocks", "grid"])
def test_what_is_compared_is_measured_whole(machine, tmp_path, kind):
    """A method that is missing is no reason to put it beside the times of another run."""
    machine(only=(kind,))
    before = lines(tmp_path, kind)
    path = tmp_path / "reports" / "data" / "fp8_training.csv"
    write(path, [replace(row, value=-1.0) for row in before if row.method == PLAIN.name])
    machine(only=(kind,))
    found = lines(tmp_path, kind)
    assert {row.key for row in found} == {row.key for row in before}
    assert not [row for row in found if row.value == -1.0]


def test_times_of_another_run_do_not_stay_beside_a_whole(machine, tmp_path, monkeypatch, here):
    here("2.11")
    machine(only=("linear",))
    monkeypatch.setattr(linear, "all_methods", lambda device: (PLAIN,))
    here("2.13")
    machine(only=("linear",))
    assert {row.method for row in lines(tmp_path, "linear")} == {PLAIN.name}
