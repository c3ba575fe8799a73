"""Speed: nothing is timed that is wrong, and a missing peer is said to be missing."""

import numpy as np
import pytest

from experiments import speed, speed_page
from experiments.peers import COMPARISONS, Comparison, Pair
from tests.experiments import tiny

X = np.random.default_rng(0).standard_normal((64, 128), dtype=np.float32)


def test_a_wrong_result_is_not_timed():
    def refuse():
        raise ValueError("3 of 4 codes differ")

    comparison = Comparison("ours", "theirs", 1.0, "numpy", lambda x: Pair(list, list, refuse))
    with pytest.raises(ValueError, match="codes differ"):
        speed.compared(comparison, X)


@pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda comparison: comparison.name)
def test_ours_is_right(comparison):
    if comparison.missing:
        pytest.skip(f"{comparison.needs} is not installed")
    comparison.make(X).check()


def test_a_missing_peer_has_a_row_that_says_so(tmp_path):
    comparison = Comparison("ours", "theirs", 1.0, "no_such_library", lambda x: pytest.fail("made"))
    rows = speed.rows_of(tiny.settings(tmp_path), "ours", "theirs", speed.compared(comparison, X))
    assert [row.metric for row in rows] == ["bar", "peer missing: install no_such_library"]
    (section,) = speed_page.sections(rows)
    assert section.tables[0].lines[0][-1] == "peer missing: install no_such_library"


def test_ratios_are_theirs_over_ours(monkeypatch, tmp_path):
    times = iter([9.0, 9.0] + [1.0, 2.0] * speed.REPEATS)
    monkeypatch.setattr(speed, "seconds", lambda call: next(times))
    comparison = Comparison("ours", "theirs", 1.0, "numpy", lambda x: Pair(list, list, list))
    values = speed.compared(comparison, X)
    assert values["ratio"] == values["ratio, 20%"] == (2.0, "ratio")
    rows = speed.rows_of(tiny.settings(tmp_path), "ours", "theirs", values)
    (section,) = speed_page.sections(rows)
    assert section.tables[0].lines[0][2:6] == ["2.00", "2.00", "2.00", "1.00"]
    assert section.tables[0].lines[0][-1] == "yes"


def test_import_times_come_from_fresh_processes(monkeypatch):
    monkeypatch.setattr(speed, "IMPORT_REPEATS", 1)
    assert 0 <= speed.import_times("sys", "json")["time"][0] < 5000
    with pytest.raises(ValueError, match="no_such_module"):
        speed.import_times("sys", "no_such_module")
