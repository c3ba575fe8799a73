"""Indices, masks and passes of the kernels, in Triton's interpreter; `interpreted_kernels` says what is compared."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

ROOT = Path(__file__).resolve().parent.parent
# Each group is a process: its cases, and what has to have answered in them.
GROUPS = {
    "fp8": (33, {"gradient"}),
    "mx": (39, {"gradient", "packed", "tiled"}),
    "integers": (38, {"gradient", "packed"}),
    "two levels": (20, {"gradient", "packed", "outer", "tiled"}),
    "formats": (18, {"stochastic", "packed"}),
    "both": (9, {"both"}),
}


def lines_of(*command):
    """What a program prints before it says that all agreed."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, "\n".join([*lines[-1:], done.stderr[-3000:]])
    assert lines[-1] == "agreed"
    return lines[:-1]


@pytest.mark.parametrize("group", GROUPS)
def test_kernels_agree_with_the_reference(group):
    """Triton is required here, on any machine: it is among what `make test` installs."""
    cases, answered = GROUPS[group]
    lines = lines_of("tests/interpreted_kernels.py", group)
    assert len(lines) == cases
    assert answered <= set(" ".join(lines).split())


def test_scales_of_scales_agree_with_the_reference():
    assert len(lines_of("tests/interpreted_levels.py")) == 25


def test_gradients_agree_with_the_reference():
    assert len(lines_of("tests/interpreted_gradients.py")) == 33
