"""The corpus `prose` from its sources: each document fetched, cleaned and compared with its hash, then written in files."""

from __future__ import annotations

import hashlib
import lzma
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from experiments.data.books.cleaning import paragraphs
from experiments.data.books.download import Fetch, book_files, fetch, wikitext
from experiments.data.books.manifest import HELD_OUT, TRAIN, Source, by_hash, held_out, sources
from experiments.data.books.reading_order import body_files

#: A paragraph of more characters than this that has occurred before is dropped.
REPEATED = 200
#: The line between two documents is a form feed.
SEPARATOR = b"\x0c\n"


def build(
    folder: Path,
    get: Fetch = fetch,
    listed: Sequence[Source] | None = None,
    step: Callable[[str], None] = lambda word: None,
) -> list[Path]:
    """Write the files of the corpus into a folder; returns their paths.

    get: see `books.download`. listed: the documents, by default those of the manifest. step: called with the name of each
    document that was read. ValueError, and no file, where a source cannot be fetched or a text is not the manifest's.
    """
    listed = sources() if listed is None else listed
    texts = cleaned(listed, get, step)
    check(texts, listed)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for split, data in files(texts, listed).items():
        path = folder / f"{split}.txt.xz"
        path.write_bytes(lzma.compress(data, preset=6))
        written.append(path)
    return written


def cleaned(listed: Sequence[Source], get: Fetch, step: Callable[[str], None]) -> dict[str, bytes]:
    """The text of each document, by name. Books are read in alphabetical order: the first of two equal paragraphs stays."""
    seen: set[str] = set()
    texts = {}
    for source in sorted(listed, key=lambda one: one.document):
        texts[source.document] = (
            book_text(book_files(source, get), seen) if source.is_book else wikitext(source, get)
        )
        step(source.document)
    return texts


def book_text(pages: Mapping[str, bytes], seen: set[str]) -> bytes:
    """The text of a book, of its files by path. `seen`: long paragraphs of the books before it, to which its own are added."""
    kept = []
    for path in body_files(pages):
        for paragraph in paragraphs(pages[path]):
            if len(paragraph) > REPEATED:
                if paragraph in seen:
                    continue
                seen.add(paragraph)
            kept.append(paragraph)
    return ("\n\n".join(kept) + "\n").encode()


def check(texts: Mapping[str, bytes], listed: Sequence[Source]) -> None:
    """ValueError where texts are not those of the manifest, or the split of the books is not that of the rule."""
    wrong = [one for one in listed if hashlib.sha256(texts[one.document]).hexdigest() != one.sha256]
    if wrong:
        first = wrong[0]
        raise ValueError(
            f"{len(wrong)} of {len(listed)} documents differ from the manifest, the first is {first.document}: "
            f"{len(texts[first.document])} bytes, {first.bytes} are listed. Nothing was written, as it would be another text. "
            f"All of them: {', '.join(one.document for one in wrong)}"
        )
    sizes = {one.document: one.bytes for one in listed if one.is_book}
    if held_out(sizes) != {one.document for one in listed if one.split == HELD_OUT}:
        raise ValueError(
            "the manifest's held-out books are not those that the rule takes; restore manifest.csv"
        )


def files(texts: Mapping[str, bytes], listed: Sequence[Source]) -> dict[str, bytes]:
    """The content of each file by the name of its split."""
    made = {}
    for split in dict.fromkeys((TRAIN, HELD_OUT, *(one.split for one in listed))):
        names = by_hash([one.document for one in listed if one.split == split])
        made[split] = SEPARATOR.join(texts[name] for name in names)
    return made


__all__ = ["SEPARATOR", "book_text", "build", "files"]
