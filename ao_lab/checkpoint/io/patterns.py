"""Regular expressions that a configuration from elsewhere brings, matched in bounded time.

Python's `re` tries one way after the other, and a few characters can make it try for years: "(a+)+$" of a name of 40 letters.
Here Python parses the expression, and it is followed at all positions of the name at once: what has been reached never is
tried again. The answer is that of `re.match` (the expression matches at the name's beginning). Refused, with ValueError, are
what needs the text of a group (backreferences), possessive and atomic parts, flags, repetitions nested more than twice or
counted beyond 256, and expressions of more than 512 characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from ao_lab.checkpoint.io.strict_json import shown

#: Characters of an expression at most.
LONGEST = 512
#: What a repetition counts to at most.
LARGEST_COUNT = 256
#: Repetitions and looks ahead inside each other at most.
DEEPEST = 2
#: Names of modules and tensors.
LONGEST_NAME = 1024
# re's own parser, and its constants: what it understands is what `re` means.
PARSER: Any = re._parser  # type: ignore[attr-defined]
CODES: Any = re._constants  # type: ignore[attr-defined]
Positions = frozenset[int]
#: The positions that an expression's part reaches in a name, from some.
Step = Callable[[str, Positions], Positions]


class Pattern:
    """One expression; ValueError, when it is made, for one that is not followed."""

    def __init__(self, text: str) -> None:
        if len(text) > LONGEST:
            raise ValueError(
                f"the expression {shown(text)} has {len(text)} characters, more than {LONGEST}; name the modules"
            )
        try:
            parsed = PARSER.parse(text)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{shown(text)} is no regular expression: {error}") from error
        if parsed.state.flags & ~re.UNICODE:
            raise ValueError(
                f"the expression {shown(text)} sets flags, which are not followed; name the modules"
            )
        try:
            self.step = _sequence(parsed, 0)
        except ValueError as error:
            raise ValueError(f"the expression {shown(text)}: {error}; name the modules") from error

    def matches(self, name: str) -> bool:
        """Whether `re.match` would find it at the beginning of a name."""
        if len(name) > LONGEST_NAME:
            raise ValueError(f"{shown(name)} is longer than any module's name")
        return bool(self.step(name, frozenset([0])))


@lru_cache(maxsize=4096)
def compiled(text: str) -> Pattern:
    """The expression of a text, made once."""
    return Pattern(text)


def _sequence(items: Iterable[Any], depth: int) -> Step:
    steps = [_item(code, value, depth) for code, value in items]

    def step(name: str, at: Positions) -> Positions:
        for one in steps:
            if not at:
                break
            at = one(name, at)
        return at

    return step


def _item(code: Any, value: Any, depth: int) -> Step:
    """One part; ValueError for what is not followed."""
    if code in (CODES.LITERAL, CODES.NOT_LITERAL, CODES.ANY, CODES.IN):
        return _character(_members(code, value))
    if code in (CODES.MAX_REPEAT, CODES.MIN_REPEAT):
        return _repeated(value, depth)
    if code is CODES.SUBPATTERN:
        _, more, less, inner = value
        if more or less:
            raise ValueError("flags inside are not followed")
        return _sequence(inner, depth)
    if code is CODES.BRANCH:
        ways = [_sequence(way, depth) for way in value[1]]
        return lambda name, at: frozenset().union(*(way(name, at) for way in ways))
    if code in (CODES.ASSERT, CODES.ASSERT_NOT):
        return _looking(value, code is CODES.ASSERT, depth)
    if code is CODES.AT and value in PLACES:
        place = PLACES[value]
        return lambda name, at: frozenset(p for p in at if place(name, p))
    raise ValueError(f"{str(code).lower()} is not supported")


def _character(member: Callable[[str], bool]) -> Step:
    return lambda name, at: frozenset(p + 1 for p in at if p < len(name) and member(name[p]))


def _repeated(value: Any, depth: int) -> Step:
    least, most, inner = value
    unbounded = most is CODES.MAXREPEAT
    if depth == DEEPEST or least > LARGEST_COUNT or (not unbounded and most > LARGEST_COUNT):
        raise ValueError(f"repetitions nest at most {DEEPEST} deep and count to {LARGEST_COUNT}")
    one = _sequence(inner, depth + 1)

    def step(name: str, at: Positions) -> Positions:
        for _ in range(least):
            at = one(name, at)
        reached, new, count = at, at, least
        while new and (unbounded or count < most):
            new = one(name, new) - reached
            reached, count = reached | new, count + 1
        return reached

    return step


def _looking(value: Any, wanted: bool, depth: int) -> Step:
    """A look ahead, or behind: whether the part inside matches from, or up to, a position. It counts as a repetition."""
    direction, inner = value
    if depth == DEEPEST:
        raise ValueError(f"looks ahead and repetitions nest at most {DEEPEST} deep")
    one = _sequence(inner, depth + 1)

    def found(name: str, p: int) -> bool:
        if direction > 0:
            return bool(one(name, frozenset([p])))
        return p in one(name[:p], frozenset(range(p + 1)))

    return lambda name, at: frozenset(p for p in at if found(name, p) is wanted)


def _members(code: Any, value: Any) -> Callable[[str], bool]:
    """Which characters a part takes."""
    if code is CODES.ANY:
        return lambda c: c != "\n"
    if code is CODES.LITERAL:
        return lambda c: ord(c) == value
    if code is CODES.NOT_LITERAL:
        return lambda c: ord(c) != value
    parts = [part for part in value if part[0] is not CODES.NEGATE]
    tests = [_member(kind, item) for kind, item in parts]
    wanted = len(parts) == len(value)
    return lambda c: any(test(c) for test in tests) is wanted


def _member(kind: Any, item: Any) -> Callable[[str], bool]:
    if kind is CODES.LITERAL:
        return lambda c: ord(c) == item
    if kind is CODES.RANGE:
        return lambda c: item[0] <= ord(c) <= item[1]
    if kind is CODES.CATEGORY and item in CLASSES:
        return CLASSES[item]
    raise ValueError(f"{str(item).lower()} is not supported")


def _is_word(c: str) -> bool:
    return c.isalnum() or c == "_"


def _boundary(name: str, p: int) -> bool:
    before, after = p > 0 and _is_word(name[p - 1]), p < len(name) and _is_word(name[p])
    return before is not after


def _end(name: str, p: int) -> bool:
    return p == len(name) or (p == len(name) - 1 and name[p] == "\n")


CLASSES: dict[Any, Callable[[str], bool]] = {
    CODES.CATEGORY_DIGIT: str.isdecimal, CODES.CATEGORY_NOT_DIGIT: lambda c: not c.isdecimal(),
    CODES.CATEGORY_SPACE: str.isspace, CODES.CATEGORY_NOT_SPACE: lambda c: not c.isspace(),
    CODES.CATEGORY_WORD: _is_word, CODES.CATEGORY_NOT_WORD: lambda c: not _is_word(c),
}  # fmt: skip
PLACES: dict[Any, Callable[[str, int], bool]] = {
    CODES.AT_BEGINNING: lambda name, p: p == 0,
    CODES.AT_BEGINNING_STRING: lambda name, p: p == 0,
    CODES.AT_END: _end,
    CODES.AT_END_STRING: lambda name, p: p == len(name),
    CODES.AT_BOUNDARY: _boundary,
    CODES.AT_NON_BOUNDARY: lambda name, p: not _boundary(name, p),
}
