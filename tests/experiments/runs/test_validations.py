"""The table of what a GPU validated: its lines, what is missing, what is only said, how tests become lines."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ao_lab.cli.app import main
from experiments.runs import validations
from experiments.runs.validations import Validation

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


def test_every_function_with_kernels_has_a_line_and_passed():
    """Of this clone: a new function is to be validated on a GPU before it lands."""
    assert validations.problems() == {}
    assert {"jax", "quantize", "saturation"} <= set(validations.functions())


@pytest.fixture
def program(monkeypatch, tmp_path):
    """Stands in for the program on a GPU: writes these tests."""

    def of(*tests):
        def run(command, **_):
            assert order == ["commit"], "the commit is that of the code before it is tested"
            full = [
                {"status": "ok", "count": 10, "different": 0, "handed_on": 0, "cases": 2, "late": 0, **one}
                for one in tests
            ]
            with open(command[command.index("--json") + 1], "w") as file:
                json.dump({"tests": full}, file)
            return SimpleNamespace(returncode=0)

        monkeypatch.setattr(validations.subprocess, "run", run)
        return validations.refresh(60.0, tmp_path)

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


def test_the_command_shows_the_table_and_refuses_what_cannot_be(capsys):
    assert main(["ledger", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert set(shown) == {"validations", "problems", "changes", "not reached"}
    assert main(["ledger", "--check", "--refresh"]) == 2
    assert main(["ledger", "--refresh"]) == 2
    assert "torch sees none" in capsys.readouterr().err
