"""Rows of several runs in one file: the later of two wins, what is compared comes and goes together, nothing is lost."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ao_lab.cli.app import main
from ao_lab.cli.terminal import Terminated
from experiments.harness.paths import Paths
from experiments.harness.registry import EXPERIMENTS
from experiments.harness.rows import Row, read, write
from experiments.runs import validations
from experiments.runs.run import merge, merged, publish_run, run_one
from experiments.runs.settings import Settings
from experiments.runs.validations import Validation

# The table of what a GPU validated: its lines, what is missing, what is only said, how tests become lines.

LINE = Validation(
    "encode", 5, 100, 0, 0, "2026-11-28T10:00:00Z", "0832d6b6", "NVIDIA H200", "torch 2.11.0; triton 3.6.0"
)


def test_lines_survive_a_round_trip_and_a_new_one_takes_the_place_of_the_old(tmp_path):
    validations.record([LINE, replace(LINE, name="decode")], tmp_path)
    validations.record([replace(LINE, compared=7)], tmp_path)
    assert validations.read(tmp_path) == {
        "decode": replace(LINE, name="decode"),
        "encode": replace(LINE, compared=7),
    }


def test_what_was_never_validated_or_differed_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(validations, "functions", lambda: ["decode", "encode", "quantize"])
    wrong = replace(LINE, name="quantize", different=3, failed=1)
    validations.record([LINE, wrong], tmp_path)
    assert validations.problems(tmp_path) == {
        "decode": "never validated on a GPU",
        "quantize": "3 of 100 values differ, 1 tests failed",
    }


def test_what_changed_since_is_said_and_is_no_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(validations, "functions", lambda: ["encode"])
    monkeypatch.setattr(validations, "changed_files", lambda commit, folders, root: 14)
    validations.record([LINE], tmp_path)
    assert validations.problems(tmp_path) == {}
    assert validations.changes(tmp_path) == [
        "1 validated at 0832d6b6: 14 files under reference, fast changed since"
    ]


#: New since a GPU was last there. What `ao-lab ledger` validates leaves.
WAITING: dict[str, str] = {}


def test_every_function_with_kernels_has_a_line_and_passed():
    """Of this clone: a new function is to be validated on a GPU, or is among those that wait for one."""
    assert validations.problems() == WAITING
    assert {"jax", "quantize", "saturation"} <= set(validations.functions())


@pytest.fixture
def program(monkeypatch, tmp_path):
    """Stands in for the program on a GPU: writes these tests."""

    def of(*tests, names=()):
        def run(command, **_):
            assert ("--functions" in command) == bool(names)
            assert order == ["commit"], "the commit is that of the code before it is tested"
            full = [
                {"status": "ok", "count": 10, "different": 0, "handed_on": 0, "cases": 2, "late": 0, **one}
                for one in tests
            ]
            with open(command[command.index("--json") + 1], "w") as file:
                json.dump({"tests": full}, file)
            return SimpleNamespace(returncode=0)

        order.clear()
        monkeypatch.setattr(validations.subprocess, "run", run)
        return validations.refresh(60.0, tmp_path, names)

    monkeypatch.setattr(validations, "versions", lambda device: "torch")
    order = []
    monkeypatch.setattr(validations, "commit", lambda: order.append("commit") or "0832d6b6")
    return of


def test_tests_of_a_function_are_one_line_and_what_was_late_keeps_its_own(program, tmp_path):
    validations.record([LINE], tmp_path)
    _, late = program(
        {"name": "schemes/quantize"},
        {"name": "layouts/quantize", "different": 1, "status": "different"},
        {"name": "formats/encode", "late": 1, "status": "error"},
        {"name": "saturation one/fake_quantize", "handed_on": 1},
        {"name": "schemes/skipped", "status": "skipped", "cases": 0, "count": 0},
    )
    # What no test named is not reached either.
    assert late == sorted({*validations.functions(), "encode"} - {"quantize", "saturation"})
    found = validations.read(tmp_path)
    assert found["encode"] == LINE
    assert (found["quantize"].cases, found["quantize"].compared) == (4, 20)
    assert (found["quantize"].different, found["quantize"].failed, found["quantize"].passed) == (1, 1, False)
    assert found["saturation"].cases == 1
    assert not found["skipped"].passed


def test_one_function_alone_leaves_the_lines_of_others(program, tmp_path):
    validations.record([LINE], tmp_path)
    _, late = program(
        {"name": "norm/rms_norm_quantize"},
        {"name": "formats/encode", "different": 9},
        names=["rms_norm_quantize"],
    )
    found = validations.read(tmp_path)
    assert late == []
    assert found["encode"] == LINE
    assert found["rms_norm_quantize"].passed
    _, late = program({"name": "norm/quantize"}, names=["rms_norm_quantize"])
    assert late == ["rms_norm_quantize"]
    with pytest.raises(ValueError, match="'norm' is no function with kernels"):
        program(names=["norm"])


def test_the_command_shows_the_table_and_refuses_what_cannot_be(capsys):
    assert main(["ledger", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert set(shown) == {"validations", "problems", "changes", "not reached"}
    assert main(["ledger", "--check", "--refresh"]) == 2
    assert main(["ledger", "--refresh"]) == 2
    assert "torch sees none" in capsys.readouterr().err


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


def test_a_reason_inside_a_whole_leaves_with_it():
    """A later whole replaces the older one; what it did not try says why, and no older time stands beside its own."""
    older = [CELL, replace(CELL, method="torchao")]
    reason = replace(CELL, method="torchao", metric="status: missing: torchao is not installed", date=NEW)
    newer = [replace(CELL, value=2.0, date=NEW), reason]
    assert same(merged("fp8_training", older, newer), newer)
    assert same(merged("fp8_training", older, [reason]), older)


def test_a_part_that_is_ended_has_published_what_it_measured(reports, tmp_path, monkeypatch):
    """However it ends; older rows of what it has not reached stay."""
    places = reports("reports", [replace(ROW, method="later")])

    def measure(settings, journal):
        journal.add([ROW])
        journal.add([replace(ROW, seed=1)])
        raise Terminated

    module = SimpleNamespace(run=measure, subject=lambda settings: "nothing")
    record = replace(EXPERIMENTS["fp8_training"], trained=False)
    object.__setattr__(record, "run_module", lambda: module)
    monkeypatch.setitem(EXPERIMENTS, "fp8_training", record)
    settings = Settings(scale="full", device="cpu", cache=tmp_path, seconds=9.0)
    with pytest.raises(Terminated):
        run_one("fp8_training", settings, places)
    assert {(row.method, row.seed) for row in read(places.rows("fp8_training"))} == {
        ("later", ROW.seed), (ROW.method, ROW.seed), (ROW.method, 1),
    }  # fmt: skip


def test_what_the_seconds_did_not_reach_is_not_said_to_be_measured(reports, tmp_path, monkeypatch):
    late = replace(ROW, method="late", metric="status: not run: the 9 s of this run did not reach it")
    module = SimpleNamespace(run=lambda *_: [ROW, late], subject=lambda settings: "nothing")
    record = replace(EXPERIMENTS["fp8_training"], trained=False)
    object.__setattr__(record, "run_module", lambda: module)
    monkeypatch.setitem(EXPERIMENTS, "fp8_training", record)
    settings = Settings(scale="full", device="cpu", cache=tmp_path, seconds=9.0)
    ((done, _),) = run_one("fp8_training", settings, reports("reports", []))
    assert done.startswith("fp8_training: 1 rows, 1 of them measured now")


@pytest.mark.parametrize("partial", [True, False])
def test_what_a_run_did_not_try_keeps_its_rows(reports, partial):
    """And a complete run has no place for what no longer exists."""
    places = reports("reports", [ROW, replace(ROW, method="gone"), replace(ROW, method="late", value=3.0)])
    late = replace(ROW, method="late", metric="status: not run: the 9 s were over", date=NEW)
    rows = [replace(ROW, value=2.0, date=NEW), late]
    path = places.rows("fp8_training")
    publish_run("fp8_training", path, rows, partial)
    found = {row.method: row.value for row in read(path)}
    assert found == {"bfloat16": 2.0, "late": 3.0, **({"gone": 1.0} if partial else {})}


def test_rows_without_a_value_are_merged_once(reports):
    places, other = reports("reports", []), reports("one", [replace(ROW, value=math.nan)])
    assert merge([other.reports], places) != []
    assert merge([other.reports], places) == []


def test_a_broken_folder_changes_nothing(reports, tmp_path):
    places, good = reports("reports", [ROW]), reports("one", [replace(ROW, seed=1)])
    broken = reports("two", [ROW])
    broken.rows("sparsity").write_bytes(broken.rows("fp8_training").read_bytes()[:40])
    with pytest.raises(ValueError, match=r"sparsity\.csv\.gz is cut short"):
        merge([good.reports, broken.reports], places)
    assert read(places.rows("fp8_training")) == [ROW]


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


CHECKED = {
    "date": NEW, "commit": "0832d6b6", "device": "NVIDIA H200", "versions": "torch 2.11.0", "checks": 3, "wrong": [],
    "left out": [], "chosen by": "", "ended": True,
}  # fmt: skip


def results(folder, contents):
    """A folder of results of validate.py by their names, with what differs from `CHECKED`."""
    folder.mkdir(exist_ok=True)
    for name, change in contents.items():
        (folder / f"{name}.json").write_text(json.dumps({**CHECKED, **change}))
    return folder


def test_results_of_checks_become_lines_where_all_shares_ended(tmp_path):
    """Sums of shares; a subject with a share that is missing, or checks that were not reached, keeps its line."""
    late, wrong = {"left out": ["x"]}, {"wrong": ["a", "b"]}
    results(
        tmp_path, {"gemm.0-of-2": {}, "gemm.1-of-2": wrong, "gemv": {}, "pairs.0-of-2": {}, "layers": late}
    )
    names, left = validations.add(tmp_path, tmp_path)
    assert names == ["checks of gemm", "checks of gemv"]
    assert left == {
        "pairs": "1 of 2 shares ended, 0 checks not reached",
        "layers": "1 of 1 shares ended, 1 checks not reached",
    }
    assert validations.read(tmp_path)["checks of gemm"].cases == 6
    assert validations.problems(tmp_path)["checks of gemm"] == "2 of 6 values differ, 2 tests failed"


@pytest.mark.parametrize(
    ("contents", "why"),
    [
        ({"gemm": {"device": "cpu"}}, "compared on a CPU"),
        ({"gemm": {"chosen by": "--only 4096"}}, "some of its checks alone, chosen by --only 4096"),
        ({"gemm": {"checks": 0}}, "no checks"),
        ({"gemm": {"ended": False}}, "0 of 1 shares ended, 0 checks not reached"),
        (
            {"gemm": {"left out": ["x"], "missing": ["loguru"]}},
            "1 of 1 shares ended, 1 checks not reached, not installed: loguru",
        ),
        ({"gemm": {}, "gemm.0-of-2": {}, "gemm.1-of-2": {}}, "results of several runs"),
        ({"gemm.0-of-2": {}, "gemm.1-of-2": {"commit": "918cb971"}}, "results of several runs"),
        ({"gemm.1-of-2": {}, "gemm.0-of-3": {}}, "results of several runs"),
    ],
)
def test_what_is_no_validation_of_a_subject_leaves_its_line(tmp_path, contents, why):
    line = replace(LINE, name="checks of gemm")
    validations.record([line], tmp_path)
    names, left = validations.add(results(tmp_path / "out", contents), tmp_path)
    assert (names, [*left]) == ([], ["gemm"])
    assert left["gemm"].startswith(why)
    assert validations.read(tmp_path) == {"checks of gemm": line}


def test_files_that_are_no_results_are_refused(tmp_path):
    results(tmp_path / "none", {})
    with pytest.raises(ValueError, match="has no results; write some with"):
        validations.add(tmp_path / "none", tmp_path)
    for text in ("[]", "{", json.dumps({"device": "NVIDIA H200", "times": []})):
        (results(tmp_path / "out", {"gemm": {}}) / "times.json").write_text(text)
        with pytest.raises(ValueError, match=r"times\.json is no result of tests/gpu/validate\.py"):
            validations.add(tmp_path / "out", tmp_path)
    assert validations.read(tmp_path) == {}


def test_the_command_says_what_it_did_not_put_in(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(validations, "record", lambda found, root: None)
    folder = results(tmp_path / "out", {"gemm": {"device": "cpu"}, "gemv": {}})
    assert main(["ledger", "--add", str(folder)]) == 1
    said = capsys.readouterr().err
    assert "1 lines put in: checks of gemv" in said
    assert "left as they were: gemm (compared on a CPU)" in said
    (folder / "gemm.json").unlink()
    assert main(["ledger", "--add", str(folder)]) == 0
    assert main(["ledger", "--add", str(tmp_path / "none")]) == 2
