"""The corpus `prose`: 85 books in English, seven of them held out, and the validation and test texts of WikiText-2.

The text is not part of the repository. A folder of it has the four files below, from `ao-lab corpus prose --build` or
copied. Their uncompressed texts are compared with the hashes of this record, so rows of the corpus are of one text.
"""

from __future__ import annotations

import hashlib
import lzma
from collections.abc import Callable
from pathlib import Path

from experiments.data.books.assemble import SEPARATOR, build, by_hash, sources
from experiments.data.corpora.record import CorpusRecord, TextFile
from experiments.data.corpora.split_corpus import SplitCorpus, SplitDocument

FILES = (
    TextFile(
        "train.txt.xz",
        "train",
        78,
        77_042_825,
        "9cce2ddadaef7582ae4d74c4ea0cc55968c03a09151ae5d0c4e3cc71b3936e65",
    ),
    TextFile(
        "heldout.txt.xz",
        "heldout",
        7,
        2_451_798,
        "13bda56366431e0ab1e54d347a9f30ec769377be2f5be7d15403eec6287a3f68",
    ),
    TextFile(
        "wikitext2-valid.txt.xz",
        "wikitext2-valid",
        1,
        1_121_681,
        "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
    ),
    TextFile(
        "wikitext2-test.txt.xz",
        "wikitext2-test",
        1,
        1_256_449,
        "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
    ),
)


def read(path: Path | None) -> SplitCorpus:
    """The corpus in a folder; ValueError where a file is missing, cannot be read, or is not the text of the record."""
    if path is None or not path.is_dir():
        raise ValueError(
            f"--corpus-path {path} is no folder; `ao-lab corpus prose` says where the text comes from"
        )
    found = {file.split: checked(path / file.name, file) for file in FILES}
    return SplitCorpus("prose", "1", documents(found))


def checked(path: Path, file: TextFile) -> bytes:
    """The uncompressed text of a file, which is that of the record; ValueError else."""
    if not path.is_file():
        names = ", ".join(one.name for one in FILES)
        raise ValueError(
            f"{path} is missing; a folder of the corpus prose holds {names}; `ao-lab corpus prose --build DIR` makes them"
        )
    try:
        data = lzma.decompress(path.read_bytes())
    except lzma.LZMAError as error:
        raise ValueError(f"{path} is no xz file ({error}); copy it again") from error
    digest = hashlib.sha256(data).hexdigest()
    if digest != file.sha256:
        raise ValueError(
            f"{path} is another text: SHA-256 {digest} of {len(data)} bytes; that of the corpus prose is {file.sha256} of "
            f"{file.bytes}. Copy the file again, or build it by `ao-lab corpus prose --build DIR`"
        )
    return data


def documents(texts: dict[str, bytes]) -> tuple[SplitDocument, ...]:
    """The documents of texts by split, in the files' order, which is that of the hashes of the documents' names."""
    made = []
    for split, data in texts.items():
        names = by_hash([one.document for one in sources() if one.split == split])
        parts = data.split(SEPARATOR)
        made += [SplitDocument(f"{split}/{name}", part) for name, part in zip(names, parts, strict=True)]
    return tuple(made)


def make(folder: Path, step: Callable[[str], None]) -> list[Path]:
    """Fetch, clean and write the corpus into a folder, and read it back."""
    written = build(folder, step=step)
    read(folder)
    return written


CORPUS = CorpusRecord(
    name="prose",
    about=(
        "English prose of 1770 to 1930: 85 books, 79.5 MB, five parts in six fiction; and the validation and test texts of "
        "WikiText-2, which are tokenized Wikipedia."
    ),
    splits={
        "train": "78 books",
        "heldout": "7 other books",
        "wikitext2-valid": "WikiText-2, validation",
        "wikitext2-test": "WikiText-2, test",
    },
    licence="books: public domain in the USA, the editions CC0 1.0; WikiText-2: CC BY-SA",
    origin=(
        "Standard Ebooks (github.com/standardebooks, one repository a book) and pytorch/examples "
        "(word_language_model/data/wikitext-2), at the commits in experiments/data/books/manifest.csv"
    ),
    identity="SHA-256 of each uncompressed file, in the corpus's record",
    read=read,
    files=FILES,
    build=make,
)

__all__ = ["CORPUS", "FILES", "read"]
