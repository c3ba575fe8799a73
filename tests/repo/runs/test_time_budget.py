"""What a run says of its time, when it takes too long, and the parts that a night runs."""

import tomllib
from itertools import chain
from types import SimpleNamespace

import pytest

from tests.support.runs import time_budget
from tests.support.runs.time_budget import ELSEWHERE, Watch

TESTS = time_budget.BUDGET.parent
IDS = [f"tests/{folder}/test_{i}.py::test[{i % 7}-{i}]" for i in range(300) for folder in ("a", "b/c")]


def finished(wall, limit, factor=1.0, exitstatus=pytest.ExitCode.OK):
    """How a run ends that took so long, and what it says."""
    watch = Watch(limit, factor, whole=False)
    watch.start -= wall
    session = SimpleNamespace(exitstatus=exitstatus)
    watch.pytest_sessionfinish(session)
    lines = []
    watch.pytest_terminal_summary(SimpleNamespace(write_line=lambda line, **style: lines.append(line)))
    return session.exitstatus, lines


def test_a_run_within_the_limit_is_as_its_tests_are():
    assert finished(wall=700, limit=720) == (pytest.ExitCode.OK, [])
    assert finished(wall=5000, limit=None) == (pytest.ExitCode.OK, [])
    failed = pytest.ExitCode.TESTS_FAILED
    assert finished(wall=5, limit=720, exitstatus=failed) == (failed, [])


def test_a_run_over_the_limit_fails_and_says_why():
    status, (message,) = finished(wall=730, limit=720)
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "took 730 s and may take 720 s" in message
    interrupted = pytest.ExitCode.INTERRUPTED
    assert finished(wall=730, limit=720, exitstatus=interrupted)[0] == interrupted


def test_a_slower_machine_may_take_longer():
    assert time_budget.slowness(1.5 * time_budget.REFERENCE_SECONDS) == 1.5
    assert time_budget.slowness(0.5 * time_budget.REFERENCE_SECONDS) == 1.0
    assert finished(wall=1000, limit=720, factor=1.5)[0] == pytest.ExitCode.OK
    assert finished(wall=1090, limit=720, factor=1.5)[0] == pytest.ExitCode.TESTS_FAILED


def test_a_slower_machine_is_told_of_beside_the_time():
    lines = []
    terminal = SimpleNamespace(write_line=lines.append, section=lambda title: None)
    for factor in (1.0, 1.5):
        Watch(1000, factor, whole=True).pytest_terminal_summary(terminal)
    usual, slow = (line for line in lines if line.startswith("wall time"))
    assert usual == "wall time of the run: 0 s"
    assert slow == f"{usual}; this machine takes 1.50 times as long as one of CI, which the budgets are of"


def test_the_loop_does_the_same_work_each_time():
    assert time_budget.calibration_loop(rounds=2) == time_budget.calibration_loop(rounds=2)


def test_phases_of_a_test_are_added_up():
    watch = Watch(None, 1.0, whole=True)
    for nodeid, seconds in [("tests/a/test_x.py::y", 1.0), ("tests/a/test_x.py::y", 2.0), ("z", 0.5)]:
        watch.pytest_runtest_logreport(SimpleNamespace(nodeid=nodeid, duration=seconds))
    assert watch.seconds == {"tests/a/test_x.py::y": 3.0, "z": 0.5}


def test_a_test_counts_for_the_longest_folder():
    budget = {"fast": 5, "fast/kernels": 9}
    assert time_budget.folder_of("tests/fast/kernels/test_x.py::y[a/b]", budget) == "fast/kernels"
    assert time_budget.folder_of("tests/fast/kernels.py::y", budget) == "fast"
    assert time_budget.folder_of("tests/faster/test_x.py::y", budget) == ELSEWHERE


def test_the_table_has_what_each_folder_took():
    seconds = {"tests/a/x.py::y": 3.0, "tests/a/x.py::z": 4.4, "tests/b/x.py::y": 1.0, "tests/x.py::y": 2.0}
    rows = [line.split() for line in time_budget.table(seconds, {"a": 5, "b": 9})]
    assert rows[1:3] == [["a", "2", "7", "5", "over"], ["b", "1", "1", "9"]]
    assert rows[3:] == [[*ELSEWHERE.split(), "1", "2", "0", "over"], ["all", "4", "10", "14"]]


