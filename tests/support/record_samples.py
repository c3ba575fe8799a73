"""Records that stand for others, for tests to which every record costs a compilation.

Two records that differ in nothing but numbers (a target, the size of a block, the bits of an integer) run the same code with
other constants. `STRUCTURES` holds a record of every structure and of every element. `PAIRS` is shorter: any two values of
fields that some record has together, some record of it has together. `FIELDS` is the shortest: every value of every field.
`KINDS` has every kind of block, of second level and of zero point, for what depends on little else. `sampled` makes a test's
parameters of them: the other records are marked `nightly` and run by `make nightly`. `test_record_samples` shows that nothing
of `SCHEMES` is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import fields
from itertools import combinations
from typing import Any

import pytest

from reference import SCHEMES
from reference.formats.formats import FORMATS
from reference.schemes.schemes import Block, Scale, Zero

NAMES = sorted(SCHEMES)
Features = frozenset[Hashable]


def block_kind(block: Block) -> str:
    """group, row, tile, tensor or flat."""
    if isinstance(block, tuple):
        return "tile"
    if isinstance(block, str):
        return block.partition(":")[0]
    return "row" if block == -1 else "group"


def _without_numbers(value: Any) -> Hashable:
    """A field's value, a number reduced to there being one: ("zero", 0.125) and ("zero", 1.0) are one path, "tiny" another."""
    if isinstance(value, tuple):
        return tuple(_without_numbers(part) for part in value)
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else value


def _fields_of(record: Scale | Zero | None) -> dict[str, Hashable]:
    if record is None:
        return {"": None}
    values = {field.name: _without_numbers(getattr(record, field.name)) for field in fields(record)}
    return {**values, "block": block_kind(record.block)} if isinstance(record, Scale) else values


def values_of(name: str) -> Features:
    """(field, value) for every field that decides which code runs, and for the element's kind."""
    record, values = SCHEMES[name], {}
    for part in ("scale", "outer", "zero"):
        values |= {f"{part}.{field}": value for field, value in _fields_of(getattr(record, part)).items()}
    plain = {field.name for field in fields(record)} - {
        "name",
        "element",
        "deviations",
        "scale",
        "outer",
        "zero",
    }
    values |= {field: _without_numbers(getattr(record, field)) for field in plain}
    fmt = FORMATS[record.element]
    values["kind"] = (
        fmt.kind,
        fmt.signed,
        fmt.specials == "unused_minimum",
        fmt.fraction_bits > 0,
        fmt.reach > 0,
    )
    return frozenset(values.items())


def element_of(name: str) -> Features:
    return frozenset({("element", SCHEMES[name].element)})


def covering(features: Callable[[str], Features], names: Iterable[str] = NAMES) -> list[str]:
    """Few of `names`, in which every feature of all of them occurs: the one that adds most comes next."""
    of = {name: features(name) for name in names}
    missing, chosen = set().union(*of.values()), []
    while missing:
        chosen.append(max(of, key=lambda name: len(of[name] & missing)))
        missing -= of[chosen[-1]]
    return sorted(chosen)


def kinds_of(name: str) -> Features:
    record = SCHEMES[name]
    values = {
        "block": block_kind(record.scale.block),
        "outer": record.outer and record.outer.statistic,
        "zero": record.zero and record.zero.rule,
        "power of two": record.scale.power_of_two,
    }
    return frozenset(values.items())


def structures_of(name: str) -> Features:
    return frozenset({values_of(name)}) | element_of(name)


STRUCTURES = covering(structures_of)
PAIRS = covering(lambda name: frozenset(map(frozenset, combinations(values_of(name), 2))) | element_of(name))
FIELDS = covering(lambda name: values_of(name) | element_of(name))
KINDS = covering(kinds_of)


def sampled(sample: Collection[str], names: Iterable[str] = NAMES) -> list[Any]:
    """Parameters of a test: all of `names`, those outside the sample for `make nightly` only."""
    return [name if name in sample else pytest.param(name, marks=pytest.mark.nightly) for name in names]
