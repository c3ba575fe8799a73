"""Records as text and back, for files and for whatever carries only text.

`scheme_fields` and `scheme_from` convert a record to plain values (numbers, text, lists) and back.
`record_of` finds the record of a `Scheme.key` in any process.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from reference.schemes.schemes import RECORDS, Scale, Scheme, Zero, scheme_of


def scheme_fields(scheme: Scheme) -> dict[str, Any]:
    """A record as plain values."""
    return asdict(scheme)


def scheme_from(fields: dict[str, Any]) -> Scheme:
    """The record of these plain values; ValueError or TypeError where they describe none. Lists may stand for tuples."""
    given = {name: _tuples(value) for name, value in fields.items()}
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


__all__ = ["record_of", "scheme_fields", "scheme_from"]
