"""The report of a folder whose rows are all of models that somebody named (``ao-lab reproduce EXPERIMENT --model DIR --reports
DIR``): one page, ``index.html``, with ``README.md`` beside it, of these models alone.

Nothing of the project's own report is on it: no headlines, no published values of other models, no open questions. The sections
are those of the experiments' pages, with their tables open. Published values stand there where a folder is that very model
(`experiments.report.accuracies`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.harness.registry import EXPERIMENTS
from experiments.harness.rows import Row, table_parts
from experiments.report.accuracies import KINDS
from experiments.report.content import Section, Table, note, runs_of
from experiments.report.results import NOT_MEASURED

#: How headings call what an experiment measures of a model; of others the title of their page.
TITLES = {
    "ptq": "Quantized without calibration",
    "calibration": "Quantized with calibration data",
    "qat": "Fine-tuned for quantization (QAT)",
    "decode": "Generating: tokens per second and memory",
    "fp8_training": "Fine-tuned in low precision",
    "sparsity": "Pruned",
}


#: How sentences begin that say what the project's own report lacks.
OF_THE_PROJECT = (
    "**Not measured yet at this scale**",
    "**Other projects' own code has not been measured yet.**",
)


@dataclass(frozen=True)
class OwnPart:
    """What one experiment measured of the models: its heading, and its page (`experiments.report.pages.Page`) with the sections
    of these models alone."""

    title: str
    page: Any


def are_own(rows: Mapping[str, Sequence[Row]]) -> bool:
    """Whether a folder's rows, by experiment, are of named models alone; a folder without rows is not."""
    kinds = {table_parts(row.table)[0] for found in rows.values() for row in found}
    return bool(kinds) and all(kind.startswith(KINDS) for kind in kinds)


def models_in(rows: Mapping[str, Sequence[Row]]) -> list[str]:
    """The names of the models, in the order of the experiments and their rows."""
    kinds = (table_parts(row.table)[0] for found in rows.values() for row in found)
    return list(dict.fromkeys(kind.partition(" ")[2] for kind in kinds))


def parts_of(pages: Sequence[Any]) -> list[OwnPart]:
    """A part for each page, without sections and tables that hold no measured value of the models."""
    return [
        OwnPart(TITLES.get(page.name, page.title), replace(page, sections=measured(page.sections)))
        for page in pages
    ]


def measured(sections: Sequence[Section]) -> list[Section]:
    """Sections with the tables that show rows, and without what the project's own report lacks; none of those that show nothing
    but published values, but those that say what of a model was not measured."""
    found = [
        replace(
            one,
            tables=[table for table in one.tables if has_rows(table)],
            paragraphs=[text for text in one.paragraphs if not text.startswith(OF_THE_PROJECT)],
        )
        for one in sections
    ]
    return [one for one in found if one.tables or one.drawings or says_failures(one)]


def says_failures(section: Section) -> bool:
    """Whether a section says what was not measured, and why."""
    return any(text.startswith(NOT_MEASURED) for text in section.paragraphs)


def has_rows(table: Table) -> bool:
    """Whether a table has lines that show rows."""
    return bool(table.lines) and bool(table.rows)


def values_of(rows: Mapping[str, Sequence[Row]], pages: Sequence[Any]) -> dict[str, object]:
    """What the templates of the page are filled with."""
    every = [row for found in rows.values() for row in found]
    return {
        "models": models_in(rows),
        "parts": parts_of(pages),
        "runs": runs_of(every),
        "measured": note(every),
        "experiments": [name for name in EXPERIMENTS if rows.get(name)],
    }
