"""Cases of a test by day: few of them, that have between them whatever the others have; the others run by night."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import pytest


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


__all__ = ["by_day", "covering", "named"]
