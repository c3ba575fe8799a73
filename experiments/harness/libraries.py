"""Libraries that some experiments compare with: which versions are installed, and journals that depend on them."""

from __future__ import annotations

import importlib.metadata

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
