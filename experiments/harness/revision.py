"""Where rows come from: the commit of this clone, the versions of libraries, and what has changed since a commit.

``AO_LAB_COMMIT`` names the commit of a copy of the tree on another machine, which has no history, or one of its own; without
both it is empty.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from experiments.harness.rows import ROOT

#: What makes numbers: changes elsewhere (reports, docs, other tests) leave a tree clean.
CODE = ("reference", "fast", "ao_lab", "experiments", "tests/gpu", "pyproject.toml", "constraints.txt")
SOURCES = (".py", ".cu", ".cuh", ".toml", ".txt", ".csv")
DIGITS, DIRTY = 8, "+dirty"
#: Pages measure nothing.
PAGES = (
    ":(exclude,glob)experiments/*/page.py",
    ":(exclude,glob)experiments/*/report/**",
    ":(exclude)experiments/report",
)
#: Libraries whose versions rows name, where they are installed.
LIBRARIES = ("torch", "triton", "numpy", "jax", "torchao", "transformers")
DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


@cache
def has_triton() -> bool:
    """Whether Triton is installed, with which kernels are chosen."""
    return importlib.util.find_spec("triton") is not None


#: GPUs for which pages ask what is chosen today, by a part of their names.
HOPPER = ("H100", "H200")


def is_hopper(device: str) -> bool:
    """Whether a device's name is of a GPU that choices are the same for as for `fast.gemm.families.HOPPER`."""
    return any(gpu in device for gpu in HOPPER)


def printed(*command: str, root: Path = ROOT) -> str | None:
    """What a command prints; None where there is none, or it fails: no git, no history, no such commit."""
    found = printed_bytes(*command, root=root)
    return None if found is None else found.decode(errors="replace")


def printed_bytes(*command: str, root: Path = ROOT) -> bytes | None:
    """The same of what is no text, such as a compressed file."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


@cache
def commit(root: Path = ROOT) -> str:
    """The commit of the code that runs, ``+dirty`` after it where code has uncommitted changes; empty where nothing says it.

    Read once a process: what is edited while a run goes on is not what ran.
    """
    if told := os.environ.get("AO_LAB_COMMIT"):
        return told
    short = ("git", "rev-parse", f"--short={DIGITS}", "HEAD")
    head = printed(*short, root=root) if (root / ".git").exists() else None
    if head is None:
        return ""
    changes = printed("git", "status", "--porcelain", "--untracked-files=normal", "--", *CODE, root=root)
    return head.strip() + DIRTY * (changes != "")


@cache
def subject(name: str, root: Path = ROOT) -> str:
    """The first line of a commit's message; empty where the commit is not known here."""
    base = name.removesuffix(DIRTY)
    return (printed("git", "log", "-1", "--format=%s", base, "--", root=root) or "").strip() if base else ""


@cache
def state(root: Path = ROOT) -> str:
    """What names the code in a cache: the commit of a clone without changes, else its name with a digest of all code."""
    name = commit(root)
    if name and not name.endswith(DIRTY) and "AO_LAB_COMMIT" not in os.environ:
        return name
    digest = hashlib.sha256()
    places = [root / place for place in CODE]
    paths = [path for place in places for path in (place.rglob("*") if place.is_dir() else [place])]
    for path in sorted(path for path in paths if path.suffix in SOURCES and path.is_file()):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return f"{name or 'unknown'}-{digest.hexdigest()[:DIGITS]}"


@cache
def changed_files(since: str, folders: Sequence[str], root: Path = ROOT) -> int | None:
    """How many files under some folders are not as they were at a commit, new ones included; a file that was only moved counts
    as none, and neither does one that makes pages. None where the commit is not known here.
    """
    base, where = since.removesuffix(DIRTY), ("--", *folders, *PAGES)
    found = printed("git", "diff", "--name-status", "-M", base, *where, root=root) if base else None
    if found is None:
        return None
    new = printed("git", "ls-files", "--others", "--exclude-standard", *where, root=root) or ""
    return sum(not line.startswith("R100") for line in [*found.splitlines(), *new.splitlines()])


@cache
def versions(device: str = "cpu") -> str:
    """Libraries with their versions, then the processor of a CPU, or the driver of a GPU."""
    found = {name: version_of(name) for name in LIBRARIES}
    words = [f"{name} {version}" for name, version in found.items() if version != NOT_INSTALLED]
    driver = (printed(*DRIVER) or "unknown").split()[0]
    return "; ".join([*words, processor() if device == "cpu" else f"driver {driver}"])


def processor() -> str:
    """The processor's name, as the system gives it."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace") if info.exists() else ""
    named = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return named[1].strip() if named else platform.processor() or platform.machine()


# Libraries that some experiments compare with: which versions are installed, and journals that depend on them.

TORCHAO = "torchao"
#: What `version_of` says of a library that is not installed.
NOT_INSTALLED = "none"


def version_of(library: str) -> str:
    """The installed version of a library, or "none"."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED


def missing(library: str) -> str | None:
    """The status of what needs a library that is not installed; None where it is."""
    return f"missing: {library} is not installed" if version_of(library) == NOT_INSTALLED else None


def seed_and_libraries(seed: int) -> str:
    """Subject of a journal whose rows depend on the seed and on the libraries that compile or are compared."""
    return "-".join([f"seed{seed}", *(name + version_of(name) for name in ("triton", TORCHAO))])
