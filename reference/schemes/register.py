"""`register`: formats and schemes of one's own by name, beside those of this package."""

from __future__ import annotations

from typing import TypeVar

from reference.formats.formats import FORMATS, Format
from reference.schemes.schemes import RECORDS, SCHEMES, Scheme

Record = TypeVar("Record", Format, Scheme)


def register(record: Record) -> Record:
    """Give a format or a scheme its name: functions take it, and configurations, for as long as the process lives.

    record: a `Format`, which schemes may then name, or a `Scheme`; it comes back, so that one line makes and registers it.
    Again with an equal record does nothing. A saved model has the records of its weights with it, and of their formats.

    ValueError where the name belongs to another record (names are never given anew), TypeError for anything else.
    """
    if not isinstance(record, (Format, Scheme)):
        raise TypeError(f"register takes a Format or a Scheme, got {type(record).__name__}: {record!r:.60}")
    table: dict[str, Format] | dict[str, Scheme] = FORMATS if isinstance(record, Format) else SCHEMES
    known = table.get(record.name)
    if known is not None and known != record:
        raise ValueError(
            f"{record.name!r} is the name of another {type(record).__name__.lower()}; give this one a name of its own"
        )
    if known is None:
        table[record.name] = record  # type: ignore[assignment]
        if isinstance(record, Scheme):
            RECORDS[record.name] = record
    return record


__all__ = ["register"]
