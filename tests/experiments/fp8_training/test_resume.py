"""A partial run on a new machine goes on from what was published at the same commit, for the same device and versions."""

from dataclasses import replace

import pytest

from experiments.fp8_training import blocks, convergence, linear
from experiments.fp8_training import run as experiment
from experiments.fp8_training.methods import PAIRED, PLAIN, PLANS
from experiments.harness.measuring import LATE, status
from experiments.harness.paths import Paths
from experiments.harness.registry import EXPERIMENTS
from experiments.harness.rows import read, table_parts, write
from experiments.runs import run as runs
from tests.experiments.fp8_training.test_run import small  # noqa: F401
from tests.experiments.harness import tiny

PART = {"only": (PAIRED,), "seconds": 400.0}


HERE = "0832d6b6"


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """Gives the tree a commit without changes, until a test names another, or other versions."""

    def change(commit=HERE, versions="torch 2.11"):
        for place in ("experiments.harness.revision", "experiments.runs.settings"):
            monkeypatch.setattr(f"{place}.commit", lambda *_: commit)
            monkeypatch.setattr(f"{place}.versions", lambda device="cpu": versions)

    change()
    return change


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
    return read(Paths(folder, folder / "reports").rows("fp8_training"))


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
    path = Paths(tmp_path, tmp_path / "reports").rows("fp8_training")
    late = [row for row in before if (row.method, row.seed) == ("mxfp8", 1) or row.table.startswith("gaps")]
    write(path, [row for row in before if row not in late])
    assert machine() == ALL[3:]
    assert gaps(tmp_path) == {2}
    assert values(published(tmp_path)) == values(before)


def test_all_parts_go_on(machine, tmp_path, monkeypatch):
    machine(only=("linear", "blocks", "grid", "faults"))
    before = published(tmp_path)
    assert {table_parts(row.table)[0] for row in before} == {"linear", "blocks", "grid", "faults"}
    for place in ("linear.measure", "linear.grid_measure", "blocks.measure", "convergence.fault_measure"):
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
        {"commit": "36c4f92b"},
        {"versions": "torch 2.13"},
        {"device": "a GPU"},
        {"table": "paired/full/made-1-00000000"},
        {"metric": "status: missing: x"},
        {"metric": "status: error: x"},
        {"commit": f"{HERE}+dirty"},
    ],
)
def test_other_commits_versions_devices_scales_and_failures_are_measured_again(
    machine, tmp_path, monkeypatch, change
):
    monkeypatch.setitem(PLANS, "quick", replace(PLANS["quick"], seeds=1, recipes=()))
    assert machine() == ALL[:1]
    path = Paths(tmp_path, tmp_path / "reports").rows("fp8_training")
    write(path, [replace(row, **change) for row in published(tmp_path)[:5]])
    assert machine() == ALL[:1]


def test_changed_trees_of_one_commit_go_on_from_nothing(machine, here, monkeypatch):
    """Two machines with uncommitted changes need not have the same ones."""
    monkeypatch.setitem(PLANS, "quick", replace(PLANS["quick"], seeds=1, recipes=()))
    here(commit=f"{HERE}+dirty")
    assert machine() == machine() == ALL[:1]


def test_a_line_of_which_something_is_not_known_is_measured_whole(machine, tmp_path, monkeypatch):
    monkeypatch.setitem(PLANS, "quick", replace(PLANS["quick"], seeds=1, recipes=()))
    assert machine() == ALL[:1]
    path, before = Paths(tmp_path, tmp_path / "reports").rows("fp8_training"), published(tmp_path)
    write(path, [replace(before[0], commit="36c4f92b"), *before[1:]])
    assert machine() == ALL[:1]
    assert {row.key for row in published(tmp_path)} == {row.key for row in before}


def test_older_rows_of_other_shapes_are_no_reason_to_measure_again(machine, tmp_path, monkeypatch):
    """Those of the same part, which this commit has not come to, and of a part beside it."""
    machine(only=("linear",))
    path, before = Paths(tmp_path, tmp_path / "reports").rows("fp8_training"), published(tmp_path)
    older = [replace(row, table="linear/quick/9x9x9", commit="36c4f92b") for row in before]
    beside = [replace(row, table=row.table.replace("linear", "blocks"), commit="36c4f92b") for row in before]
    write(path, [*before, *older, *beside])
    monkeypatch.setattr(linear, "measure", lambda *_: pytest.fail("measured again"))
    machine(only=("linear",))
    assert {row.key for row in published(tmp_path)} == {row.key for row in [*before, *older, *beside]}


