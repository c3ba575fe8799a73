"""`--part K/N`: the K-th of N parts of the selected tests, for suites that are run a part a day (`make nightly PART=3/7`).

A test's part is a hash of its node id, so it stays where it is when others come and go.
"""

import zlib

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option, read once here and once in every worker."""
    parser.addoption("--part", type=parsed, metavar="K/N", help="the K-th of N parts of the selected tests")


def parsed(text: str) -> tuple[int, int]:
    """K and N of `K/N`."""
    k, slash, n = text.partition("/")
    numbers = k.isdecimal() and n.isdecimal()
    if not (slash and numbers and 1 <= int(k) <= int(n)):
        raise pytest.UsageError(f"--part {text}: give K/N with 1 <= K <= N, for instance --part 3/7")
    return int(k), int(n)


def is_in(nodeid: str, k: int, n: int) -> bool:
    """Whether a test is one of the K-th of N parts."""
    return zlib.crc32(nodeid.encode()) % n == k - 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave what is not in the part."""
    if part := config.getoption("part"):
        left = [item for item in items if not is_in(item.nodeid, *part)]
        items[:] = [item for item in items if is_in(item.nodeid, *part)]
        config.hook.pytest_deselected(items=left)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A part without a test is no mistake."""
    if session.config.getoption("part") and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK
