"""The versions of libraries that ao_lab was tested with, in one place, and what is said of others.

Names, arguments and layouts of these libraries change without notice: transformers 5.24 renamed the cache that its blocks are
given. So at the first use of a library whose version lies outside of the range there is one UntestedVersion, a UserWarning;
the command line makes one line of it. Nothing is refused, since most of it still works. `.ci/newest.py` runs a part of the
tests with the newest versions.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from typing import Any

#: Of ao_lab.
__version__ = "0.1.0"


#: The oldest and the newest version, by the name under which a library is imported; all patches of the newest are meant.
TESTED = {
    "torch": ("2.11", "2.13"),
    "triton": ("3.6", "3.7"),
    "transformers": ("5.23", "5.24"),
    "compressed_tensors": ("0.20", "0.20"),
    "torchao": ("0.18", "0.18"),
    "jax": ("0.10", "0.11"),
}
#: Libraries that come with another, which alone is told of where both lie outside.
BROUGHT = {"triton": "torch"}
_checked: set[str] = set()


class UntestedVersion(UserWarning):
    """A library is older or newer than those that ao_lab was tested with."""


def address() -> str:
    """Where this package is to be had: the page that the installed package's metadata name; "" where they name none."""
    from importlib.metadata import PackageNotFoundError, metadata  # 0.1 s, for those who write a card

    try:
        urls = metadata("ao_lab").get_all("Project-URL", [])
    except PackageNotFoundError:
        return ""
    known = dict(line.partition(", ")[::2] for line in urls)
    return str(known.get("Repository", next(iter(known.values()), "")))


def numbers(version: str) -> tuple[int, int]:
    """Major and minor of a version; (0, 0) for what does not begin with two numbers."""
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)


def outside(library: str, version: str) -> str | None:
    """What is to be said of a library's version; None where it lies within the tested range."""
    oldest, newest = TESTED[library]
    if numbers(oldest) <= numbers(version) <= numbers(newest):
        return None
    tested = oldest if oldest == newest else f"{oldest} to {newest}"
    older = numbers(version) < numbers(oldest)
    major, minor = numbers(newest)
    way = f"-U {library}" if older else f"'{library}<{major}.{minor + 1}'"
    return f"ao_lab was tested with {library} {tested}; this is {version}: if something differs, pip install {way}"


def cache_argument(model: Any) -> str:
    """The argument by which a transformers model's forward takes its cache, which is also the field of its result.

    "cache" from transformers 5.24 on, which warns of the name before, "past_key_values".
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def check_loaded() -> None:
    """Warn, once per library and process, of those that have been imported in a version outside of the tested range."""
    for library in TESTED:
        module = sys.modules.get(library)
        version = getattr(module, "__version__", None)
        if library in _checked or not isinstance(version, str):
            continue
        _checked.add(library)
        told = outside(library, version)
        if told and not _told_with_another(library):
            warnings.warn(told, UntestedVersion, stacklevel=3)


def _told_with_another(library: str) -> bool:
    """Whether a library comes with one that lies outside too."""
    brings = BROUGHT.get(library, "")
    version = getattr(sys.modules.get(brings), "__version__", None)
    return isinstance(version, str) and brings in TESTED and outside(brings, version) is not None


__all__ = ["TESTED", "UntestedVersion", "cache_argument", "check_loaded", "numbers", "outside"]
