"""JSON that others may have written: what is read is plain, small and unambiguous, or the error says what is not.

Python's reader takes the last of two equal keys, NaN, integers of any length and any nesting. Here each is an error that
names the file; nothing of it is computed with before it was looked at.
"""

from __future__ import annotations

import json
import stat
from functools import partial
from pathlib import Path
from typing import Any

#: Largest magnitude of an integer: what 64 bits hold.
LARGEST_INTEGER = 2**63
#: Bytes of the files that we parse; the index of a model with a million tensors has about 100 MB.
LARGEST_FILE = 128 * 2**20
#: Values inside of values; configurations of models have ten.
DEEPEST = 100
#: How much of a wrong value an error shows.
SHOWN = 60


def read_object(path: Path, *, nonfinite: bool = False) -> dict[str, Any]:
    """The JSON object of a file; ValueError that names it where it holds anything else, FileNotFoundError where it is not."""
    size = regular_size(path)
    if size > LARGEST_FILE:
        raise ValueError(
            f"{path} has {size} bytes, more than any description of a model; remove or replace it"
        )
    return parsed_object(path.read_bytes(), str(path), nonfinite=nonfinite)


def regular_size(path: Path) -> int:
    """Bytes of a regular file (a link to one counts); ValueError for pipes and devices, which block or never end."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; the folder is incomplete, fetch it again")
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is no regular file; the files of a model are, fetch it again")
    return status.st_size


def parsed_object(text: bytes | str, where: str, *, nonfinite: bool = False) -> dict[str, Any]:
    """The object that JSON text is; ValueError as `parsed` says, and where it is something else than an object."""
    found = parsed(text, where, nonfinite=nonfinite)
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


def parsed(text: bytes | str, where: str, *, nonfinite: bool = False) -> Any:
    """What JSON text says; `where` begins the ValueError where it says nothing.

    Refused: two equal keys, integers beyond 64 bits, text that is not UTF-8, nesting deeper than Python's reader goes, and NaN
    and infinities unless `nonfinite` (configurations of some models hold them).
    """
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        constants = float if nonfinite else _no_constant
        found = json.loads(
            decoded, object_pairs_hook=_single_keys, parse_int=_integer, parse_constant=partial(constants)
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


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def shown(value: object) -> str:
    """A value as an error shows it: short, on one line, without control characters."""
    text = value if isinstance(value, str) else repr(value)
    plain = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: SHOWN + 1])
    return plain if len(text) <= SHOWN else plain[:SHOWN] + "..."


__all__ = ["parsed", "parsed_object", "read_object", "regular_size", "shown"]
