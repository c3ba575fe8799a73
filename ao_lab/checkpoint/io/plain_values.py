"""Whether plain values (of JSON) are what a record's fields are declared to be; checked before any of them is used."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from ao_lab.checkpoint.io.strict_json import shown
from reference.formats.formats import Format
from reference.schemes.schemes import Scale, Scheme, Zero

#: Records within records.
NESTED: dict[str, type] = {"scale": Scale, "outer": Scale, "zero": Zero}
#: The largest integer of a record: block sizes and exponents are far below.
LARGEST = 2**48
#: Characters of text, and values of a list, in a record at most.
LONGEST = 1000
#: The largest number of a record: scales are float32.
LARGEST_FLOAT = (2 - 2**-23) * 2.0**127
#: Formats that a scheme names: of the element, the scales and the outer scales.
MOST_FORMATS = 3


def check_scheme_fields(given: Any, where: str) -> None:
    """ValueError unless `given` is what `scheme_fields` makes of a scheme, by names and types; its rules check the rest."""
    if isinstance(given, dict) and "formats" in given:
        given = _checked_formats(given, where)
    _check_record(given, Scheme, where)
    if not given["name"].isprintable():
        raise ValueError(f"{where}: name is printable text on one line, got {shown(given['name'])}")
    for name, record in NESTED.items():
        if given.get(name) is not None or name == "scale":
            _check_record(given[name], record, f"{where}: {name}")


def _checked_formats(given: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields of the scheme alone, those of the formats that come with it checked."""
    formats = given["formats"]
    if not isinstance(formats, list) or len(formats) > MOST_FORMATS:
        raise ValueError(
            f"{where}: formats is a list of at most {MOST_FORMATS} records, got {shown(formats)}"
        )
    for at, one in enumerate(formats):
        _check_record(one, Format, f"{where}: format {at}")
    return {name: value for name, value in given.items() if name != "formats"}


def _check_record(given: Any, record: type, where: str) -> None:
    if not isinstance(given, dict):
        raise ValueError(f"{where} is a record of a {record.__name__}, got {shown(given)}")
    hints = hints_of(record)
    unknown = [name for name in given if name not in hints]
    needed = [f.name for f in fields(record) if f.default is MISSING and f.name not in given]
    if unknown or needed:
        what = f"has an unknown field {shown(unknown[0])}" if unknown else f"lacks {needed[0]}"
        raise ValueError(f"{where} {what}; a {record.__name__} of this version has {', '.join(hints)}")
    for name, value in given.items():
        if name not in NESTED or (record is Scale):
            check_value(value, hints[name], f"{where}: {name}")


def check_value(value: Any, hint: Any, where: str) -> None:
    """ValueError unless a plain value fits a type; lists stand for tuples."""
    if not fits(value, hint):
        name = getattr(hint, "__name__", str(hint)) if not get_args(hint) else str(hint)
        raise ValueError(f"{where} is {name}, got {shown(value)}")


@cache
def hints_of(record: type) -> Mapping[str, Any]:
    """Types of a record's fields by name."""
    hints = get_type_hints(record)
    return {f.name: hints[f.name] for f in fields(record)}


def fits(value: Any, hint: Any) -> bool:
    """Whether a plain value is of a type: numbers finite and not too large, text not too long."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, option) for option in get_args(hint))
    if origin is tuple:
        return _fits_items(value, get_args(hint))
    if hint is float:
        return type(value) in (int, float) and abs(value) <= LARGEST_FLOAT
    if hint is int:
        return type(value) is int and abs(value) <= LARGEST
    if hint is str:
        return isinstance(value, str) and len(value) <= LONGEST
    return value is None if hint is type(None) else type(value) is hint


def _fits_items(value: Any, hints: tuple[Any, ...]) -> bool:
    if not isinstance(value, (list, tuple)) or len(value) > LONGEST:
        return False
    if len(hints) == 2 and hints[1] is Ellipsis:
        return all(fits(item, hints[0]) for item in value)
    return len(value) == len(hints) and all(map(fits, value, hints))


__all__ = ["check_scheme_fields", "check_value", "fits", "hints_of"]
