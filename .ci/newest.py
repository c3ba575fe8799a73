"""Run the tests that a new version of another library may break, with the newest versions there are.

`.venv` has the versions of constraints.txt. This makes a second environment, `.venv-newest`, afresh each time and
without pins: the newest torch of the wanted build (`torch_build.py --newest` says where it looks), and the newest
transformers, compressed-tensors, torchao, JAX, accelerate and peft that go with it. Then it runs the folders of
TESTS, by day's selection. Warnings are no errors here: what a library announces for later breaks nothing today.

Needs only Python (3.11 or newer) with pip. What it ran with is said at the end, with what lies outside of the
range of `ao_lab/install/versions.py`: where all passes, that table can be widened.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys

from install import BIN, ROOT, compile_modules, make_environment, run, say
from torch_build import CONSTRAINTS, has_nvidia_gpu, pinned_version

VENV = ROOT / ".venv-newest"
PYTHON = VENV / BIN.name / "python"
#: Where names, arguments and layouts of other libraries matter.
TESTS = (
    "tests/ao_lab/calibration",
    "tests/ao_lab/checkpoint/formats/test_compressed_tensors.py",
    "tests/ao_lab/checkpoint/formats/test_compressed_tensors_config.py",
    "tests/ao_lab/checkpoint/test_streaming.py",
    "tests/ao_lab/checkpoint/test_model_builder.py",
    "tests/ao_lab/checkpoint/transformers",
    "tests/ao_lab/compile",
    "tests/ao_lab/install",
    "tests/ao_lab/jax",
    "tests/ao_lab/quantization/test_experts.py",
    "tests/ao_lab/quantization/test_models.py",
    "tests/ao_lab/qat/test_loops.py",
    "tests/ao_lab/sparsity/test_api.py",
    "tests/ao_lab/tensor/test_libraries.py",
    "tests/ao_lab/tensor/test_view_ops.py",
    "tests/ao_lab/training/test_fused_modules.py",
    "tests/ao_lab/training/test_fused_modules.py",
    "tests/ao_lab/training/test_loops.py",
)
SAID = """
import importlib.metadata, json
from ao_lab.install.versions import TESTED, outside
found = {}
for name in TESTED:
    version = importlib.metadata.version(name)
    found[name] = [version, outside(name, version) is None]
print(json.dumps(found))
"""


def main(argv: list[str] | None = None) -> int:
    """Install and test; 0 where everything passed, 1 where it did not, 2 where nothing could be installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--torch", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--torch-index", default="", help="index or folder of wheels that holds the build of torch"
    )
    parser.add_argument("--keep", action="store_true", help="use the environment that is there")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, behind --")
    arguments = parser.parse_args(argv)
    torch = arguments.torch
    if torch == "auto":
        torch = "cuda" if has_nvidia_gpu() else "cpu"
    try:
        if not (arguments.keep and PYTHON.exists()):
            install(torch, arguments.torch_index)
        versions = installed()
    except subprocess.CalledProcessError as error:
        print(f"Setting up {VENV.name} stopped (see above): {error}", file=sys.stderr)
        return 2
    passed = tested(arguments.pytest)
    print(statement(versions, torch, passed))
    return 0 if passed else 1


def install(torch: str, torch_index: str) -> None:
    """The environment, afresh; raises CalledProcessError where a step fails."""
    shutil.rmtree(VENV, ignore_errors=True)
    make_environment(VENV)
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--quiet"]
    run([*pip, "--upgrade", "pip", "packaging"])
    say(f"the newest torch, {torch} build")
    run([str(PYTHON), str(ROOT / ".ci" / "torch_build.py"), torch, "--newest", "--index", torch_index])
    say("ao_lab, with the newest libraries that go with it")
    run([*pip, "--editable", f"{ROOT}[experiments,models,test,jax,ao,hf]", *triton_of(torch_version())])
    compile_modules(PYTHON)


def torch_version() -> str:
    """The version of torch that was installed, without its build."""
    told = [str(PYTHON), "-c", "import importlib.metadata as m; print(m.version('torch').partition('+')[0])"]
    return subprocess.run(told, check=True, capture_output=True, text=True).stdout.strip()


def triton_of(torch: str) -> list[str]:
    """The triton that goes with the pinned torch; a CUDA build of another asks for its own."""
    constraints = CONSTRAINTS.read_text()
    return (
        re.findall(r"^triton==\S+$", constraints, re.MULTILINE)
        if torch == pinned_version(constraints)
        else []
    )


def installed() -> dict[str, tuple[str, bool]]:
    """The versions of the libraries, and whether each lies in the tested range."""
    told = subprocess.run([str(PYTHON), "-c", SAID], cwd=ROOT, check=True, capture_output=True, text=True)
    return {name: (version, known) for name, (version, known) in json.loads(told.stdout).items()}


def tested(more: list[str]) -> bool:
    """Whether the tests pass."""
    command = [
        str(PYTHON),
        "-m",
        "pytest",
        "-W",
        "default",
        "-W",
        "ignore:ao_lab was tested with",
        *more,
        *TESTS,
    ]
    environment = {**os.environ, "HYPOTHESIS_PROFILE": "ci"}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0


def statement(versions: dict[str, tuple[str, bool]], torch: str, passed: bool) -> str:
    """What ran with what."""
    lines = [
        f"== newest: {'passed' if passed else 'FAILED'} with Python {sys.version.split()[0]}, torch's {torch} build"
    ]
    for name, (version, known) in versions.items():
        lines.append(
            f"   {name} {version}{'' if known else ' (outside of the range in ao_lab/install/versions.py)'}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
