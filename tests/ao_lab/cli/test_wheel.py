"""What is installed from a wheel: the commands start, advise and write as they should without a clone."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("ao_lab", "reference", "fast", "experiments")
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
        "PYTHONPATH": str(installed),
        "HOME": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    for name in ("AO_LAB_CACHE", "AO_LAB_REPORTS", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    return subprocess.run(
        [sys.executable, "-P", "-c", script, *arguments],
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
    assert [path for path in data if not (installed / path).is_file()] == []


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["quantize", "--help"], ["reproduce", "--help"]]
)
def test_commands_start(installed, tmp_path, arguments):
    done = run(installed, tmp_path, *arguments)
    assert (done.returncode, done.stderr) == (0, "")


def test_reports_are_written_where_the_user_is(installed, tmp_path):
    """A run that is cut short as soon as it knows its places."""
    script = START.replace(
        "sys.argv =",
        "from experiments.runs import run as harness; from experiments.harness.rows import write_text; "
        "harness.run_one = lambda name, settings, places: write_text(places.data / 'x.csv', '') or [(name, 'x')]; "
        "sys.argv =",
    )
    before = sorted(path for path in installed.rglob("*") if "__pycache__" not in path.parts)
    done = run(installed, tmp_path, "reproduce", "formats", "--device", "cpu", script=script)
    assert done.returncode == 0, done.stderr
    assert f"reproduce writes to {tmp_path / 'reports'} and keeps" in done.stderr
    assert (tmp_path / "reports" / "data" / "x.csv").is_file()
    assert (tmp_path / "reports" / "index.html").is_file()
    assert (tmp_path / ".cache" / "ao_lab").is_dir()
    assert sorted(path for path in installed.rglob("*") if "__pycache__" not in path.parts) == before


def test_what_needs_a_clone_says_so(installed, tmp_path):
    done = run(installed, tmp_path, "ledger", "--check")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "ledger needs a clone of ao_lab" in done.stderr
