"""Text of others in Markdown and in YAML: names in files say what they are, and add nothing to the page around them."""

from __future__ import annotations

import json
import re
import unicodedata

LONGEST, LONGEST_NOTE = 200, 2000
#: What begins a link, an image, HTML, code, emphasis or a cell in running text.
ACTIVE = re.compile(r"([\\`<>\[\]|])")
#: Values that YAML reads as text, a list or an address, on one line.
PLAIN_VALUE = re.compile(r"[A-Za-z0-9](?:[\w./@+~=?&%-]|:(?=[^\s:]))*", re.ASCII)
ITEM = r"""(?:\w[\w.-]*|"[\w .-]*"|'[\w .-]*')"""
PLAIN_LIST = re.compile(rf"\[ ?(?:{ITEM}(?: ?, ?{ITEM})*)? ?\]", re.ASCII)


def one_line(text: object, longest: int = LONGEST) -> str:
    """A text on one line, without control and formatting characters, cut where it is long."""
    letters = (c if unicodedata.category(c)[0] != "C" else " " for c in str(text)[: longest + 1])
    plain = " ".join("".join(letters).split())
    return plain if len(str(text)) <= longest else plain[:longest] + "..."


def span(text: object) -> str:
    """A code span; backticks are left out, so that it ends where the text does."""
    return f"`{one_line(text).replace('`', '')}`"


def prose(text: object) -> str:
    """Running text, on one line: links, HTML, code and cells in it are letters."""
    return ACTIVE.sub(r"\\\1", one_line(text))


def note(text: object) -> str:
    """A sentence of ours that names things of others: its code spans stay, HTML and links are letters."""
    return re.sub(r"([<\[\]])", r"\\\1", one_line(text, LONGEST_NOTE))


def yaml_line(line: str) -> str:
    """A `name: value` line of a front matter: simple values as they are, others as JSON strings, which are YAML."""
    name, _, value = line.partition(":")
    value = value.strip()
    if len(value) <= LONGEST and (PLAIN_VALUE.fullmatch(value) or PLAIN_LIST.fullmatch(value)):
        return f"{name}: {value}"
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
    return f"{name}: {json.dumps(one_line(value[1:-1] if quoted else value))}"


__all__ = ["note", "one_line", "prose", "span", "yaml_line"]
