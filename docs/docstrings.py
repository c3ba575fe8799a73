"""Docstrings of this project as reStructuredText, which autodoc reads: they are prose in which `names` stand in backticks.

A name that has a place on an API page becomes a link to it, other code is set as code, and everything else means itself: an
underscore or an asterisk is no markup.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from typing import Any

SPAN = re.compile(r"(``?)(.+?)\1", re.DOTALL)
MARKUP = re.compile(r"[*_|\\]")
FENCE = re.compile(r"^```.*$")
#: How what an argument is begins, and what comes after the arguments.
ARGUMENTS = re.compile(r"(`?\w+`?(?:, `?\w+`?)*):(?:\s|$)")
OUTCOME = re.compile(r"(Raises|Returns|ValueError|TypeError)\b")
#: Where a contract stands in the text of its module.
ELSEWHERE = ("see the module text", "see above")


def connect(app: Any, places: Mapping[str, str]) -> None:
    """Convert every docstring that autodoc reads; `places` are full names by the short ones that docstrings use."""

    def convert(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
        text = "\n".join(lines)
        if what in ("function", "class", "exception") and any(words in text for words in ELSEWHERE):
            text += "\n\n" + module_text(value)
        lines[:] = converted(listed(text, parameters(value)), places, name).splitlines()

    app.connect("autodoc-process-docstring", convert)


def module_text(value: Any) -> str:
    """The docstring of the module that defines a function or a class."""
    module = sys.modules.get(getattr(value, "__module__", ""))
    return inspect.getdoc(module) or "" if module else ""


def parameters(value: Any) -> set[str]:
    """Names of the arguments of a function or a class; none where Python does not say."""
    try:
        return set(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        return set()


def listed(text: str, arguments: set[str]) -> str:
    """Lines that begin with arguments and a colon, "x, y: what they are", as a list of these."""
    lines: list[str] = []
    inside = False
    for line in parted(text, arguments).split("\n"):
        found = ARGUMENTS.match(line)
        begins = found and set(re.findall(r"\w+", found[1])) <= arguments
        if begins or not line.strip() or OUTCOME.match(line):
            lines += (
                [""] if lines and lines[-1].strip() and (begins or inside) and not (begins and inside) else []
            )
            inside = bool(begins)
        lines.append(f"* {line}" if begins else f"  {line}" if inside else line)
    return "\n".join(lines)


def parted(text: str, arguments: set[str]) -> str:
    """An argument that is explained within a line begins one."""

    def part(found: re.Match[str]) -> str:
        return f".\n{found[1]}:" if set(re.findall(r"\w+", found[1])) <= arguments else found[0]

    return re.sub(r"\. (`?\w+`?(?:, `?\w+`?)*):(?=\s)", part, text)


def converted(text: str, places: Mapping[str, str], name: str = "") -> str:
    """One docstring; `name` is that of what it belongs to, which is not linked to itself."""
    package = name.partition(".")[0]
    found, code = [], False
    for part in re.split(r"(^```.*$)", fenced(text), flags=re.MULTILINE):
        if FENCE.match(part):
            code = not code
            found.append(".. code-block:: python\n" if code else "")
        elif code:
            found.append("\n".join(f"   {line}" for line in part.splitlines()))
        else:
            found.append(prose(laid_out(part), places, package, name))
    return "\n".join(found)


def fenced(text: str) -> str:
    """Code that is indented under an empty line, as Markdown has it, between fences; a bullet's paragraphs are none."""
    lines: list[str] = []
    code = bullet = False
    for line in text.split("\n"):
        if not line.startswith(" ") and line.strip():
            bullet = bool(re.match(r"[*-] ", line))
            lines += ["```", ""] if code else []
            code = False
        elif line.startswith("    ") and not code and not bullet and lines and not lines[-1].strip():
            lines.append("```")
            code = True
        lines.append(line[4:] if code else line)
    return "\n".join([*lines, "```"] if code else lines)


def laid_out(text: str) -> str:
    """Indented lines as Markdown reads them: those of a paragraph or a bullet belong to it, others are a block of code."""
    lines: list[str] = []
    for line in text.split("\n"):
        above = lines[-1] if lines else ""
        own, other = (len(one) - len(one.lstrip()) for one in (line, above))
        bullet = re.match(r"\s*[*-] ", above)
        if above.strip() and line.strip() and own > other and not bullet:
            line = above[:other] + line.lstrip()
        elif above.strip() and re.match(r"\s*[*-] ", line) and not bullet and own == other and own == 0:
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def prose(text: str, places: Mapping[str, str], package: str, name: str) -> str:
    """Text without fences."""
    done, last = [], 0
    for span in SPAN.finditer(text):
        done += [escaped(text[last : span.start()]), inline(span[2], places, package, name)]
        last = span.end()
    return "".join([*done, escaped(text[last:])])


def inline(code: str, places: Mapping[str, str], package: str, name: str) -> str:
    """What stands in backticks."""
    code = " ".join(code.split())
    place = places.get(f"{package}.{code}") or places.get(code)
    if place and place != name:
        return rf"\ :py:obj:`{code} <{place}>`\ "
    return rf"\ ``{code}``\ "


def escaped(text: str) -> str:
    """Words that mean themselves; a bullet stays one, and a backtick without its other one is a character."""
    lines = []
    for line in text.split("\n"):
        bullet = re.match(r"\s*[*-] ", line)
        start = bullet.end() if bullet else 0
        lines.append(line[:start] + MARKUP.sub(r"\\\g<0>", line[start:]).replace("`", r"\`"))
    return "\n".join(lines)
