"""JSON that others may have written: what is read is plain, small and unambiguous, or the error says what is not.

Python's reader takes the last of two equal keys, NaN, integers of any length and any nesting. Here each is an error that
names the file; nothing of it is computed with before it was looked at. `check_value` and `check_scheme_fields` say whether
plain values are what a record's fields are declared to be.
"""

from __future__ import annotations

import json
import stat
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache, partial
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from reference.formats.formats import Format
from reference.schemes.schemes import Scale, Scheme, Zero

#: Largest magnitude of an integer: what 64 bits hold.
LARGEST_INTEGER = 2**63
#: Bytes of the files that we parse; the index of a model with a million tensors has about 100 MB.
LARGEST_FILE = 128 * 2**20
#: Values inside of values; configurations of models have ten.
DEEPEST = 100
#: How much of a wrong value an error shows.
SHOWN = 60


def read_object(path: Path, *, nonfinite: bool = False, huge: bool = False) -> dict[str, Any]:
    """The JSON object of a file; ValueError that names it where it holds anything else, FileNotFoundError where it is not.

    nonfinite, huge: as for `parsed`.
    """
    size = regular_size(path)
    if size > LARGEST_FILE:
        raise ValueError(
            f"{path} has {size} bytes, more than any description of a model; remove or replace it"
        )
    return parsed_object(path.read_bytes(), str(path), nonfinite=nonfinite, huge=huge)


def regular_size(path: Path) -> int:
    """Bytes of a regular file (a link to one counts); ValueError for pipes and devices, which block or never end."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; the folder is incomplete, fetch it again")
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is no regular file; the files of a model are, fetch it again")
    return status.st_size


def parsed_object(
    text: bytes | str, where: str, *, nonfinite: bool = False, huge: bool = False
) -> dict[str, Any]:
    """The object that JSON text is; ValueError as `parsed` says, and where it is something else than an object."""
    found = parsed(text, where, nonfinite=nonfinite, huge=huge)
    if is_deeper(found, DEEPEST):
        raise ValueError(f"{where} is nested too deeply for a description of a model; fetch it again")
    if not isinstance(found, dict):
        raise ValueError(f"{where} holds a JSON object, got {type(found).__name__}; fetch it again")
    return found


def is_deeper(value: Any, most: int) -> bool:
    """Whether lists and objects lie in each other more than `most` deep; what walks over the value may call itself so often."""
    level = [value]
    for _ in range(most + 1):
        level = [
            item
            for one in level
            if isinstance(one, (dict, list))
            for item in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return False
    return True


def parsed(text: bytes | str, where: str, *, nonfinite: bool = False, huge: bool = False) -> Any:
    """What JSON text says; `where` begins the ValueError where it says nothing.

    Refused: two equal keys, integers beyond 64 bits, text that is not UTF-8, nesting deeper than Python's reader goes, and NaN
    and infinities unless `nonfinite` (configurations of some models hold them). `huge`: integers beyond 64 bits are floats
    (a tokenizer without a longest input says 10^30).
    """
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        constants = float if nonfinite else _no_constant
        found = json.loads(
            decoded,
            object_pairs_hook=_single_keys,
            parse_int=float_beyond if huge else _integer,
            parse_constant=partial(constants),
        )
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is no UTF-8 text ({error.reason} at byte {error.start}); fetch it again"
        ) from error
    except RecursionError as error:
        raise ValueError(
            f"{where} is nested too deeply for a description of a model; fetch it again"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{where} is no JSON that can be read: {shown(str(error))}; fetch it again"
        ) from error
    return found


def _single_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shown(twice)} is there twice")
    return result


def _integer(digits: str) -> int:
    # Python's own limit of 4,300 digits is an error too, but a message about sys.set_int_max_str_digits.
    result = int(digits) if len(digits) <= len(str(LARGEST_INTEGER)) + 1 else LARGEST_INTEGER + 1
    if abs(result) > LARGEST_INTEGER:
        raise ValueError(f"the integer {shown(digits)} is beyond 64 bits")
    return result


def float_beyond(digits: str) -> int | float:
    """An integer, as a float where it is beyond 64 bits."""
    try:
        return _integer(digits)
    except ValueError:
        return float(digits)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def shown(value: object) -> str:
    """A value as an error shows it: short, on one line, without control characters."""
    text = value if isinstance(value, str) else repr(value)
    plain = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: SHOWN + 1])
    return plain if len(text) <= SHOWN else plain[:SHOWN] + "..."


# Whether plain values (of JSON) are what a record's fields are declared to be; checked before any of them is used.

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
