"""What is measured whole: order, what a deadline cuts, what fails, what cannot run here."""

from dataclasses import dataclass, field
from itertools import count

import pytest

from experiments.fp8_training.run import Part, Whole, measure_wholes, whole_of
from experiments.harness.measuring import Deadline, status
from experiments.harness.rows import Journal
from tests.experiments.harness import tiny

LATE = status(Deadline(-1.0).reason())
BROKEN = status("error: x")
EAGER, COMPILED = "eager, 1 x 2", "compiled, 1 x 2"


@dataclass
class Runs:
    """Measures models of two methods, eager and compiled, at a time that grows; what is in `answers` instead."""

    settings: object
    journal: Journal = field(default_factory=Journal)
    made: list = field(default_factory=list)
    answers: dict = field(default_factory=dict)
    failed: list = field(default_factory=list)
    clock: object = field(default_factory=count)

    def part(self, data, setting, reason=None):
        def measure():
            self.made.append((data, setting))
            values = {"time": (float(next(self.clock)), "ms"), **status("ok")}
            return {(setting, one): self.answers.get((data, setting, one), values) for one in ("a", "b")}

        return Part.of(
            [(setting, "a", None), (setting, "b", None), (setting, "c", reason or "missing")], measure
        )

    def __call__(self, *names):
        wholes = [
            Whole("blocks", name, name, (self.part(name, EAGER), self.part(name, COMPILED))) for name in names
        ]
        self.made.clear()
        self.failed.clear()
        measure_wholes("layers", wholes, self.settings, self.journal, self.failed, Deadline(None))
        return list(self.made)

    def times(self, data):
        rows = [row for row in self.journal.rows if row.table.endswith(data) and row.metric == "time"]
        return {(row.setting, row.method): row.value for row in rows}


@pytest.fixture
def runs(tmp_path):
    return Runs(tiny.settings(tmp_path))


def both(name):
    return [(name, EAGER), (name, COMPILED)]


def test_all_of_a_whole_are_measured_where_one_is_missing(runs):
    assert runs("x") == both("x")
    assert runs("x") == []
    assert [(row.method, row.metric) for row in runs.failed] == [("c", "status: missing")] * 2
    runs.journal.drop([row for row in runs.journal.rows if (row.setting, row.method) == (COMPILED, "b")])
    before = runs.times("x")
    assert runs("x") == both("x")
    assert len(runs.times("x")) == 4
    assert not set(before.values()) & set(runs.times("x").values())


def test_what_was_never_measured_comes_before_what_fails(runs):
    runs.answers["x", EAGER, "b"] = BROKEN
    runs("x")
    assert (EAGER, "b") not in runs.times("x")
    assert runs("x", "y") == both("y") + both("x")
    assert [(row.method, row.metric) for row in runs.failed] == [("b", "status: error: x")]
    assert runs("x", "y") == both("x")


def test_a_whole_that_a_deadline_cut_leaves_nothing_and_no_older_one_goes(runs, capsys):
    runs.answers["x", COMPILED, "b"] = LATE
    assert runs("x") == both("x")
    assert runs.times("x") == {}
    assert "x: the time of this run ended before" in capsys.readouterr().err
    assert runs.failed == []
    runs.answers.clear()
    runs("y", "x")
    before = runs.times("x")
    assert len(before) == 4
    runs.journal.drop([row for row in runs.journal.rows if (row.setting, row.method) == (COMPILED, "b")])
    runs.answers["x", COMPILED, "b"] = LATE
    runs("x")
    assert runs.times("x").items() < before.items()


def test_a_whole_that_fails_entirely_leaves_what_was_there(runs):
    runs("x")
    before = runs.times("x")
    runs.journal.drop([row for row in runs.journal.rows if (row.setting, row.method) == (COMPILED, "b")])
    runs.answers |= {("x", one, method): BROKEN for one in (EAGER, COMPILED) for method in ("a", "b")}
    assert runs("x") == both("x")
    assert len(runs.times("x")) == 3
    assert runs.times("x").items() < before.items()


def test_what_belongs_together():
    assert whole_of("linear/full/x", "eager") == whole_of("linear/full/x", "CUDA graph")
    assert whole_of("blocks/full/x", EAGER) == whole_of("blocks/full/x", COMPILED)
    assert whole_of("blocks/full/x", EAGER) != whole_of("blocks/full/x", "eager, 2 x 2")
    assert whole_of("grid/full/x", "M=1") != whole_of("grid/full/x", "M=2")
    assert whole_of("paired/full/x", "30m") is None
