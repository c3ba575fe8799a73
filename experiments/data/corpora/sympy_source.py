"""The corpus `sympy`: Python source that every installation has."""

from __future__ import annotations

from pathlib import Path

from experiments.data import corpus
from experiments.data.corpora.record import CorpusRecord
from experiments.data.corpus import Corpus


def read(path: Path | None) -> Corpus:
    """The source of the installed sympy."""
    return corpus.load()


CORPUS = CorpusRecord(
    name="sympy",
    about="The source of the installed sympy, without its tests and benchmarks: Python, 16 MB in sympy 1.14.",
    splits={"train": "nine files in ten, by the hash of their paths", "held out": "the others"},
    licence="BSD-3-Clause",
    origin="Every installation has it: torch requires sympy.",
    identity="SHA-256 over paths and contents; its first digits and sympy's version are in the corpus's name",
    read=read,
)

__all__ = ["CORPUS", "read"]
