"""The mutation check itself: every mutation still applies to today's text (`make mutation` runs them), and what is compared."""

import ast
import json
import shlex
from dataclasses import replace

import pytest

from tests.repo import mutation as machine
from tests.repo.mutants import MUTATIONS
from tests.repo.mutation import ROOT, Row, check_imports, copy_tree, lost, main, mutate, run_tests

CAUGHT, SURVIVED = (
    Row("one", "fast/x.py", verdict, 1.0, "tests/x.py", "") for verdict in ("caught", "SURVIVED")
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_applies_exactly_once(mutation):
    text = (ROOT / mutation.file).read_text()
    assert text.count(mutation.old) == 1
    if mutation.file.endswith(".py"):
        ast.parse(text.replace(mutation.old, mutation.new))
    paths = [argument for argument in shlex.split(mutation.arguments) if argument.startswith("tests/")]
    assert paths
    assert all((ROOT / path).is_file() for path in paths)


def test_mutations_are_many():
    files = {mutation.file for mutation in MUTATIONS}
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    assert {file.partition("/")[0] for file in files} == {"reference", "fast", "ao_lab"}
    assert sum(file.endswith((".cu", ".cuh")) for file in files) >= 10
    assert sum(file.startswith("fast/") and file.endswith(".py") for file in files) >= 10


def test_a_copy_has_what_its_tests_import(tmp_path):
    copy_tree(tmp_path)
    check_imports(tmp_path)
    assert mutate(tmp_path, MUTATIONS[0])
    assert not mutate(tmp_path, MUTATIONS[0]), "the text is gone"


def test_another_tree_is_not_tested(tmp_path):
    with pytest.raises(RuntimeError, match="would be imported"):
        check_imports(tmp_path)


@pytest.mark.parametrize(
    ("text", "outcome", "failed"),
    [
        ("def test_it(): assert 1", "passed", ""),
        ("def test_it(): assert 0 - 1 == 1", "failed", "test_x.py::test_it"),
        ("import none_such", "broken", ""),
        ("", "broken", ""),
        ("import time\ndef test_it(): time.sleep(60)", "clock", ""),
    ],
)
def test_how_tests_end(tmp_path, monkeypatch, text, outcome, failed):
    """Only a failing test has caught anything."""
    monkeypatch.setattr(machine, "check_imports", lambda folder: None)
    monkeypatch.setattr(machine, "LIMIT", 2 if outcome == "clock" else 60)
    (tmp_path / "test_x.py").write_text(text)
    run = run_tests(tmp_path, "test_x.py")
    assert (run.outcome, run.failed.partition(" - ")[0]) == (outcome, failed)
    assert outcome != "failed" or "assert (0 - 1) == 1" in run.failed


def test_nightly_cases_are_asked_for():
    night = replace(MUTATIONS[0], tests="tests/x.py -k y", nightly=True)
    assert night.arguments == "tests/x.py -k y -m ''"
    assert replace(night, nightly=False).arguments == "tests/x.py -k y"


@pytest.mark.parametrize(
    ("row", "names", "found"),
    [
        (CAUGHT, ["one"], []),
        (SURVIVED, ["one"], ["one: SURVIVED"]),
        (None, [], ["one: NOT IN THE TABLE"]),
        (None, ["one"], []),  # not chosen this time
    ],
)
def test_what_was_lost(row, names, found):
    rows = [] if row is None else [row]
    assert (
        lost([{"name": "one", "verdict": "caught"}, {"name": "two", "verdict": "SURVIVED"}], rows, names)
        == found
    )


def test_runs_are_compared(tmp_path, monkeypatch, capsys):
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    name = MUTATIONS[0].name
    monkeypatch.setattr(machine, "checked", lambda chosen, workers: iter([replace(CAUGHT, name=name)]))
    assert main([name, "--json", str(before)]) == 0
    assert json.loads(before.read_text())[0]["verdict"] == "caught"
    assert main([name, "--json", str(after), "--compare", str(before)]) == 0
    monkeypatch.setattr(machine, "checked", lambda chosen, workers: iter([replace(SURVIVED, name=name)]))
    assert main([name, "--compare", str(before)]) == 1
    assert f"{name}: SURVIVED" in capsys.readouterr().out


def test_a_mutation_whose_tests_fail_anyway_is_not_tried(monkeypatch):
    monkeypatch.setattr(machine, "sound", lambda tests: (tests, machine.Run("failed", 1.0)))
    monkeypatch.setattr(machine, "check", lambda mutation: pytest.fail("tried"))
    assert [row.verdict for row in machine.checked(MUTATIONS[:2], 1)] == ["UNSOUND", "UNSOUND"]
