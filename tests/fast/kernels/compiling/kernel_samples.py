"""Which compiled kernels stand for others by day: every kernel, kind of record and option of a call occurs among them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import pytest

from reference import SCHEMES
from tests.fast.kernels.compiling.kernel_calls import Case
from tests.support.record_samples import kinds_of

# Cases of a test by day: few of them, that have between them whatever the others have; the others run by night.


def covering(cases: Sequence[Any], features: Callable[[Any], Iterable[Hashable]]) -> list[int]:
    """Numbers of few cases in which every feature of all occurs: the one that adds most comes next, of equal ones the first."""
    of = [frozenset(features(case)) for case in cases]
    missing, chosen = set().union(*of), []
    while missing:
        chosen.append(max(range(len(of)), key=lambda at: (len(of[at] & missing), -at)))
        missing -= of[chosen[-1]]
    return sorted(chosen)


def by_day(
    cases: Iterable[Any],
    features: Callable[[Any], Iterable[Hashable]],
    ids: Callable[[Any], str] | None = None,
    marks: Callable[[Any], Sequence[Any]] = lambda case: (),
) -> list[Any]:
    """Parameters of a test: those that cover all features by day, the others marked `nightly`.

    A case is a tuple where the test takes several parameters. ids: their names; marks: further marks of a case.
    """
    listed = list(cases)
    chosen = set(covering(listed, features))
    return [
        pytest.param(
            *(case if type(case) is tuple else (case,)),
            marks=[*marks(case), *([] if at in chosen else [pytest.mark.nightly])],
            id=None if ids is None else ids(case),
        )
        for at, case in enumerate(listed)
    ]


def named(**values: Hashable) -> list[tuple[str, Hashable]]:
    """Features by name: a value counts as one of its field."""
    return list(values.items())


#: Kernels that are compiled side by side and read back at once.
TOGETHER = 12


def features_of(case: Case) -> set[Hashable]:
    """The function with its kernels and axis; whatever these are, kinds of its record, the element, options."""
    function = case.call.func
    given = inspect.signature(function).bind(*case.call.args, **case.call.keywords)
    given.apply_defaults()
    made: set[Hashable] = {(function, case.kernels)}
    for name, value in given.arguments.items():
        record = SCHEMES.get(getattr(value, "name", value)) if isinstance(value, Hashable) else None
        if record is not None:
            made |= {(name, kind) for kind in kinds_of(record.name)}
            made |= {("element", record.element), (name, "." in record.name)}
        elif isinstance(value, bool | str):
            made.add((name, value))
        elif name == "axis":
            made.add((function, name, value))
    return made


def kinds_of_call(case: Case) -> set[Hashable]:
    """The function with its kernels; whatever these are, the bits of an element."""
    records = [SCHEMES[one] for one in case.call.args if isinstance(one, str) and one in SCHEMES]
    return {(case.call.func, case.kernels), *(one.format.bits for one in records)}


def in_parts(
    cases: Sequence[Any], case_of: Callable[[Any], Case], features: Callable[[Case], set[Hashable]]
) -> tuple[list[list[Any]], list[Any]]:
    """Parts of `TOGETHER` cases, and a parameter (part, case) for each case: those by day are in parts of their own."""
    chosen = set(covering(cases, lambda one: features(case_of(one))))
    parts: list[list[Any]] = []
    parameters = []
    for by_day in (True, False):
        some = [one for at, one in enumerate(cases) if (at in chosen) == by_day]
        for first in range(0, len(some), TOGETHER):
            parts.append(some[first : first + TOGETHER])
            marks = [] if by_day else [pytest.mark.nightly]
            parameters += [
                pytest.param(len(parts) - 1, one, id=case_of(one).name, marks=marks) for one in parts[-1]
            ]
    return parts, parameters


__all__ = ["TOGETHER", "by_day", "covering", "features_of", "in_parts", "kinds_of_call", "named"]
