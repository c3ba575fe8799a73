"""Text of others in Markdown and in YAML: names in files say what they are, and add nothing to the page around them.

What a card takes over from an earlier one, or from that of the model which was quantized: lines of its front matter.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from ao_lab.checkpoint.io.files import ON_HUB, page

#: Characters of a name or value on the page at most.
LONGEST = 200
#: Characters of a line of a note at most.
LONGEST_NOTE = 2000
#: What begins a link, an image, HTML, code, emphasis or a cell in running text.
ACTIVE = re.compile(r"([\\`<>\[\]|])")
#: Values that YAML reads as text, a list or an address, on one line.
PLAIN_VALUE = re.compile(r"[A-Za-z0-9](?:[\w./@+~=?&%-]|:(?=[^\s:]))*", re.ASCII)
ITEM = r"""(?:\w[\w.-]*|"[\w .-]*"|'[\w .-]*')"""
PLAIN_LIST = re.compile(rf"\[ ?(?:{ITEM}(?: ?, ?{ITEM})*)? ?\]", re.ASCII)

#: Folders of repositories in the Hub's cache.
CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)", re.ASCII)
#: What a card takes over from the card of the model that it was made of.
KEPT = ("license:", "license_name:", "license_link:", "language:")
#: Where a card of `ao-lab pretrained` names its model on the Hub.
MODEL_ID = "model_id:"


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


def code(language: str, *lines: str) -> str:
    """A block of code."""
    return "\n".join([f"```{language}", *(one_line(line, LONGEST_NOTE) for line in lines), "```"])


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, the first row its head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def number(value: int) -> str:
    """An integer with thousands apart."""
    return f"{value:,}"


def base_name(text: str) -> str:
    """A name on the Hub as it is (owner/name), of a folder its last part; of one in the Hub's cache the name of its repository.

    One line, without control characters and backticks: it comes from a file.
    """
    folder, text = Path(text), one_line(text).replace("`", "")
    if ON_HUB.fullmatch(text) and not folder.is_dir():
        return text
    if folder.parent.name == "snapshots" and (cached := CACHED.fullmatch(folder.parent.parent.name)):
        return f"{cached[1]}/{cached[2]}"
    parts = [part for part in Path(text).parts if part not in (".", "..", "/")]
    return parts[-1] if parts else ""


def front_lines(path: Path) -> list[str]:
    """The lines of an earlier card's front matter."""
    lines = (page(path) or "").splitlines()
    front = lines[1 : lines[1:].index("---") + 1] if lines[:1] == ["---"] and "---" in lines[1:] else []
    # A list over several lines as one on its own line.
    return re.sub(r"^([\w-]+:)((?:\n *- .*)+)", _flow, "\n".join(front), flags=re.MULTILINE).splitlines()


def _flow(block: re.Match[str]) -> str:
    items = (line.strip().removeprefix("- ").strip() for line in block[2].strip().splitlines())
    return f"{block[1]} [{', '.join(items)}]"


def licence(path: Path) -> list[str]:
    """The lines of an earlier card's front matter that say under which terms, and in which language, a model is."""
    return [yaml_line(line) for line in front_lines(path) if line.startswith(KEPT) and not line.endswith(":")]


def hub_name(path: Path) -> str:
    """The model's own name on the Hub, owner/name, where its card's front matter says one; else ""."""
    found = (line.removeprefix(MODEL_ID).strip() for line in front_lines(path) if line.startswith(MODEL_ID))
    name = next(found, "")
    return name if ON_HUB.fullmatch(name) else ""
