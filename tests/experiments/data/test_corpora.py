"""Corpora by name: found, read, identified, and refused with what to do."""

import hashlib
import importlib.util
import lzma
import urllib.error
from dataclasses import replace

import pytest

from ao_lab.eval import NAMED
from experiments.data import corpora, corpus
from experiments.data import corpora as assemble
from experiments.data.corpora import HELD_OUT, body_files, by_hash, held_out, normalized, paragraphs, sources
from experiments.data.corpus import STRETCH, Document, TextFile, evaluation_texts, from_folder
from tests.experiments.data.small_book import CHAPTER, LONG, TEXT, archive, book, page, source
from tests.experiments.harness import tiny

# The corpus: split by file, the same everywhere, a clear error where there is none.


def test_the_parts_are_disjoint_and_complete():
    made = tiny.corpus()
    train, held_out = ({document.path for document in part} for part in (made.train, made.held_out))
    assert not train & held_out
    assert train | held_out == {document.path for document in made.documents}
    assert held_out


def test_the_split_does_not_depend_on_other_files():
    assert Document("core/add.py", b"").held_out == Document("core/add.py", b"longer").held_out
    share = sum(Document(f"file{number}.py", b"").held_out for number in range(2000)) / 2000
    assert 0.08 < share < 0.12


def test_a_folder_is_read_without_its_tests(tmp_path):
    for name in (
        "b.py",
        "a.py",
        "tests/test_a.py",
        "core/tests/x.py",
        "core/benchmarks/y.py",
        "core/c.py",
        "notes.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x = 1\r\n")
    made = from_folder(tmp_path, "made", "1")
    assert [document.path for document in made.documents] == ["a.py", "b.py", "core/c.py"]
    assert made.documents[0].data == b"x = 1\n"
    assert made.name == f"made-1-{made.sha256[:8]}"
    (tmp_path / "a.py").write_text("x = 2\n")
    assert from_folder(tmp_path, "made", "1").sha256 != made.sha256


