"""The hot paths of the kernels with their inline assembly, emulated; `interpreted_hot` says what is compared."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

ROOT = Path(__file__).resolve().parent.parent
# Each group is a process: how many lines it prints before the last.
GROUPS = {"fours": 28, "sixes": 16, "bytes": 28, "integers": 16, "codebooks": 5, "producers": 6, "encode": 3}


@pytest.mark.parametrize("group", GROUPS)
def test_hot_paths_agree_with_the_reference(group):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "tests/interpreted_hot.py", group],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, "\n".join([*lines[-1:], done.stderr[-3000:]])
    assert lines[-1] == "agreed"
    assert len(lines) - 1 == GROUPS[group]
