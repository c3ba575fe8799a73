"""`register_operators`: C++ finds every operator after one call (`tests/ao_lab/tensor/test_tracing.py` loads a package)."""

import re
import subprocess
import sys
from pathlib import Path

import ao_lab

ROOT = Path(__file__).resolve().parents[3]
REGISTERED = """
import sys, torch, ao_lab
before = [name for name in sys.argv[1:] if torch._C._jit_get_schemas_for_operator(f"ao_lab::{name}")]
ao_lab.register_operators()
after = [name for name in sys.argv[1:] if torch._C._jit_get_schemas_for_operator(f"ao_lab::{name}")]
print(len(before), *sorted(set(sys.argv[1:]) - set(after)))
"""


def test_all_operators_are_registered_by_one_call():
    """What C++ looks for, which asks no module of ours: by name as sources register them; none by the import."""
    text = "".join(
        path.read_text() for package in ("fast", "ao_lab") for path in (ROOT / package).rglob("*.py")
    )
    names = set(re.findall(r'\b(?:(?:register|traceable)\(\s*"|custom_op\(\s*"ao_lab::)([a-z_0-9]+)"', text))
    assert len(names) > 60
    done = subprocess.run(
        [sys.executable, "-c", REGISTERED, *names], check=True, cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.split() == ["0"]
    assert ao_lab.register_operators() is None
