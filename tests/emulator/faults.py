"""Faults planted in a kernel's source: what compares its results must see each, else it would say nothing."""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch

from fast.launch.nvrtc import CompileError

#: What a kernel with a fault may raise before it has a result.
FAILURES = (ValueError, TypeError, RuntimeError, LookupError, RuntimeWarning, struct.error)
#: A change of a kernel's source with all that it includes.
Change = Callable[[str], str]


class Planted:
    """Puts one piece of a source in another's place; count: in how many sources it was."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new, self.count = old, new, 0

    def __call__(self, text: str) -> str:
        assert self.old in text, f"the source has no {self.old!r}: plant the fault in what it has now"
        changed = text.replace(self.old, self.new)
        assert changed != text, f"{self.new!r} is no fault in place of {self.old!r}"
        self.count += 1
        return changed


def unchanged(text: str) -> str:
    """No fault."""
    return text


def assert_seen(
    fault: Sequence[str], is_right: Callable[[Any, Change], bool], ways: Iterable[Hashable] = (True, False)
) -> None:
    """Some way of running a kernel shows its fault, by another result or by none, and the right result without it.

    fault: a piece of the source, and what takes its place. is_right: of a way and a change of the source; a function of a
    module, whose answers without a fault are kept. ways: by default whether copies arrive early.
    """
    planted = Planted(*fault)
    seen = next(([way] for way in ways if not _passes(is_right, way, planted)), None)
    assert planted.count, "no source was changed"
    assert seen is not None, f"nothing shows {fault[1]!r} in place of {fault[0]!r}"
    assert _passes_unchanged(is_right, *seen), f"without a fault it is not right either: {seen[0]!r}"


def _passes(is_right: Callable[[Any, Change], bool], way: Hashable, change: Change) -> bool:
    """A source that does not compile is an error of the test: it shows no fault of a kernel."""
    try:
        return is_right(way, change)
    except CompileError:
        raise
    except FAILURES:
        return False


@lru_cache(maxsize=64)
def _passes_unchanged(is_right: Callable[[Any, Change], bool], way: Hashable) -> bool:
    """Once for all faults of a kernel that is run in this way."""
    return is_right(way, unchanged)


def every_second(faults: Iterable[str]) -> list[Any]:
    """Parameters of a test: every second fault by day, all of them by night."""
    return [
        one if at % 2 == 0 else pytest.param(one, marks=pytest.mark.nightly) for at, one in enumerate(faults)
    ]


def by_product(faults: Mapping[Callable[..., Any], Iterable[str]]) -> list[Any]:
    """Parameters (product, fault) of a test of faults that products show: every second of each by day, all of them by night."""
    return [
        pytest.param(product, fault, marks=[pytest.mark.nightly] * (at % 2))
        for product, planted in faults.items()
        for at, fault in enumerate(planted)
    ]


def is_right(way: tuple[Callable[..., torch.Tensor], bool], change: Change) -> bool:
    """Whether a product, of whether copies arrive early and of a change, has the bits that it has without one."""
    product, early = way
    return torch.equal(product(early, change), _right(product))


@lru_cache(maxsize=16)
def _right(product: Callable[..., torch.Tensor]) -> torch.Tensor:
    return product(True, unchanged)


def assert_shown(fault: Sequence[str], product: Callable[..., torch.Tensor]) -> None:
    """`assert_seen` of a product whose bits without a fault other tests hold."""
    assert_seen(fault, is_right, [(product, True), (product, False)])


def at_night(cases: Iterable[str], *left: str) -> list[Any]:
    """Parameters of a test: those that are left to the night, whose parts others have between them, and the others."""
    listed = list(cases)
    assert set(left) <= set(listed), f"no cases {set(left) - set(listed)}"
    return [pytest.param(one, marks=pytest.mark.nightly) if one in left else one for one in listed]


__all__ = [
    "Change",
    "Planted",
    "assert_seen",
    "assert_shown",
    "at_night",
    "by_product",
    "every_second",
    "unchanged",
]
