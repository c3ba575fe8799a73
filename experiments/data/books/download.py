"""Fetching sources over the network: a thin layer that a test, or a person with a mirror, replaces by a function of one's own.

A `Fetch` takes an address and returns the bytes that lie there. Nothing else here or in `books.assemble` touches the network.
"""

from __future__ import annotations

import io
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable

from experiments.data.books.manifest import Source

Fetch = Callable[[str], bytes]

ARCHIVE = "https://github.com/{repository}/archive/{commit}.tar.gz"
RAW = "https://raw.githubusercontent.com/{repository}/{commit}/word_language_model/data/wikitext-2/{name}.txt"
#: Seconds without an answer after which a server counts as unreachable.
TIMEOUT = 60.0


def fetch(address: str) -> bytes:
    """What lies at an address; ValueError, which says what to do, where it cannot be reached."""
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT) as answer:
            data: bytes = answer.read()
            return data
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise ValueError(
            f"{address} cannot be fetched ({error}); a corpus is built on a machine with a network. Built elsewhere, its files "
            "can be copied: their folder is what --corpus-path takes"
        ) from error


def book_files(source: Source, get: Fetch) -> dict[str, bytes]:
    """Files under ``src/`` of a book's repository at its commit, by path; ValueError where the archive cannot be read."""
    data = get(ARCHIVE.format(repository=source.repository, commit=source.commit))
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
            found = {one.name.partition("/")[2]: one for one in archive.getmembers() if one.isfile()}
            wanted = {name: one for name, one in found.items() if name.startswith("src/")}
            # Read in memory, never unpacked: names in an archive are not to be trusted as paths.
            return {name: archive.extractfile(one).read() for name, one in wanted.items()}  # type: ignore[union-attr]
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"the archive of {source.repository} cannot be read ({error}); try again") from error


def wikitext(source: Source, get: Fetch) -> bytes:
    """A text of WikiText-2, unchanged."""
    name = source.split.rpartition("-")[2]
    return get(RAW.format(repository=source.repository, commit=source.commit, name=name))


__all__ = ["Fetch", "book_files", "fetch", "wikitext"]
