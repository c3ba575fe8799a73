"""The corpus that a run was given by name and folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.data.corpora.record import DEFAULT, corpus_record, load
from experiments.data.corpus import Corpus
from experiments.harness.registry import EXPERIMENTS, chosen


def text_for(tables: Sequence[str] | None, name: str = DEFAULT, path: Path | None = None) -> Corpus | None:
    """The corpus `name`, read from the folder `path`; None for the default, which is read when it is needed.

    ValueError for unknown names of experiments or corpora, for experiments of which none uses a corpus, and for a folder that
    does not hold the corpus.
    """
    corpus_record(name)
    if name == DEFAULT and path is None:
        return None
    names = chosen(tables)
    if not any(EXPERIMENTS[one].trained for one in names):
        using = ", ".join(one for one, experiment in EXPERIMENTS.items() if experiment.trained)
        raise ValueError(f"{', '.join(names)}: no corpus is used there, but by {using}; leave --corpus out")
    return load(name, path)


__all__ = ["text_for"]
