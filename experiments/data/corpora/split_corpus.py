"""A corpus whose splits are given, document by document, and the texts that a model is evaluated on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from experiments.data.corpus import Corpus, Document

TRAIN = "train"
#: The split that stands for held-out text in experiments that want many short documents.
HELD_OUT = "heldout"
#: Bytes of a stretch of a held-out document.
STRETCH = 16384


@dataclass(frozen=True)
class SplitDocument(Document):
    """A document whose path begins with its split: ``heldout/the-great-gatsby``."""

    @property
    def split(self) -> str:
        """The split."""
        return self.path.partition("/")[0]

    @property
    def held_out(self) -> bool:
        """Whether it is excluded from training."""
        return self.split != TRAIN


@dataclass(frozen=True)
class SplitCorpus(Corpus):
    """Documents with paths of the form ``split/name``, so that the corpus's hash covers the split.

    `train` are the documents of the split "train". `held_out` are stretches of STRETCH bytes of the documents of "heldout", a
    document each: experiments that take windows of different held-out documents find enough of them. Windows of one book are
    then no independent samples: intervals over windows are of these books, not of English.
    """

    @cached_property
    def train(self) -> tuple[Document, ...]:  # type: ignore[override]
        """The documents that a model is trained on."""
        return tuple(one for one in self.documents if not one.held_out)

    @cached_property
    def held_out(self) -> tuple[Document, ...]:  # type: ignore[override]
        """Stretches of the held-out documents, in order."""
        whole = [one for one in self.documents if one.path.startswith(f"{HELD_OUT}/")]
        return tuple(part for document in whole for part in stretches(document))


def stretches(document: Document) -> Iterator[Document]:
    """A document in pieces of STRETCH bytes, the last one perhaps shorter."""
    for number, start in enumerate(range(0, len(document.data), STRETCH)):
        yield SplitDocument(f"{document.path}/{number:04}", document.data[start : start + STRETCH])


def evaluation_texts(corpus: Corpus) -> dict[str, bytes]:
    """Texts outside of training by name: each document of a SplitCorpus; of any other corpus its held-out files, joined."""
    if isinstance(corpus, SplitCorpus):
        return {one.path: one.data for one in corpus.documents if one.held_out}
    return {"held out": b"".join(one.data + b"\0" for one in corpus.held_out)}


__all__ = ["SplitCorpus", "SplitDocument", "evaluation_texts"]
