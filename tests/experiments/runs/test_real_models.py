"""The driver of runs on real models: what is measured again, when nothing more starts, what a failure leaves."""

import pytest

from experiments.harness.measuring import Deadline, status
from experiments.harness.rows import Journal
from experiments.models.causal_lm import FILE, MODEL, Undivided
from experiments.runs import real_models
from experiments.runs.real_models import Place, Tables, by_data
from experiments.runs.run import Settings

TASKS = {Place("weights", name, 0): name for name in ("a", "b", "c")}


def values(task):
    return {data: {"loss": (1.0, "nat"), **status("ok")} for data in ("text", MODEL)}


class Clock:
    """Seconds that pass where somebody says so."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(real_models.time, "perf_counter", made)
    return made


def tables(tmp_path, journal, deadline=None):
    settings = Settings(scale="quick", device="cpu", cache=tmp_path)
    return Tables("ptq", settings, "real tiny", journal, deadline or Deadline(None))


def test_what_the_journal_has_is_not_measured_again(tmp_path):
    measured, journal = [], Journal()

    def load():
        return {"parameters": (1.0, "")}, lambda task: measured.append(task) or values(task)

    first = dict(list(TASKS.items())[:1])
    assert tables(tmp_path, journal).measure("", first, load) == []
    assert tables(tmp_path, journal).measure("", TASKS, load) == []
    assert measured == ["a", "b", "c"]
    assert {row.method for row in journal.rows} == {FILE, "a", "b", "c"}
    assert tables(tmp_path, journal).measure("", TASKS, lambda: pytest.fail("loaded again")) == []
    other = {Place("weights", "a", 1): "a"}
    assert list(tables(tmp_path, journal).left({**TASKS, **other})) == list(other), (
        "another seed is another task"
    )


@pytest.mark.parametrize(("even", "late"), [(False, ["c"]), (True, ["b", "c"])])
def test_nothing_starts_after_the_deadline(tmp_path, clock, even, late):
    """Two tasks of six seconds in ten: the second would end after them, which matters of even ones alone."""

    def measure(task):
        clock.now += 6.0
        return values(task)

    journal = Journal()
    run = tables(tmp_path, journal, Deadline(10.0, clock))
    failed = run.measure("", TASKS, lambda: ({}, measure), even=even)
    assert [row.method for row in failed] == late
    assert all(row.metric.startswith("status: not run") for row in failed)
    assert not {row.method for row in journal.rows} & set(late)


def test_what_is_missing_says_so_and_the_others_go_on(tmp_path):
    journal = Journal()
    missing = {"b": "missing: torchao is not installed"}.get
    (row,) = tables(tmp_path, journal, Deadline(-1.0)).measure(
        "", {Place("weights", "b", 0): "b"}, lambda: ({}, values), missing
    )
    assert row.metric == "status: missing: torchao is not installed", "before the deadline is asked"
    (row,) = tables(tmp_path, journal).measure("", TASKS, lambda: ({}, values), missing)
    assert (row.method, {row.method for row in journal.rows}) == ("b", {"a", "c"})


@pytest.mark.parametrize(
    ("error", "word"), [(Undivided("no"), "missing: no"), (KeyError("x"), "error: KeyError: 'x'")]
)
def test_a_failure_leaves_its_status_alone(error, word):
    def work(found):
        found["text"] = {"loss": (1.0, "nat")}
        raise error

    assert by_data(work) == {MODEL: status(word)}
    assert set(by_data(lambda found: found.update(values("a")) or {})) == {"text", MODEL}
