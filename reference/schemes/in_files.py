"""Records as files have them: a format that comes with a file keeps to the schemes of that file.

A file brings the formats of its schemes with it, under names that its writer chose. Here the same name may mean another format,
or may be meant for one: a format that is not registered here with the same fields is therefore in `FORMATS` under a name of its
own, and goes back to files under its writer's.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from reference.formats.formats import BUILT_IN, FORMATS, Format
from reference.schemes.schemes import Scheme, format_fields, format_from, scheme_fields, scheme_from

#: Formats that came with files under names that mean none or others here, by the names that they have here.
LOADED: dict[str, Format] = {}


def loaded_scheme(fields: dict[str, Any]) -> Scheme:
    """`scheme_from` of a file's plain values, whose formats take no name from this process and clash with none in it.

    A format that is not registered here with the same fields gets a name of its own, the file's and digits of its fields: it is
    in `FORMATS` under that, and in the scheme. ValueError and TypeError as `scheme_from`, and for a built-in format's name with
    other fields.
    """
    return scheme_from(
        renamed(fields, {one["name"]: own_name(format_from(one)) for one in fields.get("formats", ())})
    )


def own_name(fmt: Format) -> str:
    """The name that a file's format has here."""
    if FORMATS.get(fmt.name) == fmt:
        return fmt.name
    if fmt.name in BUILT_IN:
        raise ValueError(
            f"{fmt.name!r} is a format of this library with other fields; give a format of one's own another name"
        )
    digits = hashlib.sha256(json.dumps(format_fields(fmt)).encode()).hexdigest()[:8]
    name = f"{fmt.name}_{digits}"
    LOADED[name] = fmt
    return name


def stored_fields(scheme: Scheme) -> dict[str, Any]:
    """`scheme_fields` for a file: formats that came with files have the names that they had there."""
    fields = scheme_fields(scheme)
    formats = [one["name"] for one in fields.get("formats", ())]
    return renamed(fields, {name: LOADED[name].name for name in formats if name in LOADED})


def renamed(fields: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """A scheme's plain values with other names of its formats, in their order."""
    if not names:
        return fields
    given = {**fields, "element": names.get(fields["element"], fields["element"])}
    for part in ("scale", "outer"):
        found = given.get(part)
        if found and "storage" in found:
            given[part] = {**found, "storage": names.get(found["storage"], found["storage"])}
    formats = given.get("formats", ())
    return {**given, "formats": [{**one, "name": names.get(one["name"], one["name"])} for one in formats]}
