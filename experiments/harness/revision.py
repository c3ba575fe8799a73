"""Where rows come from: the commit of this clone, the versions of libraries, and what has changed since a commit.

``AO_LAB_COMMIT`` names the commit of a copy of the tree on another machine, which has no history, or one of its own; without
both it is empty.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from experiments.harness.rows import ROOT

#: What makes numbers: changes elsewhere (reports, docs) leave a tree clean.
CODE = ("reference", "fast", "ao_lab", "experiments", "tests", "pyproject.toml", "constraints.txt")
#: Digits of a commit.
DIGITS = 8
DIRTY = "+dirty"
#: Libraries whose versions rows name, where they are installed.
LIBRARIES = ("torch", "triton", "numpy", "jax", "torchao", "transformers")


def git(*arguments: str, root: Path = ROOT) -> str | None:
    """What git prints; None where there is no git, no history, or no such commit."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


@cache
def commit(root: Path = ROOT) -> str:
    """The commit of the code that runs, ``+dirty`` after it where code has uncommitted changes; empty where nothing says it.

    Read once a process: what is edited while a run goes on is not what ran.
    """
    if told := os.environ.get("AO_LAB_COMMIT"):
        return told
    head = git("rev-parse", f"--short={DIGITS}", "HEAD", root=root) if (root / ".git").exists() else None
    if head is None:
        return ""
    return head.strip() + DIRTY * bool(git("status", "--porcelain", "--", *CODE, root=root))


@cache
def state(root: Path = ROOT) -> str:
    """What names the code in a cache: the commit, and of a tree with uncommitted changes a digest of these."""
    name = commit(root)
    if not name.endswith(DIRTY):
        return name or "unknown"
    listed = git("ls-files", "--others", "--exclude-standard", "-z", "--", *CODE, root=root) or ""
    digest = hashlib.sha256((git("diff", "HEAD", "--", *CODE, root=root) or "").encode())
    for path in filter(None, listed.split("\0")):
        digest.update(path.encode() + (root / path).read_bytes())
    return f"{name}-{digest.hexdigest()[:DIGITS]}"


@cache
def changed_files(since: str, folders: Sequence[str], root: Path = ROOT) -> int | None:
    """How many files under some folders are not as they were at a commit; a file that was only moved counts as none.

    None where the commit is not known here.
    """
    base = since.removesuffix(DIRTY)
    found = git("diff", "--name-status", "-M", base, "--", *folders, root=root) if base else None
    if found is None:
        return None
    return sum(not line.startswith("R100") for line in found.splitlines())


@cache
def versions(device: str = "cpu") -> str:
    """Libraries with their versions, then the processor of a CPU, or the driver of a GPU."""
    found = [f"{name} {version}" for name in LIBRARIES if (version := version_of(name))]
    return "; ".join([*found, processor() if device == "cpu" else f"driver {driver()}"])


def version_of(name: str) -> str:
    """The version of a library, empty where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def processor() -> str:
    """The processor's name, as the system gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def driver() -> str:
    """The driver's version by nvidia-smi, or unknown."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    words = done.stdout.split()
    return words[0] if done.returncode == 0 and words else "unknown"


__all__ = ["DIRTY", "changed_files", "commit", "processor", "state", "versions"]
