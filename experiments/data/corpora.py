"""The corpora by name, a record each: `sympy`, which every installation has, and `prose`, with how it is built.

`prose` is 85 books in English, seven of them held out, and the validation and test texts of WikiText-2. The text is not part of
the repository. A folder of it has the four files below, from `ao-lab corpus prose --build` or copied; their uncompressed texts
are compared with the hashes of the record, so rows of the corpus are of one text.

Building fetches each document, cleans it (markup off, white space and invisible characters normalized, one paragraph after the
other), compares it with its hash and writes the files. The rules are those by which the corpus was made (docs/corpus.md lists
them); where they leave a choice, this module does what agrees with the corpus on the pages that were compared. Nothing but a
`Fetch` touches the network: it takes an address and returns the bytes that lie there, and a test, or a person with a mirror,
replaces it by a function of one's own.
"""

from __future__ import annotations

import csv
import hashlib
import io
import lzma
import posixpath
import re
import tarfile
import unicodedata
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

from experiments.data import corpus
from experiments.data.corpus import DEFAULT, Corpus, CorpusRecord, SplitCorpus, SplitDocument, TextFile


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
    from reference.arrays.namespace import and_nearest

    known = corpora()
    if name not in known:
        near = and_nearest(name, known, cutoff=0.4)
        raise ValueError(
            f"unknown corpus {name!r}{near}; the corpora are {', '.join(known)} (`ao-lab corpus` describes them)"
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


# The documents of the corpus `prose`, as ``books.csv`` lists them: where each comes from, its size, its hash, its split.

PATH = Path(__file__).with_name("books.csv")
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


#: A paragraph of more characters than this that has occurred before is dropped.
REPEATED = 200
#: The line between two documents is a form feed.
SEPARATOR = b"\x0c\n"


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


def build(
    folder: Path,
    get: Fetch = fetch,
    listed: Sequence[Source] | None = None,
    step: Callable[[str], None] = lambda word: None,
) -> list[Path]:
    """Write the files of the corpus into a folder; returns their paths.

    get: see `download`. listed: the documents, by default those of the manifest. step: called with the name of each
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
        raise ValueError("the manifest's held-out books are not those that the rule takes; restore books.csv")


def files(texts: Mapping[str, bytes], listed: Sequence[Source]) -> dict[str, bytes]:
    """The content of each file by the name of its split."""
    made = {}
    for split in dict.fromkeys((TRAIN, HELD_OUT, *(one.split for one in listed))):
        names = by_hash([one.document for one in listed if one.split == split])
        made[split] = SEPARATOR.join(texts[name] for name in names)
    return made


Fetch = Callable[[str], bytes]

ARCHIVE = "https://github.com/{repository}/archive/{commit}.tar.gz"
RAW = "https://raw.githubusercontent.com/{repository}/{commit}/word_language_model/data/wikitext-2/{name}.txt"
#: Seconds without an answer after which a server counts as unreachable.
TIMEOUT = 60.0


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


# Which files of a book of Standard Ebooks are its body, in reading order.

#: The package document (EPUB 3) of a repository of Standard Ebooks.
PACKAGE = "src/epub/content.opf"
EPUB_TYPE = "{http://www.idpf.org/2007/ops}type"
#: What is left out wherever a file calls itself so, in words of the EPUB 3 Structural Semantics Vocabulary.
LEFT_OUT = frozenset(
    (
        *("titlepage", "halftitlepage", "imprint", "colophon", "copyright-page", "toc", "loi", "lot"),
        *("dedication", "epigraph", "foreword", "preface", "introduction", "acknowledgments"),
        *("endnotes", "footnotes", "rearnotes", "afterword", "appendix", "glossary", "bibliography", "index"),
    )
)


def body_files(files: Mapping[str, bytes]) -> list[str]:
    """Paths of the files that are body matter, in the order of the package document's spine.

    files: contents of a repository by path. ValueError without a package document, or where it lists a file that is not there.
    """
    if PACKAGE not in files:
        raise ValueError(
            f"a book of Standard Ebooks has a file {PACKAGE}, got {sorted(files)[:5]} and others"
        )
    listed = [posixpath.normpath(f"{posixpath.dirname(PACKAGE)}/{href}") for href in spine(files[PACKAGE])]
    missing = [path for path in listed if path not in files]
    if missing:
        raise ValueError(f"{PACKAGE} lists {missing[0]}, which the book does not have; fetch it again")
    return [path for path in listed if is_body(files[path])]


def spine(package: bytes) -> Iterator[str]:
    """References to the files of a package document, in reading order."""
    root = ElementTree.fromstring(package)
    places = {item.get("id"): item.get("href") for item in root.iterfind(".//{*}item")}
    for item in root.iterfind(".//{*}itemref"):
        href = places.get(item.get("idref"))
        if href:
            yield href


def is_body(page: bytes) -> bool:
    """Whether a page is body matter: its body says so, and its outermost section is none of LEFT_OUT."""
    body = ElementTree.fromstring(page).find("{*}body")
    if body is None or "bodymatter" not in types(body):
        return False
    return not any(LEFT_OUT & types(section) for section in body)


def types(element: ElementTree.Element) -> set[str]:
    """The words of an element's `epub:type`."""
    return set(element.get(EPUB_TYPE, "").split())


HEADINGS = frozenset(f"h{level}" for level in range(1, 7))
#: Elements that begin and end a paragraph.
BLOCKS = HEADINGS | frozenset(
    (
        *("address", "article", "aside", "blockquote", "body", "dd", "div", "dl", "dt", "footer", "header"),
        *("hgroup", "hr", "li", "ol", "p", "section", "table", "tbody", "thead", "tr", "ul"),
    )
)
#: Elements that are dropped with all they hold.
DROPPED = frozenset(("audio", "caption", "figcaption", "figure", "hr", "img", "math", "svg", "video"))
#: Word joiner, zero-width spaces and joiners, hair space, soft hyphen.
INVISIBLE = dict.fromkeys((0x2060, 0x200B, 0x200C, 0x200D, 0xFEFF, 0x200A, 0x00AD))
NON_BREAKING_HYPHEN = 0x2011
#: A heading that is only a number, perhaps after the name of a part.
NUMBER = re.compile(
    r"(?:(?:book|canto|chapter|letter|part|section|volume)\s+)?(?:[ivxlcdm]+|\d{1,3})\.?", re.IGNORECASE
)
#: Breaks of lines inside a paragraph, until white space is normalized.
BREAK = "\x00"


def paragraphs(page: bytes) -> list[str]:
    """The paragraphs of one page (XHTML); a line break in one is a line of verse or of an address."""
    body = ElementTree.fromstring(page).find("{*}body")
    if body is None:
        return []
    return [text for is_heading, text in blocks(body) if text and not (is_heading and NUMBER.fullmatch(text))]


def blocks(root: ElementTree.Element) -> Iterator[tuple[bool, str]]:
    """Paragraphs under an element, each with whether it is a heading."""
    pieces: list[str] = []
    heading = False
    for kind, value in events(root):
        if kind == "text":
            pieces.append(value)
            continue
        if pieces:
            yield heading, normalized("".join(pieces))
        pieces, heading = [], kind == "begin" and value in HEADINGS


def events(element: ElementTree.Element, parent: str = "") -> Iterator[tuple[str, str]]:
    """What is read in order: ("text", piece), and ("begin" or "end", name of a block)."""
    name = local_name(element)
    if is_dropped(element, name):
        return
    if name == "br":
        yield "text", BREAK
        return
    # A citation under a quotation is a paragraph of its own, one inside a sentence is not.
    is_block = name in BLOCKS or (name == "cite" and parent in BLOCKS - HEADINGS - {"p"})
    if is_block:
        yield "begin", name
    # Cells of a dialogue's row are one paragraph.
    yield from [("text", " ")] if name in ("td", "th") else []
    yield "text", element.text or ""
    for child in element:
        yield from events(child, name)
        yield "text", child.tail or ""
    if is_block:
        yield "end", name


def is_dropped(element: ElementTree.Element, name: str) -> bool:
    """Whether an element is left out: illustrations, formulas, rules, note marks, and tables that are no dialogue."""
    if name in DROPPED or "noteref" in types(element):
        return True
    return name == "table" and not any("z3998:persona" in types(cell) for cell in element.iter())


def local_name(element: ElementTree.Element) -> str:
    """The name of an element without its namespace; nothing for comments and processing instructions."""
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""


def normalized(text: str) -> str:
    """Unicode NFC, without invisible characters; each run of white space is one space, each break one line feed."""
    text = unicodedata.normalize("NFC", text).translate({**INVISIBLE, NON_BREAKING_HYPHEN: "-"})
    text = re.sub(r"\s+", " ", text)
    return re.sub(rf"[ {BREAK}]*{BREAK}[ {BREAK}]*", "\n", text).strip()


PROSE = CorpusRecord(
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
        "(word_language_model/data/wikitext-2), at the commits in experiments/data/books.csv"
    ),
    identity="SHA-256 of each uncompressed file, in the corpus's record",
    read=read,
    files=FILES,
    build=make,
)
