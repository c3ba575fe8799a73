"""The corpora by name: a record each."""

from __future__ import annotations

import difflib
from functools import cache
from pathlib import Path

from experiments.data import corpus
from experiments.data.books import PROSE
from experiments.data.corpus import DEFAULT, Corpus, CorpusRecord


def read_sympy(path: Path | None) -> Corpus:
    """The source of the installed sympy."""
    return corpus.load()


SYMPY = CorpusRecord(
    name="sympy",
    about="The source of the installed sympy, without its tests and benchmarks: Python, 16 MB in sympy 1.14.",
    splits={"train": "nine files in ten, by the hash of their paths", "held out": "the others"},
    licence="BSD-3-Clause",
    origin="Every installation has it: torch requires sympy.",
    identity="SHA-256 over paths and contents; its first digits and sympy's version are in the corpus's name",
    read=read_sympy,
)


@cache
def corpora() -> dict[str, CorpusRecord]:
    """All records by name, the default first."""
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
