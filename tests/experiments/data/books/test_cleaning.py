"""Pages of books: one of every rule, and the choices that the corpus itself shows."""

import pytest

from experiments.data.books.cleaning import normalized, paragraphs
from tests.experiments.data.books.small_book import CHAPTER, TEXT, page


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
