"""Rows of several runs in one file: the later of two wins, what is compared comes and goes together, nothing is lost."""

from dataclasses import replace

import pytest

from ao_lab.cli.app import main
from experiments.harness.paths import Paths
from experiments.harness.rows import Row, read, write
from experiments.runs.merge import merge, merged

OLD, NEW = "2026-11-25T10:00:00Z", "2026-11-25T12:00:00Z"
ROW = Row(
    experiment="fp8_training", table="paired/full/prose-1-f09e1e60", setting="30m", method="bfloat16", metric="loss", value=1.0,
    unit="bit", device="NVIDIA H100", seed=0, date=OLD, commit="0832d6b6",
)  # fmt: skip
CELL = replace(ROW, table="linear/full/64x32x32", setting="eager", metric="time")


def same(found, expected):
    return sorted(found, key=str) == sorted(expected, key=str)


@pytest.fixture
def reports(tmp_path):
    """Writes a folder of reports with these rows."""

    def folder(name, rows):
        places = Paths(tmp_path / "cache", tmp_path / name)
        write(places.rows("fp8_training"), rows)
        return places

    return folder


def test_the_later_of_two_lines_wins_whichever_side_it_is_on():
    ours, theirs = [ROW, replace(ROW, seed=1)], [replace(ROW, value=2.0, date=NEW), replace(ROW, seed=2)]
    expected = [theirs[0], ours[1], theirs[1]]
    assert same(merged("fp8_training", ours, theirs), expected)
    assert same(merged("fp8_training", theirs, ours), expected)
    assert same(merged("fp8_training", expected, expected), expected)


def test_a_line_is_replaced_with_all_of_its_metrics():
    """What the later one did not say any more is not put beside it."""
    gone = replace(ROW, metric="tokens a second")
    assert merged("fp8_training", [ROW, gone], [replace(ROW, date=NEW)]) == [replace(ROW, date=NEW)]


def test_what_is_compared_leaves_as_a_whole():
    gone, new = replace(CELL, method="torchao"), replace(CELL, method="ours", value=2.0, date=NEW)
    again = replace(CELL, value=3.0, date=NEW)
    assert same(merged("fp8_training", [CELL, gone], [again, new]), [again, new])


@pytest.mark.parametrize("metric", ["status: not run: no time", "status: missing: torchao is not installed"])
def test_a_reason_why_nothing_was_tried_takes_no_place(metric):
    reason = replace(ROW, metric=metric, value=0.0, unit="", date=NEW)
    assert merged("fp8_training", [ROW], [reason]) == [ROW]
    assert merged("fp8_training", [replace(reason, date=OLD)], [ROW]) == [ROW]
    assert merged("fp8_training", [], [reason]) == [reason]


def test_a_failure_takes_the_place_of_an_older_value():
    wrong = replace(ROW, metric="status: wrong: outputs differ", date=NEW)
    assert merged("fp8_training", [ROW], [wrong]) == [wrong]


def test_folders_of_several_machines_are_taken_in(reports, tmp_path):
    places = reports("reports", [ROW, CELL])
    one = reports("one", [ROW, replace(CELL, value=5.0, date=NEW)])
    two = reports("two", [ROW, CELL, replace(ROW, seed=1)])
    written = merge([one.reports, two.reports], places)
    assert [what for what, _ in written] == ["fp8_training: 2 rows"]
    assert same(
        read(places.rows("fp8_training")), [replace(CELL, value=5.0, date=NEW), ROW, replace(ROW, seed=1)]
    )
    assert merge([one.reports, two.reports], places) == []


def test_the_command_names_a_folder_without_rows(reports, tmp_path, capsys):
    places = reports("reports", [ROW])
    assert main(["merge", str(tmp_path / "none"), "--reports", str(places.reports)]) == 2
    assert "give the folder that `--reports` named" in capsys.readouterr().err
    assert read(places.rows("fp8_training")) == [ROW]
