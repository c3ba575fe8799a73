"""Layers in training under FSDP2: two ranks on this machine give the bits of one."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_two_ranks():
    """Outputs and gradients; weights that are distributed are not converted."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "qat_ranks.py"), "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "equal"
