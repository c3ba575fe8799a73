"""Install the CPU or the CUDA build of torch, and never gigabytes by surprise.

Which build a plain `pip install torch` gives depends on the platform and on the package index that is
configured: on Linux the default index holds the CUDA build, which brings several gigabytes of CUDA packages,
and PyTorch's own index holds the CPU build. So this script asks pip what it *would* install, from the wheel's
metadata alone, and looks whether that requires CUDA packages on this machine. It goes through the places that
may hold the wanted build, installs from the first that does, and otherwise says what to do and downloads
nothing.

It runs inside the environment that `install.py` made: it needs `packaging` beside the standard library.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_PACKAGE = re.compile(r"(nvidia|cuda)[-_]", re.IGNORECASE)
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "1"]

NOT_FOUND = """\
No {build} build of torch {version} was found, and nothing was downloaded.
{looked}
What helps:
  TORCH={other}          take the {other} build: make test TORCH={other}{warning}
  TORCH_INDEX=<where>  an index, or a folder of wheels, with a {build} build: make test TORCH_INDEX=..."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where to look: the requirement as pip takes it, further options for pip, and a name for messages."""

    requirement: str
    options: tuple[str, ...] = ()
    name: str


def main(argv: list[str] | None = None) -> int:
    """Install the wanted build unless it is there; 0 on success."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("build", choices=("cpu", "cuda"))
    parser.add_argument("--index", default="")
    parser.add_argument("--newest", action="store_true", help="not the pinned version but the newest")
    arguments = parser.parse_args(argv)
    version = pinned_version(CONSTRAINTS.read_text())
    if not arguments.newest and installed_build(version) == arguments.build:
        return 0
    looked: list[str] = []
    wanted = newest_places(arguments.build, arguments.index) if arguments.newest else []
    for place in [*wanted, *places(arguments.build, version, arguments.index)]:
        found = build_of(dry_run(place))
        looked.append(
            f"  {place.name}: {f'the {found} build' if found else 'no torch of this version, or not reached'}"
        )
        if found == arguments.build:
            command = [*PIP, "install", "--no-deps", "--force-reinstall", *place.options, place.requirement]
            return subprocess.run(command, check=False).returncode
    print(complaint(arguments.build, version, looked), file=sys.stderr)
    return 1


def has_nvidia_gpu() -> bool:
    """Whether the NVIDIA driver lists a GPU."""
    if shutil.which("nvidia-smi") is None:
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listed.returncode == 0 and "GPU" in listed.stdout


def pinned_version(constraints: str) -> str:
    """The version of torch that constraints.txt pins."""
    match = re.search(r"^torch==(\S+)$", constraints, re.MULTILINE)
    if match is None:
        raise ValueError("constraints.txt pins no torch==VERSION")
    return match.group(1)


def places(build: str, version: str, index: str) -> list[Place]:
    """Where a build may be found, first choice first.

    `==` prefers a local version such as 2.13.0+cpu, and `===` takes the plain version only: a machine whose
    configured places hold a CPU build beside the plain one still finds the CUDA build.
    """
    if index:
        options = ("--no-index", "--find-links") if Path(index).is_dir() else ("--index-url",)
        return [Place(requirement=f"torch=={version}", options=(*options, index), name=index)]
    configured = Place(requirement=f"torch=={version}", name="the package index that pip is configured with")
    if build == "cpu":
        return [
            configured,
            Place(requirement=f"torch=={version}", options=("--index-url", CPU_INDEX), name=CPU_INDEX),
        ]
    return [configured, Place(requirement=f"torch==={version}", name="the same, without local versions")]


def newest_places(build: str, index: str) -> list[Place]:
    """Where a build of the newest version may be found, first choice first."""
    pinned = places(build, "0", index)
    found = {place.options: Place(requirement="torch", options=place.options, name=f"{place.name}, newest")
             for place in reversed(pinned)}  # fmt: skip
    return list(reversed(found.values()))


def dry_run(place: Place) -> list[str] | None:
    """The requirements of the torch that pip would install from a place, or None where it finds none.

    Only metadata is read: without dependencies, and by byte ranges of the wheel where an index offers no
    metadata of its own.
    """
    options = [
        "--dry-run",
        "--no-deps",
        "--ignore-installed",
        "--quiet",
        "--use-feature=fast-deps",
        "--report",
        "-",
    ]
    command = [*PIP, "install", *options, *place.options, place.requirement]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        return None
    metadata = json.loads(answer.stdout)["install"][0]["metadata"]
    return list(metadata.get("requires_dist", []))


def installed_build(version: str) -> str | None:
    """The build of torch in this environment, or None where there is none of this version."""
    try:
        distribution = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    if distribution.version.split("+")[0] != version:
        return None
    return build_of(distribution.requires or [])


def build_of(requirements: Iterable[str] | None) -> str | None:
    """Which build has these requirements on this machine: cuda where one that applies is a CUDA package."""
    if requirements is None:
        return None
    return "cuda" if any(CUDA_PACKAGE.match(text) and applies(text) for text in requirements) else "cpu"


def applies(requirement: str) -> bool:
    """Whether the marker of a requirement holds here, no extra being asked for."""
    from packaging.requirements import Requirement

    marker = Requirement(requirement).marker
    return marker is None or marker.evaluate({"extra": ""})


def complaint(build: str, version: str, looked: list[str]) -> str:
    """What was looked at and what the user can do."""
    other = "cuda" if build == "cpu" else "cpu"
    warning = " (several gigabytes)" if other == "cuda" else ""
    return NOT_FOUND.format(
        build=build, other=other, version=version, warning=warning, looked="\n".join(looked)
    )


if __name__ == "__main__":
    sys.exit(main())
