"""Rows of runs side by side: what each measured is taken, what was compared leaves as a whole, origins and records follow."""

import json
from dataclasses import replace

import pytest

from ao_lab.cli.app import main
from experiments.harness.paths import Paths
from experiments.harness.rows import Row, read, write
from experiments.runs import merge as merging

ROW = Row(
    experiment="fp8_training", table="paired/full/prose-1-f09e1e60", setting="30m", method="bfloat16", metric="loss", value=1.0,
    unit="bit", device="NVIDIA H100", seed=0, source_hash="now",
)  # fmt: skip
CELL = replace(ROW, table="linear/full/64x32x32", setting="eager", metric="time")
ORIGIN = {"libraries": {"torch": "2.11.0"}, "processor": "x"}


@pytest.fixture(autouse=True)
def current(monkeypatch):
    monkeypatch.setattr(merging, "is_current", lambda row: row.source_hash == "now")


def folder(path, rows, origins=None, finished="2026-11-25 10:00 UTC"):
    """Reports with these rows, all of ORIGIN unless another is given."""
    write(path / "data" / "fp8_training.csv", rows)
    names = {merging.origin_name(row): origins or ORIGIN for row in rows}
    (path / "data" / "origins.json").write_text(json.dumps(names))
    run = {"experiment": "fp8_training", "finished": finished}
    (path / "data" / "environment.json").write_text(json.dumps({"fp8_training/full/NVIDIA H100": run}))
    return path


def merged(tmp_path, *folders):
    places = Paths(cache=tmp_path / "cache", reports=tmp_path / "reports")
    merging.merge(folders, places)
    data = places.data
    return (
        read(data / "fp8_training.csv"),
        *(json.loads((data / f"{name}.json").read_text()) for name in ("origins", "environment")),
    )


def test_what_two_runs_measured_is_taken_and_neither_undoes_the_other(tmp_path):
    old, first = replace(CELL, method="ours", value=9.0), replace(CELL, method="ours", value=5.0)
    second = replace(ROW, seed=1)
    folder(tmp_path / "reports", [ROW, old])
    one = folder(tmp_path / "one", [ROW, first], finished="2026-11-25 12:00 UTC")
    two = folder(tmp_path / "two", [ROW, old, second], finished="2026-11-25 11:00 UTC")
    rows, origins, runs = merged(tmp_path, one, two)
    assert sorted(rows, key=str) == sorted([first, ROW, second], key=str)
    assert set(origins.values().__iter__().__next__()) == {"libraries", "processor"}
    assert runs["fp8_training/full/NVIDIA H100"]["finished"] == "2026-11-25 12:00 UTC"


def test_what_is_compared_leaves_as_a_whole(tmp_path):
    gone, new = replace(CELL, method="torchao"), replace(CELL, method="ours", value=2.0)
    folder(tmp_path / "reports", [CELL, gone])
    rows, _, _ = merged(tmp_path, folder(tmp_path / "one", [replace(CELL, value=3.0), new]))
    assert rows == [replace(CELL, value=3.0), new]


def test_parts_of_a_whole_that_copies_measured_at_the_same_time_stand_side_by_side(tmp_path):
    old = [
        replace(ROW, table="long/full/prose-1-f09e1e60", method=name)
        for name in ("bfloat16", "rowwise", "mxfp8")
    ]
    new = [replace(row, value=2.0) for row in old]
    folder(tmp_path / "reports", old)
    copies = [folder(tmp_path / row.method, [row]) for row in new[:2]]
    rows, _, _ = merged(tmp_path, *copies)
    assert sorted(rows, key=str) == sorted(new[:2], key=str)


def test_a_reason_why_there_was_no_value_leaves_where_there_is_one():
    """Of the same method alone."""
    wrong = replace(ROW, metric="status: wrong: outputs differ", value=0.0, unit="", source_hash="old")
    other = replace(wrong, method="rowwise")
    found = merging.merged([wrong, other], [wrong, other, ROW], lambda row: None, [wrong, other])
    assert sorted(found.rows, key=str) == sorted([other, ROW], key=str)


def test_rows_of_other_code_stay_away_and_two_origins_are_none(tmp_path):
    stale, second = replace(ROW, seed=1, source_hash="then"), replace(ROW, seed=2)
    folder(tmp_path / "reports", [ROW])
    other = {"libraries": {"torch": "2.12.0"}, "processor": "x"}
    rows, origins, _ = merged(tmp_path, folder(tmp_path / "one", [ROW, stale, second], other))
    assert (rows, origins) == ([ROW, second], {})


def test_the_command_names_a_folder_without_rows(tmp_path, capsys):
    reports = folder(tmp_path / "reports", [ROW])
    assert main(["merge", str(tmp_path / "none"), "--reports", str(reports)]) == 2
    assert "give the folder that `--reports` named" in capsys.readouterr().err
    assert read(reports / "data" / "fp8_training.csv") == [ROW]
