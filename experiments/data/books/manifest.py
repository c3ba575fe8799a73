"""The documents of the corpus `prose`, as ``manifest.csv`` lists them: where each comes from, its size, its hash, its split."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PATH = Path(__file__).with_name("manifest.csv")
#: The split of a book is one of these two.
TRAIN, HELD_OUT = "train", "heldout"
#: Bytes of a book that may be held out, and the share of all bytes at which there are enough, and at which too many.
HELD_OUT_BYTES = range(100_000, 600_001)
ENOUGH, TOO_MANY = 0.028, 0.032


@dataclass(frozen=True)
class Source:
    """One document. `sha256` and `bytes` are of its cleaned text in UTF-8; `commit` is that of its GitHub `repository`."""

    document: str
    repository: str
    commit: str
    licence: str
    bytes: int
    sha256: str
    split: str

    @property
    def is_book(self) -> bool:
        """Whether it is a book of Standard Ebooks; else it is a file of WikiText-2."""
        return self.split in (TRAIN, HELD_OUT)


@cache
def sources() -> tuple[Source, ...]:
    """All documents in alphabetical order of their names."""
    with PATH.open(newline="", encoding="utf-8") as file:
        made = [Source(**{**row, "bytes": int(row["bytes"])}) for row in csv.DictReader(file)]
    return tuple(sorted(made, key=lambda one: one.document))


def by_hash(documents: Sequence[str]) -> list[str]:
    """Names in the order of their SHA-256, which is the order of documents in a file."""
    return sorted(documents, key=lambda name: hashlib.sha256(name.encode()).hexdigest())


def held_out(sizes: dict[str, int]) -> set[str]:
    """Names of the books that are held out, of books by name with the bytes of their texts.

    In the order of the names' hashes a book of HELD_OUT_BYTES is taken until the share ENOUGH of all bytes is reached; one that
    would exceed TOO_MANY is passed over.
    """
    total, taken, names = sum(sizes.values()), 0, set()
    for name in by_hash(list(sizes)):
        if taken >= ENOUGH * total:
            break
        if sizes[name] in HELD_OUT_BYTES and taken + sizes[name] <= TOO_MANY * total:
            taken += sizes[name]
            names.add(name)
    return names


__all__ = ["HELD_OUT", "TRAIN", "Source", "by_hash", "held_out", "sources"]
