"""The text of a book's pages: markup off, white space and invisible characters normalized, one paragraph after the other.

The rules are those by which the corpus `prose` was made (docs/GUIDE.md lists them). Where they leave a choice, this module does
what agrees with the corpus on the pages that were compared; the hash of each document decides (`books.assemble`).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from xml.etree import ElementTree

from experiments.data.books.reading_order import types

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


__all__ = ["normalized", "paragraphs"]
