"""The corpora: a record each, all of which `corpora` names.

A record says what a corpus is, which splits and files it has, how they are identified, how they are read, where they come from,
and how they are built.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from experiments.data import corpus
from experiments.data.corpus import Corpus


def read_sympy(path: Path | None) -> Corpus:
    """The source of the installed sympy."""
    return corpus.load()


#: What every installation has.
DEFAULT = "sympy"


@dataclass(frozen=True, kw_only=True)
class CorpusRecord:
    """What a corpus says of itself.

    about: what the text is. splits: what each holds, by name. licence, origin: of the text, and where it comes from. identity:
    what says which text it is. files: those that a folder of it holds; none where every installation has the text. read: the
    corpus in such a folder (None where there are no files); ValueError where it is not the text of this record. build: writes
    those files into a folder and calls a function after each document; None where there is nothing to build.
    """

    name: str
    about: str
    splits: Mapping[str, str]
    licence: str
    origin: str
    identity: str
    read: Callable[[Path | None], Corpus]
    files: tuple[TextFile, ...] = ()
    build: Callable[[Path, Callable[[str], None]], list[Path]] | None = None

    def describe(self) -> dict[str, Any]:
        """The record as plain data."""
        return {
            **{name: getattr(self, name) for name in ("name", "about", "licence", "origin", "identity")},
            "splits": dict(self.splits),
            "files": [vars(one) for one in self.files],
            "default": self.name == DEFAULT,
            "can_be_built": self.build is not None,
        }


SYMPY = CorpusRecord(
    name="sympy",
    about="The source of the installed sympy, without its tests and benchmarks: Python, 16 MB in sympy 1.14.",
    splits={"train": "nine files in ten, by the hash of their paths", "held out": "the others"},
    licence="BSD-3-Clause",
    origin="Every installation has it: torch requires sympy.",
    identity="SHA-256 over paths and contents; its first digits and sympy's version are in the corpus's name",
    read=read_sympy,
)


@dataclass(frozen=True)
class TextFile:
    """A file of a corpus: its split, how many documents it has, bytes and SHA-256 of its uncompressed text."""

    name: str
    split: str
    documents: int
    bytes: int
    sha256: str


@cache
def corpora() -> dict[str, CorpusRecord]:
    """All records by name, the default first."""
    from experiments.data.books import PROSE

    return {one.name: one for one in (SYMPY, PROSE)}


def corpus_record(name: str) -> CorpusRecord:
    """The record of a name; ValueError with the nearest and all names for an unknown one."""
    known = corpora()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"the nearest is {near[0]}; " if near else ""
        raise ValueError(
            f"unknown corpus {name!r}; {hint}the corpora are {', '.join(known)} (`ao-lab corpus` describes them)"
        )
    return known[name]


def load(name: str = DEFAULT, path: Path | None = None) -> Corpus:
    """The corpus of a name, in the folder `path` where it has files.

    ValueError for an unknown name, for a folder that is missing, not wanted, or holds another text.
    """
    record = corpus_record(name)
    if path is None and record.files:
        raise ValueError(
            f"the corpus {name} is a folder of files: give it by --corpus-path (`ao-lab corpus {name}` says where the text "
            "comes from and how to build it)"
        )
    if path is not None and not record.files:
        raise ValueError(
            f"the corpus {name} is what is installed and takes no folder; leave --corpus-path out"
        )
    return record.read(path)
