"""Where rows come from: the commit of this clone, the versions of libraries (`ao_lab.install.revision`), and what has changed
since a commit."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from ao_lab.install.revision import (
    CODE,
    DIGITS,
    DIRTY,
    NOT_INSTALLED,
    commit,
    printed,
    processor,
    version_of,
    versions_of,
)
from ao_lab.install.versions import __version__
from experiments.harness.rows import ROOT

SOURCES = (".py", ".cu", ".cuh", ".toml", ".txt", ".csv")
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
    """Libraries with their versions, then the processor of a CPU, or the driver of a GPU; first ao_lab's, where no commit names
    its code."""
    words = [] if commit() else [f"ao_lab {__version__}"]
    words += [f"{name} {version}" for name, version in versions_of(LIBRARIES).items()]
    driver = (printed(*DRIVER) or "unknown").split()[0]
    return "; ".join([*words, processor() if device == "cpu" else f"driver {driver}"])


# Libraries that some experiments compare with: which versions are installed, and journals that depend on them.

TORCHAO = "torchao"


def missing(library: str) -> str | None:
    """The status of what needs a library that is not installed; None where it is."""
    return f"missing: {library} is not installed" if version_of(library) == NOT_INSTALLED else None


def seed_and_libraries(seed: int) -> str:
    """Subject of a journal whose rows depend on the seed and on the libraries that compile or are compared."""
    return "-".join([f"seed{seed}", *(name + version_of(name) for name in ("triton", TORCHAO))])