def test_what_follows_from_known_rows_keeps_its_origin(machine, here, tmp_path, monkeypatch):
    """Nothing was trained: gaps are as they were, and of when they were."""
    monkeypatch.setattr(experiment, "PARTS", {PAIRED: experiment.PARTS[PAIRED]})
    monkeypatch.setattr("experiments.harness.revision.changed_files", lambda commit, folders: 0)
    assert machine() == ALL
    here(commit="36c4f92b")
    assert machine(only=(), seconds=None, changed=True) == []
    assert {row.commit for row in published(tmp_path)} == {HERE}


def test_a_whole_that_the_deadline_cut_takes_no_place(machine, tmp_path, here, monkeypatch):
    machine(only=("blocks",))
    before = lines(tmp_path, "blocks")
    real, calls = blocks.measure, []

    def cut(bench, group):
        calls.append(group)
        found = real(bench, group)
        return found if len(calls) == 1 else {name: status(f"not run: the 9 {LATE}") for name in found}

    monkeypatch.setattr(blocks, "measure", cut)
    group = blocks.TINY_GROUPS[0]
    monkeypatch.setattr(blocks, "TINY_GROUPS", (group, replace(group, compiled=True)))
    here(commit="36c4f92b")
    machine(only=("blocks",))
    assert [row for row in before if row not in lines(tmp_path, "blocks")] == []


def test_a_tree_without_a_commit_goes_on_from_nothing(machine, here, monkeypatch):
    monkeypatch.setitem(PLANS, "quick", replace(PLANS["quick"], seeds=1, recipes=()))
    here(commit="")
    assert machine() == machine() == ALL[:1]


@pytest.mark.parametrize(("count", "trained"), [(0, 0), (3, 1), (None, 1)])
def test_what_has_changed_is_measured_anew_and_nothing_else(machine, here, monkeypatch, count, trained):
    """None: nobody knows what has changed."""
    monkeypatch.setitem(PLANS, "quick", replace(PLANS["quick"], seeds=1, recipes=()))
    monkeypatch.setattr(experiment, "PARTS", {PAIRED: experiment.PARTS[PAIRED]})
    asked = []

    def changed_files(commit, folders):
        asked.append((commit, folders))
        return count

    assert machine() == ALL[:1]
    here(commit="36c4f92b")
    monkeypatch.setattr("experiments.harness.revision.changed_files", changed_files)
    assert machine(only=(), seconds=None, changed=True) == ALL[:trained]
    assert asked[0] == (HERE, EXPERIMENTS["fp8_training"].folders)


def test_rows_of_a_tree_with_changes_are_measured_anew(machine, here, monkeypatch):
    monkeypatch.setitem(PLANS, "quick", replace(PLANS["quick"], seeds=1, recipes=()))
    monkeypatch.setattr(experiment, "PARTS", {PAIRED: experiment.PARTS[PAIRED]})
    monkeypatch.setattr("experiments.harness.revision.changed_files", lambda commit, folders: 0)
    here(commit=f"{HERE}+dirty")
    assert machine() == ALL[:1]
    assert machine(only=(), seconds=None, changed=True) == ALL[:1]


def lines(folder, kind):
    return [row for row in published(folder) if table_parts(row.table)[0] == kind]


@pytest.mark.parametrize("kind", ["linear", "blocks", "grid"])
def test_what_is_compared_is_measured_whole(machine, tmp_path, kind):
    """A method that is missing is no reason to put it beside the times of another run."""
    machine(only=(kind,))
    before = lines(tmp_path, kind)
    path = Paths(tmp_path, tmp_path / "reports").rows("fp8_training")
    write(path, [replace(row, value=-1.0) for row in before if row.method == PLAIN.name])
    machine(only=(kind,))
    found = lines(tmp_path, kind)
    assert {row.key for row in found} == {row.key for row in before}
    assert not [row for row in found if row.value == -1.0]


def test_times_of_another_run_do_not_stay_beside_a_whole(machine, tmp_path, monkeypatch, here):
    machine(only=("linear",))
    monkeypatch.setattr(linear, "all_methods", lambda device: (PLAIN,))
    here(versions="torch 2.13")
    machine(only=("linear",))
    assert {row.method for row in lines(tmp_path, "linear")} == {PLAIN.name}
