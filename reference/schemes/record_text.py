"""Records as text and back, for files and for whatever carries only text.

`scheme_fields` and `scheme_from` convert a record to plain values (numbers, text, lists) and back, with the formats that it
needs and that are not built in; `format_fields` and `format_from` the same of a format alone. `record_of` finds the record of
a `Scheme.key` in any process.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from reference.formats.formats import Format
from reference.schemes.register import register
from reference.schemes.schemes import RECORDS, Scale, Scheme, Zero, scheme_fields, scheme_of


def format_fields(fmt: Format) -> dict[str, Any]:
    """A format as plain values."""
    return asdict(fmt)


def format_from(fields: dict[str, Any]) -> Format:
    """The format of these plain values; ValueError or TypeError where they describe none. Lists may stand for tuples."""
    return Format(**{name: _tuples(value) for name, value in fields.items()})


def scheme_from(fields: dict[str, Any]) -> Scheme:
    """The record of these plain values; ValueError or TypeError where they describe none. Lists may stand for tuples.

    Formats that come with it are registered, a name that is taken by another record being a ValueError.
    """
    for one in fields.get("formats", ()):
        register(format_from(one))
    given = {name: _tuples(value) for name, value in fields.items() if name != "formats"}
    for name, record in (("scale", Scale), ("outer", Scale), ("zero", Zero)):
        if given.get(name) is not None:
            given[name] = record(**{key: _tuples(value) for key, value in given[name].items()})
    return Scheme(**given)


def record_of(text: str) -> Scheme:
    """The record of a name or of a `Scheme.key`; ValueError where there is none."""
    found = RECORDS.get(text)
    if found is not None:
        return found
    return scheme_from(json.loads(text)) if text.startswith("{") else scheme_of(text)


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


__all__ = ["format_fields", "format_from", "record_of", "scheme_fields", "scheme_from"]
