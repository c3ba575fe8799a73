"""Texts as pages show them: marks of Markdown as HTML, long sentences as a lead and a list."""

from __future__ import annotations

import re

#: Sentences longer than this are shown as a lead, and a list that opens; the lead is at most so long.
LONG, LEAD = 260, 140


def inline(text: str) -> str:
    """Markdown's bold and code as HTML, of text that is escaped already."""
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text)
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text)


def parts(text: str) -> list[str]:
    """The members of the list that a long sentence ends with (`divided`); none of a short one, and of a list of one or two."""
    head, rest = divided(text)
    found = split(rest, ";") if head else []
    found = found if len(found) > 1 else split(rest, ",") if head else []
    return found if len(found) > 2 else []


def lead(text: str) -> str:
    """What stands before that list; the whole text where there is none."""
    return divided(text)[0] if parts(text) else text


def divided(text: str) -> tuple[str, str]:
    """A long sentence behind what it begins with in bold, else at the last colon of its beginning, else at the first full stop,
    outside of parentheses; nothing before where there is none of them."""
    if len(text) <= LONG:
        return "", text
    bold = text.find("**", 2) + 2 if text.startswith("**") else 0
    if 2 < bold <= LEAD:
        return text[:bold], text[bold:].lstrip(": ").removesuffix(".")
    for mark in (": ", ". "):
        found = [place for place in outside(text[:LEAD]) if text.startswith(mark, place)]
        if found:
            end = (found[-1] if mark == ": " else found[0]) + 1
            return text[:end].rstrip(":"), text[end:].strip().removesuffix(".")
    return "", text


def split(text: str, mark: str) -> list[str]:
    """A text at each mark that is followed by a space and lies outside of parentheses."""
    found, start = [], 0
    for place in outside(text):
        if text.startswith(f"{mark} ", place):
            found.append(text[start:place].strip())
            start = place + 1
    return [*found, text[start:].strip()]


def outside(text: str) -> list[int]:
    """The places of a text that lie outside of parentheses."""
    found, depth = [], 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth <= 0:
            found.append(place)
    return found
