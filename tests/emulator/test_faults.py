"""A planted fault counts as seen only where it was planted, alone makes the result wrong, and leaves a source that compiles."""

import pytest

from fast.kernels.hopper.nvrtc import CompileError
from tests.emulator.faults import assert_seen

SOURCE = "y = a + b;"
FAULT = ("a + b", "a - b")


def compares(way, change):
    return change(SOURCE) == SOURCE


def compares_one_way(way, change):
    return change(SOURCE) == SOURCE or way


def raises(way, change):
    if change(SOURCE) != SOURCE:
        raise IndexError(SOURCE)
    return True


@pytest.mark.parametrize("is_right", [compares, compares_one_way, raises])
def test_another_result_and_none_are_seen(is_right):
    assert_seen(FAULT, is_right)


def ignores_the_change(way, change):
    return True


def is_always_wrong(way, change):
    return change(SOURCE) is None


def compares_nothing(way, change):
    return bool(change(SOURCE))


@pytest.mark.parametrize(
    ("fault", "is_right", "why"),
    [
        (("a * b", "a / b"), compares, "the source has no 'a \\* b'"),
        (("a + b", "a + b"), compares, "is no fault"),
        (FAULT, ignores_the_change, "no source was changed"),
        (FAULT, compares_nothing, "nothing shows 'a - b'"),
        (FAULT, is_always_wrong, "without a fault it is not right either"),
    ],
)
def test_what_shows_nothing_is_refused(fault, is_right, why):
    with pytest.raises(AssertionError, match=why):
        assert_seen(fault, is_right)


def does_not_compile(way, change):
    if change(SOURCE) != SOURCE:
        raise CompileError(SOURCE)
    return True


def test_a_source_that_does_not_compile_is_an_error():
    with pytest.raises(CompileError):
        assert_seen(FAULT, does_not_compile)
