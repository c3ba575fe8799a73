"""The corpus from small archives, and what is refused: another text, no network."""

import lzma
import urllib.error
from dataclasses import replace

import pytest

from experiments.data import books as assemble
from experiments.data.books import (
    HELD_OUT,
    body_files,
    by_hash,
    held_out,
    normalized,
    paragraphs,
    sources,
)
from tests.experiments.data.books.small_book import CHAPTER, LONG, TEXT, archive, book, page, source

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
