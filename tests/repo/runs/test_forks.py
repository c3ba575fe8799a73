"""Programs in forks end, print and fail as those of an interpreter of their own do."""

import signal

import pytest

from tests.support.runs import forks


def test_a_program_prints_and_ends():
    done = forks.python("-c", "import sys; print(sys.argv[1:]); print('so', file=sys.stderr)", "a", 2)
    assert (done.returncode, done.stdout, done.stderr) == (0, "['a', '2']\n", "so\n")


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("raise ValueError('no')", 1, "ValueError: no\n"),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('why')", 1, "why\n"),
        ("import sys; sys.exit()", 0, ""),
        ("import os; os.abort()", -signal.SIGABRT, ""),
    ],
)
def test_a_program_fails(code, status, said):
    done = forks.python("-c", code)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.endswith(said)


def test_no_program_sees_another(tmp_path):
    change = "import os, sys, ao_lab; os.environ['LEFT'] = 'x'; ao_lab.left = 1; os.chdir('/'); sys.modules['left'] = 1"
    assert forks.python("-c", change, cwd=tmp_path).returncode == 0
    look = "import os, sys, ao_lab; print('LEFT' in os.environ, hasattr(ao_lab, 'left'), 'left' in sys.modules, os.getcwd())"
    assert forks.python("-c", look, cwd=tmp_path).stdout == f"False False False {tmp_path}\n"


def test_files_modules_and_variables(tmp_path):
    (tmp_path / "program.py").write_text("import os, sys; print(__name__, os.environ['GIVEN'], sys.argv[1:])")
    done = forks.python(tmp_path / "program.py", "a", env={"GIVEN": "here"})
    assert done.stdout == "__main__ here ['a']\n"
    done = forks.python("-m", "ao_lab", "formats", "int4", "--json")
    assert done.returncode == 0, done.stderr
    assert '"max": 7.0' in done.stdout


def test_a_program_that_hangs_is_ended():
    assert forks.python("-c", "import time; time.sleep(60)", timeout=1).returncode == -signal.SIGALRM