def test_an_empty_folder_and_a_missing_sympy_say_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="reinstall made"):
        from_folder(tmp_path, "made", "1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    corpus.load.cache_clear()
    with pytest.raises(ValueError, match="pip install sympy"):
        corpus.load()
    corpus.load.cache_clear()


def test_the_description_lists_every_file():
    described = tiny.corpus().describe()
    assert len(described["train_files"]) + len(described["held_out_files"]) == described["files"]
    assert described["sha256"] == tiny.corpus().sha256


# The corpus from small archives, and what is refused: another text, no network.

# Which pages of a book are its body, and in which order.


def test_body_matter_in_the_order_of_the_spine():
    text = "<p>x</p>"
    files = book(
        titlepage=page(text, "frontmatter", "titlepage"),
        z=page(text),
        a=page(text, section="part"),
        introduction=page(text, section="introduction"),
        appendix=page(text, section="appendix"),
        endnotes=page(text, "backmatter", "endnotes"),
        frontispiece=page(text, "frontmatter", "chapter"),
    )
    assert body_files(files) == ["src/epub/text/z.xhtml", "src/epub/text/a.xhtml"]


def test_a_book_without_its_parts_is_refused():
    with pytest.raises(ValueError, match=r"content\.opf, got \['README'\]"):
        body_files({"README": b""})
    files = book(one=page("<p>x</p>"))
    files.pop("src/epub/text/one.xhtml")
    with pytest.raises(ValueError, match=r"lists src/epub/text/one\.xhtml"):
        body_files(files)


# Pages of books: one of every rule, and the choices that the corpus itself shows.


def test_every_rule_on_one_page():
    assert paragraphs(page(CHAPTER)) == TEXT


@pytest.mark.parametrize(
    ("heading", "kept"),
    [
        ("IV", False),
        ("12", False),
        ("Chapter <span>IV</span>", False),
        ("Letter I", False),
        ("Lecture I", True),
        ("Article II", True),
        ("Book the First", True),
        ("1805", True),
        ("Chapter the Last", True),
    ],
)
def test_headings_that_are_only_a_number_are_dropped(heading, kept):
    assert bool(paragraphs(page(f"<h2>{heading}</h2>"))) == kept
    assert paragraphs(page(f"<p>{heading}</p>")) != []


def test_a_citation_under_a_quotation_is_a_paragraph_and_one_in_a_sentence_is_not():
    quotation = "<blockquote>Some words. <cite>Anon</cite></blockquote>"
    assert paragraphs(page(quotation)) == ["Some words.", "Anon"]
    assert paragraphs(page("<p>As <cite>Anon</cite> says.</p>")) == ["As Anon says."]


def test_white_space_and_breaks():
    assert normalized("  a\t\n b \x00 \x00c ") == "a b\nc"
    assert normalized("e\u0301\u200b\ufeff \u2011") == "\u00e9 -"
    quoted = "\u201cYes\u2014no\u2026\u201d"
    assert normalized(quoted) == quoted


def test_text_around_blocks_is_a_paragraph():
    assert paragraphs(page("<blockquote>One <i>two</i><p>three</p> four</blockquote>")) == [
        "One two",
        "three",
        "four",
    ]


FIRST = ("\n\n".join(TEXT) + "\n").encode()
SECOND = b"Only this.\n"
WIKI = b" \n = Homarus = \n"
LISTED = [
    source("a_first", FIRST),
    source("b_second", SECOND),
    source("wikitext2-test", WIKI, "wikitext2-test"),
]


def serve(address):
    """The network: two books, the second of which repeats a long paragraph of the first, and a text."""
    books = {
        "a_first": book(one=page(CHAPTER)),
        "b_second": book(one=page(f"<p>{LONG}</p><p>Only this.</p>")),
    }
    for name, files in books.items():
        if address == f"https://github.com/standardebooks/{name}/archive/abc.tar.gz":
            return archive(files)
    assert address.endswith("/pytorch/examples/abc/word_language_model/data/wikitext-2/test.txt")
    return WIKI


def test_files_are_built_from_sources(tmp_path):
    steps = []
    written = assemble.build(tmp_path / "out", serve, LISTED, steps.append)
    assert steps == ["a_first", "b_second", "wikitext2-test"]
    found = {path.name: lzma.decompress(path.read_bytes()) for path in written}
    texts = {"a_first": FIRST, "b_second": SECOND}
    one, two = by_hash(list(texts))
    assert found["train.txt.xz"] == texts[one] + b"\x0c\n" + texts[two]
    assert found["wikitext2-test.txt.xz"] == WIKI


def test_another_text_is_not_written(tmp_path):
    listed = [replace(LISTED[0], sha256="0" * 64), *LISTED[1:]]
    with pytest.raises(ValueError, match=rf"1 of 3 documents differ.*a_first: {len(FIRST)} bytes"):
        assemble.build(tmp_path / "out", serve, listed)
    assert not (tmp_path / "out").exists()


def test_another_split_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not those that the rule takes"):
        assemble.build(tmp_path, serve, [replace(LISTED[0], split=HELD_OUT), *LISTED[1:]])


def test_without_a_network_it_says_so(monkeypatch):
    def unreachable(address, timeout):
        raise urllib.error.URLError("no route")

    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    with pytest.raises(ValueError, match=r"cannot be fetched .*no route.*--corpus-path"):
        assemble.fetch("https://example.org/x")
    with pytest.raises(ValueError, match="archive of standardebooks/a_first cannot be read"):
        assemble.book_files(LISTED[0], lambda address: b"no archive")


def test_books_of_the_right_size_are_held_out_until_there_are_enough():
    """Of 100 MB: 2.8 MB are enough, 3.2 too many."""
    kilobytes = {99: False, 601: False, 600: True, 599: True, 598: True, 597: True}
    # 2.394 MB so far; 2.694; 3.294 is too many; 2.844 is enough.
    kilobytes |= {300: True, 596: False, 150: True, 100: False}
    names = by_hash([f"book{number}" for number in range(len(kilobytes))])
    sizes = {name: 1000 * size for name, size in zip(names, kilobytes, strict=True)}
    sizes["rest"] = 100_000_000 - sum(sizes.values())
    expected = {name for name, taken in zip(names, kilobytes.values(), strict=True) if taken}
    assert held_out(sizes) == expected


def test_the_rule_gives_the_manifests_split():
    books = [one for one in sources() if one.is_book]
    assert len(books) == 85
    assert held_out({one.document: one.bytes for one in books}) == {
        one.document for one in books if one.split == HELD_OUT
    }
    assert len({(one.repository, one.commit) for one in sources()}) == 86


TEXTS = {
    "train": b"one\n\x0c\ntwo\n",
    "heldout": b"x" * STRETCH + b"tail\n",
    "wikitext2-valid": b"valid\n",
    "wikitext2-test": b"test\n",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of a small corpus of the form of `prose`, whose record has its hashes."""
    names = {"train": ["b", "a"], "heldout": ["h"]}
    monkeypatch.setattr(assemble, "by_hash", lambda listed: names.get(listed[0].split, ["w"]))
    monkeypatch.setattr(assemble, "sources", lambda: [FakeSource(split) for split in TEXTS])
    monkeypatch.setattr(FakeSource, "document", property(lambda self: self), raising=False)
    made = []
    for split, text in TEXTS.items():
        (tmp_path / f"{split}.txt.xz").write_bytes(lzma.compress(text))
        digest = hashlib.sha256(text).hexdigest()
        made.append(TextFile(f"{split}.txt.xz", split, 1, len(text), digest))
    monkeypatch.setattr(assemble, "FILES", tuple(made))
    return tmp_path


class FakeSource:
    def __init__(self, split):
        self.split = split


def test_corpora_are_found_by_their_records(monkeypatch):
    assert list(corpora.corpora()) == ["sympy", "prose"]
    monkeypatch.setattr("experiments.data.corpus.load", tiny.corpus)
    assert corpora.load() is tiny.corpus()
    assert sum(one.bytes for one in assemble.PROSE.files) == 81_872_753


def test_splits_are_those_of_the_files(folder):
    made = corpora.load("prose", folder)
    assert [one.path for one in made.train] == ["train/b", "train/a"]
    assert [one.data for one in made.train] == [b"one\n", b"two\n"]
    assert [(one.path, len(one.data)) for one in made.held_out] == [
        ("heldout/h/0000", STRETCH),
        ("heldout/h/0001", 5),
    ]
    assert list(evaluation_texts(made)) == ["heldout/h", "wikitext2-valid/w", "wikitext2-test/w"]
    assert made.name == f"prose-1-{made.sha256[:8]}"
    assert list(evaluation_texts(tiny.corpus())) == ["held out"]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("train", lambda path: path.unlink(), r"train\.txt\.xz is missing; .*--build DIR"),
        ("heldout", lambda path: path.write_bytes(b"text"), r"heldout\.txt\.xz is no xz file"),
        (
            "wikitext2-test",
            lambda path: path.write_bytes(lzma.compress(b"Test\n")),
            r"test\.txt\.xz is another text: SHA-256 \w{64} of 5 bytes.* of 5\. Copy",
        ),
    ],
)
def test_another_text_is_refused(folder, name, change, message):
    change(folder / f"{name}.txt.xz")
    with pytest.raises(ValueError, match=message):
        corpora.load("prose", folder)


def test_wrong_names_and_folders_say_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="nearest is prose; the corpora are sympy, prose"):
        corpora.load("pros")
    with pytest.raises(ValueError, match="--corpus-path"):
        corpora.load("prose")
    with pytest.raises(ValueError, match=r"gone is no folder"):
        corpora.load("prose", tmp_path / "gone")
    with pytest.raises(ValueError, match="leave --corpus-path out"):
        corpora.load("sympy", tmp_path)


def test_texts_that_ao_lab_eval_names_are_those_of_the_corpus():
    """`ao_lab` imports nothing of here, so it has the name and hash of the file again."""
    held = {
        (corpus, file.name, file.sha256)
        for corpus in corpora.corpora()
        for file in corpora.corpora()[corpus].files
    }
    assert {(one.corpus, one.file, one.sha256) for one in NAMED.values()} <= held
