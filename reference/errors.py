"""Messages that say what was given, the rule, and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

Record = TypeVar("Record")


def lookup(name: object, table: Mapping[str, Record], what: str) -> Record:
    """`table[name]`, or ValueError with the nearest names (TypeError if `name` is no string)."""
    if not isinstance(name, str):
        raise TypeError(f"a {what} is given by name or as a record, got {type(name).__name__}: {name!r}")
    if name not in table:
        raise ValueError(f"unknown {what} {name!r}; {_nearest(name, table)}")
    return table[name]


def choice(value: object, allowed: tuple[str, ...], what: str) -> str:
    """`value` if it is one of `allowed`, else ValueError that lists them."""
    if value not in allowed:
        raise ValueError(f"{what} is one of {', '.join(allowed)}; got {value!r}")
    return str(value)


def _nearest(name: str, table: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, table, n=3, cutoff=0.4)
    known = close or sorted(table)
    return f"{'the nearest are' if close else 'known are'} {', '.join(known)}"
