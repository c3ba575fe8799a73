"""Real text that every installation has: the source of sympy, which torch itself installs.

The corpus is every ``.py`` file of the installed sympy outside its ``tests`` and ``benchmarks`` folders (those are long
lists of expressions and numbers rather than text). The hash of its path decides whether a file is held out; the split
is by file, so no held-out file is seen in training, and it does not depend on the order of the listing, on the machine,
or on what other files a version of sympy has. Rows name the corpus they come from (`Corpus.name`), because another
version of sympy is another corpus.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from ao_lab.eval import SKIPPED, held_out

# A corpus whose splits are given, document by document, and the texts that a model is evaluated on.

TRAIN = "train"
#: The split that stands for held-out text in experiments that want many short documents.
HELD_OUT = "heldout"
#: Bytes of a stretch of a held-out document.
STRETCH = 16384


@dataclass(frozen=True)
class Document:
    """One file: its path inside the package, with forward slashes, and its bytes."""

    path: str
    data: bytes

    @property
    def held_out(self) -> bool:
        """Whether the file is excluded from training: a tenth of all paths, by hash."""
        return held_out(self.path)


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
class Corpus:
    """Documents in the order of their paths, and where they come from."""

    source: str
    version: str
    documents: tuple[Document, ...]

    @property
    def train(self) -> tuple[Document, ...]:
        """The documents that a model is trained on."""
        return tuple(document for document in self.documents if not document.held_out)

    @property
    def held_out(self) -> tuple[Document, ...]:
        """The documents that a model is evaluated on."""
        return tuple(document for document in self.documents if document.held_out)

    @cached_property
    def sha256(self) -> str:
        """Hash over the paths and contents of all documents."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(f"{document.path}\0{len(document.data)}\0".encode())
            digest.update(document.data)
        return digest.hexdigest()

    @property
    def name(self) -> str:
        """Short name in rows, for instance sympy-1.14.0-1a2b3c4d."""
        return f"{self.source}-{self.version}-{self.sha256[:8]}"

    def describe(self) -> dict[str, object]:
        """Facts for a report: version, hash, sizes of both parts, and the file list of the held-out part."""
        return {
            "name": self.name,
            "source": self.source,
            "version": self.version,
            "sha256": self.sha256,
            "files": len(self.documents),
            "train_bytes": sum(len(document.data) for document in self.train),
            "held_out_bytes": sum(len(document.data) for document in self.held_out),
            "train_files": [document.path for document in self.train],
            "held_out_files": [document.path for document in self.held_out],
        }


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


@lru_cache(maxsize=1)
def load() -> Corpus:
    """The corpus of the installed sympy; ValueError where it is missing, with what to do."""
    spec = importlib.util.find_spec("sympy")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            "the experiments train on the source of sympy, and sympy is not installed; "
            "torch normally brings it: run `pip install sympy`, or `make reproduce`, which sets everything up"
        )
    return from_folder(Path(spec.submodule_search_locations[0]), "sympy", importlib.metadata.version("sympy"))


def from_folder(root: Path, source: str, version: str) -> Corpus:
    """All Python files under a folder, as a corpus; ValueError where there are none."""
    documents = tuple(_documents(root))
    if not documents:
        raise ValueError(f"{root} holds no .py files outside {sorted(SKIPPED)}; reinstall {source}")
    return Corpus(source=source, version=version, documents=documents)


def _documents(root: Path) -> Iterable[Document]:
    paths = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    for path in paths:
        if not SKIPPED.intersection(path.split("/")):
            data = (root / path).read_bytes().replace(b"\r\n", b"\n")
            if data:
                yield Document(path, data)


#: What every installation has.
DEFAULT = "sympy"


@dataclass(frozen=True)
class TextFile:
    """A file of a corpus: its split, how many documents it has, bytes and SHA-256 of its uncompressed text."""

    name: str
    split: str
    documents: int
    bytes: int
    sha256: str


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