def test_the_slowest_come_first():
    lines = list(time_budget.slowest({f"test_{i}": float(i) for i in range(30)}))
    assert [line.split()[-1] for line in lines] == [f"test_{i}" for i in range(29, 9, -1)]


def test_every_folder_has_a_budget():
    budget = tomllib.loads(time_budget.BUDGET.read_text())["core_seconds"]
    with_tests = {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")}
    assert {folder.split("/")[0] for folder in budget} == with_tests
    # Two cores, ten minutes: what workers take to import and to collect is not in these.
    assert sum(budget.values()) <= 2 * 600 - 2 * 60


@pytest.mark.parametrize("n", [1, 2, 7, 40])
def test_parts_are_disjoint_and_complete(n):
    selected = [[nodeid for nodeid in IDS if time_budget.is_in(nodeid, k, n)] for k in range(1, n + 1)]
    assert sorted(chain.from_iterable(selected)) == sorted(IDS)
    assert all(selected)


@pytest.mark.parametrize("text", ["", "3", "0/7", "8/7", "3/0", "-1/7", "3/7/1", "a/b", "1.0/2", "/"])
def test_a_part_that_is_none_is_refused(text):
    with pytest.raises(pytest.UsageError, match="1 <= K <= N"):
        time_budget.parsed(text)


def test_a_part_selects_and_an_empty_one_is_no_failure():
    assert time_budget.parsed("3/7") == (3, 7)
    left = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left.extend(items))
    config = SimpleNamespace(getoption=lambda name: (2, 7), hook=hook)
    items = [SimpleNamespace(nodeid=nodeid) for nodeid in IDS]
    time_budget.pytest_collection_modifyitems(config, items)
    assert [item.nodeid for item in items] == [nodeid for nodeid in IDS if time_budget.is_in(nodeid, 2, 7)]
    assert len(left) == len(IDS) - len(items)
    session = SimpleNamespace(config=config, exitstatus=pytest.ExitCode.NO_TESTS_COLLECTED)
    time_budget.pytest_sessionfinish(session)
    assert session.exitstatus == pytest.ExitCode.OK


def test_cases_by_day_are_tests():
    for key, count in time_budget.cases_by_day().items():
        path, _, name = key.partition("::")
        assert count >= 0
        function = name.rpartition("::")[2]  # of a class or not
        assert f"def {function}(" in (TESTS / path).read_text(), key


def test_cases_are_taken_evenly():
    items = list(range(10))
    assert [time_budget.evenly(items, count) for count in (0, 1, 2, 4)] == [[], [0], [0, 9], [0, 3, 6, 9]]
    assert time_budget.evenly(items, 12) == items


def test_a_night_has_what_a_day_leaves(monkeypatch):
    """Items of other tests, and what is nightly itself, stay as they are."""

    class Item:
        def __init__(self, nodeid, nightly=False):
            self.nodeid, self.nightly, self.marked = nodeid, nightly, nightly

        def get_closest_marker(self, name):
            return name if self.nightly else None

        def add_marker(self, name):
            self.marked = name == "nightly"

    monkeypatch.setattr(
        time_budget, "cases_by_day", lambda: {"a/test_b.py::test_c": 2, "a/test_b.py::test_d": 0}
    )
    names = [*(f"test_c[{at}]" for at in range(5)), "test_d", "test_e[0]", "test_c[night]"]
    items = [Item(f"tests/a/test_b.py::{name}", "night" in name) for name in names]
    time_budget.leave_to_the_night(items)
    assert [item.nodeid.partition("::")[2] for item in items if not item.marked] == [
        "test_c[0]",
        "test_c[4]",
        "test_e[0]",
    ]
    monkeypatch.setenv(time_budget.ALL_CASES, "1")
    others = [Item(item.nodeid) for item in items]
    time_budget.leave_to_the_night(others)
    assert not any(item.marked for item in others)
