"""Which pages of a book are its body, and in which order."""

import pytest

from experiments.data.books.reading_order import body_files
from tests.experiments.data.books.small_book import book, page


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
