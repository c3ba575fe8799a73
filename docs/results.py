"""Pages of the site on measured results: what each report finds, its first table and the names of all, which the search finds.

They are made of ``reports/*.md``. Figures and tables themselves stand in the report's own page, which the site has a copy of.
"""

from __future__ import annotations

import re
from pathlib import Path

REPORTS = Path(__file__).resolve().parents[1] / "reports"
#: The way to the reports from the folder of these pages.
UP = "../../../reports"
LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
#: Of a table, and of a list, whose members are counted without a word.
SUMMARY = re.compile(r"<summary>(.+ lines?\))</summary>")
LISTED = re.compile(r"<summary>(?:<strong>)?(.+?)(?:</strong>)? (\(\d+\))</summary>")
LONGER = re.compile(r"(.+): (\d+ lines?), in \[")
#: Of the first report: links to other ones, and what of it is not told on the site.
OTHER = re.compile(r"\]\((\w+)\.md\)")
LEFT = "\n## Where else"


def pages() -> dict[str, str]:
    """The page of all reports, and one of each, by name of the file."""
    names = reports()
    found = {f"{name}.md": page(name, (REPORTS / f"{name}.md").read_text("utf-8")) for name in names}
    return {"index.md": first(names, (REPORTS / "README.md").read_text("utf-8")), **found}


def reports() -> list[str]:
    """The experiments that have a page, in the order of the first report."""
    text = (REPORTS / "README.md").read_text("utf-8")
    return list(dict.fromkeys(re.findall(r"\| \[(\w+)\]\(\1\.md\) \|", text)))


def first(names: list[str], text: str) -> str:
    """The first report: headlines, and a line an experiment."""
    body = text.partition(LEFT)[0].replace("# Reports", "# Measured results", 1)
    body = OTHER.sub(lambda link: link[0] if link[1] in names else f"]({UP}/{link[1]}.md)", body)
    more = ", ".join(f"[{word}]({UP}/{name}.md)" for name, word in MORE.items())
    tree = "\n".join(names)
    site = ", ".join(f"[{word}](reports:../../reports/{name}.html)" for name, word in ALONE.items())
    told = f"**With figures: [the first screen]({UP}/README.md)**. More: {site}, {more}."
    title, _, rest = body.partition("\n\n")
    return f"{title}\n\n{told}\n\n{rest}\n\n```{{toctree}}\n:hidden:\n\n{tree}\n```\n"


#: Reports that are pages of the site alone, and those that are Markdown too.
ALONE = {"scoreboard": "published values beside ours", "history": "the history of each number"}
MORE = {
    "answers": "what users ask first, and open questions of the TorchAO paper",
    "limits": "where other libraries are ahead, and targets that are missed",
    "families": "which kernel runs when",
}


def page(name: str, text: str) -> str:
    """What one report finds, its first table, and its sections with the names of their tables."""
    title, *lines = text.splitlines()
    kept = [title, "", f"[Figures and tables]({UP}/{name}.md)", "", *first_table(lines)]
    for line in lines:
        if line.startswith(("- ", "## ")):
            kept += ["", plain(line), ""] if line.startswith("## ") else [plain(line)]
        elif summary := SUMMARY.search(line) or LONGER.match(line):
            kept.append(f"- Table: {plain(summary[1])}")
        elif listed := LISTED.search(line):
            kept.append(f"- {plain(listed[1])} {listed[2]}")
    return "\n".join(kept) + "\n"


def first_table(lines: list[str]) -> list[str]:
    """The first table of a report, its section and title before it; nothing of a report whose tables are elsewhere."""
    place = next((at for at, line in enumerate(lines) if SUMMARY.search(line)), None)
    if place is None:
        return []
    section = next((line[3:] for line in reversed(lines[:place]) if line.startswith("## ")), "")
    end = next((at for at, line in enumerate(lines) if at > place and line.startswith("</details>")), place)
    rows = [plain(line) for line in lines[place:end] if line.startswith("|")]
    title = SUMMARY.search(lines[place])
    return [f"**{plain(section)}: {plain(title[1]) if title else ''}**", "", *rows, ""] if rows else []


def plain(line: str) -> str:
    """Text without links, and with what Markdown or HTML would read as marks."""
    return LINK.sub(r"\1", line).replace("<", "&lt;").replace("$", r"\$")
