"""What measured numbers are of: the commit of the code, the date, the processor and the versions of libraries.

``AO_LAB_COMMIT`` names the commit of a copy of the tree on another machine, which has no history, or one of its own; without
both it is empty, as it is for an installed package.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

#: The folder of the packages.
ROOT = Path(__file__).resolve().parents[2]
#: What makes numbers: changes elsewhere (reports, docs, other tests) leave a tree clean.
CODE = ("reference", "fast", "ao_lab", "experiments", "tests/gpu", "pyproject.toml", "constraints.txt")
DIGITS, DIRTY = 8, "+dirty"
#: What `version_of` says of a library that is not installed.
NOT_INSTALLED = "none"


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


def utc_now() -> str:
    """The date and time in UTC, as ISO 8601 has them."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def processor() -> str:
    """The processor's name, as the system gives it."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace") if info.exists() else ""
    named = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return named[1].strip() if named else platform.processor() or platform.machine()


def version_of(library: str) -> str:
    """The installed version of a library, or "none"."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED


def versions_of(libraries: Iterable[str]) -> dict[str, str]:
    """The versions of these libraries, of those that are installed."""
    found = {name: version_of(name) for name in libraries}
    return {name: version for name, version in found.items() if version != NOT_INSTALLED}


__all__ = [
    "CODE", "DIGITS", "DIRTY", "NOT_INSTALLED", "ROOT", "commit", "printed", "printed_bytes", "processor", "utc_now",
    "version_of", "versions_of",
]  # fmt: skip
