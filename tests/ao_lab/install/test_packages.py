"""Both spellings of a module are one module: `reference.formats` and `ao_lab.reference.formats`."""

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import reference
from ao_lab.install import packages

# A user's file with the name of one of our packages is named at import, and is not run.

ROOT = Path(__file__).resolve().parents[3]


def run(folder, script, *flags, **environment):
    (folder / "script.py").write_text(script)
    return subprocess.run(
        [sys.executable, *flags, str(folder / "script.py")],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "", **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("name", packages.PACKAGES)
@pytest.mark.parametrize("kind", ["{}.py", "{}/__init__.py"])
def test_the_file_in_the_way_is_named(tmp_path, name, kind):
    path = tmp_path / kind.format(name)
    path.parent.mkdir(exist_ok=True)
    path.write_text("print('ran')")
    done = run(tmp_path, "import ao_lab\nprint('imported')")
    assert done.returncode == 1
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        f"ImportError: {path} is in the way: ao_lab imports its own package '{name}' from {ROOT}"
    )
    assert "Rename it" in last


def test_a_module_that_is_loaded_already_is_in_the_way(tmp_path):
    (tmp_path / "fast.py").write_text("")
    done = run(tmp_path, "import fast, ao_lab")
    assert f"ImportError: {tmp_path / 'fast.py'} is in the way" in done.stderr


def test_python_without_the_folder_of_the_script_takes_ours(tmp_path):
    (tmp_path / "reference.py").write_text("print('ran')")
    done = run(tmp_path, "import ao_lab\nprint(len(ao_lab.FORMATS) > 0)", "-P")
    assert (done.returncode, done.stdout) == (0, "True\n")


def test_what_is_no_module_is_not_in_the_way(tmp_path):
    """A folder without Python in it; a file that has our name elsewhere; experiments, until they are asked for."""
    for name in ("reference", "experiments"):
        (tmp_path / name).mkdir()
    (tmp_path / "experiments" / "__init__.py").write_text("")
    done = run(tmp_path, "import ao_lab, reference\nprint(reference.FORMATS is ao_lab.FORMATS)")
    assert (done.returncode, done.stdout) == (0, "True\n")
    done = run(tmp_path, "from ao_lab.cli.app import main\nraise SystemExit(main(['reproduce', 'formats']))")
    assert done.returncode == 1
    assert f"{tmp_path / 'experiments' / '__init__.py'} is in the way" in done.stderr
    assert done.stderr.count("\n") == 1


def test_packages_that_are_not_there_are_named():
    with pytest.raises(
        ImportError, match=r"package 'no_such_package', which should lie in .* install ao_lab again"
    ):
        packages.check("no_such_package")


def test_the_other_spelling_has_the_same_objects():
    inside = importlib.import_module("ao_lab.reference")
    assert inside.FORMATS is reference.FORMATS
    stored = importlib.import_module("ao_lab.reference.quantize.stored")
    assert stored.Quantized is reference.Quantized
    # Importing what lies below a package hides no function of the package's name.
    assert inside.quantize is reference.quantize
    assert "quantize" in dir(inside)


@pytest.mark.parametrize("name", ["ao_lab.reference.nothing", "ao_lab.references"])
def test_what_is_not_there_is_named_as_it_was_asked_for(name):
    with pytest.raises(ModuleNotFoundError, match=f"No module named '{name}'"):
        importlib.import_module(name)


@pytest.mark.parametrize(
    ("inside", "name", "own"),
    [
        (False, "ao_lab.fast.ops", "fast.ops"),
        (False, "fast.ops", None),
        (True, "fast.ops", "ao_lab.fast.ops"),
        (True, "ao_lab.fast", None),
        (True, "faster", None),
        (False, "ao_lab.gemm", None),
    ],
)
def test_own_spelling(monkeypatch, inside, name, own):
    monkeypatch.setattr(packages, "INSIDE", inside)
    assert packages.own_spelling(name) == own


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
