"""Make the virtual environment that `make reproduce` and `make test` run in.

Needs only Python (3.11 or newer) with pip; the standard library does the rest. The steps: a `.venv` in the
clone, pip and the build backend at their pinned versions, the CPU or CUDA build of torch (`torch_build.py`
finds it), then this project and its pinned requirements. Two levels: `run` is what the experiments need,
`test` adds the libraries that tests compare with, the linters and the builder of API pages.

A second call is quick: the environment holds a key made from the pins, the Python version and the choice of
torch, and nothing is done while it is the same. An installation that broke off leaves a mark, and the next
call starts afresh.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from torch_build import has_nvidia_gpu

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
STAMP = VENV / "ao_lab-installed.json"
BROKEN = VENV / "ao_lab-unfinished"
INPUTS = ("pyproject.toml", "constraints.txt", ".ci/install.py", ".ci/torch_build.py")
EXTRAS = {"run": "[experiments,models]", "test": "[experiments,models,test,jax,ao,hf,lint,docs]"}
OLDEST_PYTHON = (3, 11)


def main(argv: list[str] | None = None) -> int:
    """Install what the level needs, unless it is there already; 0 on success."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("level", choices=EXTRAS)
    parser.add_argument("--torch", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--torch-index", default="", help="index or folder of wheels that holds the build of torch"
    )
    arguments = parser.parse_args(argv)
    if sys.version_info < OLDEST_PYTHON:
        print(
            f"Python 3.11 or newer is needed; {sys.executable} is {sys.version.split()[0]}. "
            "Name another: make PYTHON=python3.12 ...",
            file=sys.stderr,
        )
        return 2
    torch = arguments.torch
    if torch == "auto":
        torch = "cuda" if has_nvidia_gpu() else "cpu"
    key = fingerprint(torch)
    stamp = json.loads(STAMP.read_text()) if STAMP.exists() and not BROKEN.exists() else {}
    if stamp.get("key") == key and stamp["level"] in (arguments.level, "test"):
        return 0
    try:
        install(arguments.level, torch, arguments.torch_index)
    except subprocess.CalledProcessError as error:
        print(f"Setting up {VENV.name} stopped (see above) at: {shown(error.cmd)}", file=sys.stderr)
        return 1
    STAMP.write_text(
        json.dumps({"key": key, "place": place(), "level": arguments.level, "torch": torch}) + "\n"
    )
    BROKEN.unlink()
    return 0


def place() -> str:
    """What an environment cannot outlive: its folder and its Python."""
    return f"{ROOT}, Python {sys.version}"


def fingerprint(torch: str) -> str:
    """What the installed environment depends on, as one hash."""
    digest = hashlib.sha256(f"{place()}\n{torch}\n".encode())
    for name in INPUTS:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def outlived() -> str | None:
    """Why the environment that is there must go first, or None where it can be used."""
    if BROKEN.exists():
        return "the last installation broke off"
    if STAMP.exists() and json.loads(STAMP.read_text())["place"] != place():
        return "the environment belongs to another Python or folder"
    return None


def install(level: str, torch: str, torch_index: str) -> None:
    """All steps, in order; raises CalledProcessError where one fails."""
    if reason := outlived():
        say(f"{reason}: starting afresh")
        shutil.rmtree(VENV)
    VENV.mkdir(exist_ok=True)
    BROKEN.touch()
    STAMP.unlink(missing_ok=True)
    make_environment()
    pip = [
        str(BIN / "python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--constraint",
        str(ROOT / "constraints.txt"),
    ]
    say("pinned pip and build backend")
    run([*pip, "--upgrade", "pip", "hatchling", "editables"])
    say(f"torch, {torch} build")
    run([str(BIN / "python"), str(ROOT / ".ci" / "torch_build.py"), torch, "--index", torch_index])
    say("ao_lab and its requirements")
    run([*pip, "--no-build-isolation", "--editable", f"{ROOT}{EXTRAS[level]}"])
    compile_modules(BIN / "python")


def make_environment(venv: Path = VENV) -> None:
    """Create an environment; on a Python that lacks ensurepip, with the pip that this Python has."""
    say(f"environment {venv.name} with Python {sys.version.split()[0]}")
    made = subprocess.run([sys.executable, "-m", "venv", str(venv)], capture_output=True, check=False)
    if made.returncode != 0:
        run([sys.executable, "-m", "venv", "--without-pip", str(venv)])
        python = str(venv / BIN.name / "python")
        run([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "pip"])


def compile_modules(python: Path) -> None:
    """Compile what pip installed, on all cores: pip takes one. Files that are no Python, as templates, stay as they are."""
    where = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    folder = subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip()
    subprocess.run([str(python), "-m", "compileall", "-qq", "-j", "0", folder], check=False)


def run(command: list[str]) -> None:
    """Run a command, its output on ours; raise where it fails. Where it is pip, modules are left to `compile_modules`."""
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PIP_COMPILE": "0"})


def say(text: str) -> None:
    """Progress, to stderr."""
    print(f"install: {text}", file=sys.stderr, flush=True)


def shown(command: list[str] | str) -> str:
    """A command as one would type it."""
    return command if isinstance(command, str) else " ".join(command)


if __name__ == "__main__":
    sys.exit(main())
