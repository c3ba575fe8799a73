"""What is installed from a wheel: one top-level name, commands that start, advise and write as they should without a clone."""

import json
import os
import pickle
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import numpy as np
import pytest

import ao_lab

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("ao_lab", "reference", "fast", "experiments")
LIBRARIES = sysconfig.get_path("purelib")
#: As the script that pip makes of the entry point.
START = (
    "import sys; from ao_lab.cli.app import entry; sys.argv = ['ao-lab', *sys.argv[1:]]; sys.exit(entry())"
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with what pip puts into site-packages."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def run(installed, folder, *arguments, script=START):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(installed), LIBRARIES]),
        "HOME": str(folder),
    }
    for name in ("AO_LAB_CACHE", "AO_LAB_REPORTS", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    return subprocess.run(
        [
            sys.executable,
            "-S",
            "-P",
            "-c",
            script,
            *arguments,
        ],  # -S: this clone is installed, and not to be found
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )


def test_data_of_the_packages_is_installed(installed):
    """Templates, published numbers: whatever lies beside the modules."""
    data = [
        path.relative_to(ROOT)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix != ".py" and path.parent.name != "__pycache__"
    ]
    assert any(path.suffix == ".csv" for path in data)
    places = {path: installed / "ao_lab" / str(path).removeprefix("ao_lab/") for path in data}
    assert [path for path, place in places.items() if not place.is_file()] == []


def test_one_top_level_name(installed):
    assert sorted(path.name.partition("-")[0] for path in installed.iterdir()) == [
        "ao_lab",
        "ao_lab",
    ]  # and its metadata


def test_names_of_a_users_own_are_his(installed, tmp_path):
    """A folder `experiments`, files `fast.py` and `reference.py`: neither side stands in the other's way."""
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "mine.py").write_text("NAME = 'mine'")
    for name in ("fast", "reference"):
        (tmp_path / f"{name}.py").write_text(f"NAME = {name!r}")
    script = (
        "import sys; sys.path.insert(0, ''); from experiments import mine; import fast, reference, numpy, ao_lab;"
        "from ao_lab import reference as ours; assert ours.FORMATS is ao_lab.FORMATS;"
        "q = ao_lab.quantize(numpy.ones((1, 32)), 'mxfp8_e4m3');"
        "print(mine.NAME, fast.NAME, reference.NAME, type(q).__module__, float(ao_lab.dequantize(q).sum()))"
    )
    done = run(installed, tmp_path, script=script)
    assert (done.stdout, done.stderr) == ("mine fast reference ao_lab.reference.quantize.stored 32.0\n", "")


def test_pickles_of_a_clone_load(installed, tmp_path):
    """They name `reference.quantize.stored`, where the wheel has `ao_lab.reference.quantize.stored`."""
    quantized = ao_lab.quantize(np.ones((1, 32), np.float32), "mxfp8_e4m3")
    (tmp_path / "q.pkl").write_bytes(pickle.dumps(quantized))
    script = (
        "import pickle, ao_lab; q = pickle.load(open('q.pkl', 'rb'));"
        "from reference.quantize.stored import Quantized; import reference;"
        "print(type(q) is Quantized, callable(reference.quantize), reference.FORMATS is ao_lab.FORMATS)"
    )
    done = run(installed, tmp_path, script=script)
    assert (done.stdout, done.stderr) == ("True True True\n", "")


#: Commands one after the other in one process, which imports what they share once; how each ended is told by name.
SEVERAL = """
import contextlib, io, json, sys
from ao_lab.cli.app import entry
told = {}
for name, prepared, *arguments in json.loads(sys.argv[1]):
    out, err, code = io.StringIO(), io.StringIO(), 0
    exec(prepared)
    sys.argv = ["ao-lab", *arguments]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = entry()
        except SystemExit as end:
            code = end.code
    told[name] = [code, err.getvalue()]
print(json.dumps(told))
"""
WITHOUT_PANDAS = (
    "import importlib.util as util; find = util.find_spec\n"
    "util.find_spec = lambda name, *rest: None if name == 'pandas' else find(name, *rest)"
)
#: A run that is cut short as soon as it knows its places.
CUT_SHORT = (
    "util.find_spec = find\n"
    "from ao_lab.experiments.runs import run as harness; from ao_lab.experiments.harness.rows import write_text\n"
    "harness.run_one = lambda name, settings, places: write_text(places.data / 'x.csv', '') or [(name, 'x')]"
)
COMMANDS = (
    ("a clone", "", "ledger", "--check"),
    ("an extra", WITHOUT_PANDAS, "reproduce", "formats"),
    ("reports", CUT_SHORT, "reproduce", "formats", "--device", "cpu"),
)


@pytest.fixture(scope="module")
def told(installed, tmp_path_factory):
    """How the commands ended, by name, the user's folder, and whether what is installed was left as it was."""
    folder, before = tmp_path_factory.mktemp("user"), sources(installed)
    done = run(installed, folder, json.dumps(COMMANDS), script=SEVERAL)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), folder, sources(installed) == before


def sources(installed):
    """All that is installed but what Python compiles beside it."""
    return sorted(path for path in installed.rglob("*") if "__pycache__" not in path.parts)


def test_what_an_extra_brings_is_named(told):
    assert told[0]["an extra"] == [2, "ao-lab: pandas is not installed; pip install 'ao_lab[experiments]'\n"]


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["quantize", "--help"], ["reproduce", "--help"]]
)
def test_commands_start(installed, tmp_path, arguments):
    done = run(installed, tmp_path, *arguments)
    assert (done.returncode, done.stderr) == (0, "")


def test_reports_are_written_where_the_user_is(told):
    ended, folder, is_left = told
    code, err = ended["reports"]
    assert code in (0, None), err
    assert f"reproduce writes to {folder / 'reports'} and keeps" in err
    assert (folder / "reports" / "data" / "x.csv").is_file()
    assert (folder / "reports" / "index.html").is_file()
    assert (folder / ".cache" / "ao_lab").is_dir()
    assert is_left


def test_what_needs_a_clone_says_so(told):
    code, err = told[0]["a clone"]
    assert (code, err.count("\n")) == (2, 1)
    assert "ledger needs a clone of ao_lab" in err
