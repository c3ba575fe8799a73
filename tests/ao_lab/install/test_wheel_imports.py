"""What the build of the wheel makes of imports: `reference`, `fast` and `experiments` lie inside `ao_lab` there."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[3] / ".ci" / "wheel.py"
CASES = [
    ("from reference.formats import Format", "from ao_lab.reference.formats import Format"),
    ("from reference import (\n    encode,\n)", "from ao_lab.reference import (\n    encode,\n)"),
    ("import reference", "from ao_lab import reference"),
    ("import fast.ops", "import ao_lab.fast.ops; from ao_lab import fast"),
    ("import fast.ops as ops  # why", "import ao_lab.fast.ops as ops  # why"),
    ("import os, fast", "import os; from ao_lab import fast"),
    ("if x: import fast; y = 1", "if x: from ao_lab import fast; y = 1"),
    ("ß = 'ß'; import fast", "ß = 'ß'; from ao_lab import fast"),
    ("from . import reference", "from . import reference"),
    ("from ao_lab.reference import x", "from ao_lab.reference import x"),
    ("import faster, references", "import faster, references"),
    ("text = 'import reference'", "text = 'import reference'"),
    (
        "def f():\n    from fast import x\n    return x",
        "def f():\n    from ao_lab.fast import x\n    return x",
    ),
]


@pytest.fixture(scope="module")
def wheel():
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("wheel", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("source", "expected"), CASES)
def test_imports_lead_into_the_owner(wheel, source, expected):
    assert wheel.rewritten(source) == expected


def test_what_cannot_be_rewritten_on_its_line_is_refused(wheel):
    with pytest.raises(ValueError, match="several lines"):
        wheel.rewritten("import os, \\\n    fast")
