"""How long the tests take by folder, beside the budget of each, and the one limit on the time of a whole run.

A run of all tests by day (`make test`) ends with the core-seconds of each folder of `tests/time_budget.toml`, the slowest tests
and the time by the clock; xdist's controller adds up what its workers report. No test fails by time. `--time-limit SECONDS`,
for `.ci/run`, fails a run that took longer: on a slower machine, which the time of a fixed loop tells, more in proportion.

`--part K/N`: the K-th of N parts of the selected tests, for suites that are run a part a day (`make nightly PART=3/14`).

A test's part is a hash of its node id, so it stays where it is when others come and go.
"""

import os
import time
import tomllib
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

BUDGET = Path(__file__).parents[2] / "time_budget.toml"
#: Seconds of `calibration_loop` on a machine of CI with nothing beside it (2 cores of an AMD EPYC, Python 3.11, NumPy 2.4),
#: 2026-11-28.
REFERENCE_SECONDS = 0.85
SLOWEST = 20
#: The variable under which all cases of a test run.
ALL_CASES = "AO_LAB_ALL_CASES"
ELSEWHERE = "(no budget)"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The limit, which is off unless asked for, and the part, read once here and once in every worker."""
    parser.addoption("--part", type=parsed, metavar="K/N", help="the K-th of N parts of the selected tests")
    parser.addoption(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="fail a run that takes longer by the clock; more where the machine is slower than those of CI",
    )


def leave_to_the_night(items: list[pytest.Item]) -> None:
    """Mark all cases of a test `nightly` but those that `cases_by_day` takes, evenly, of those that are not so already.

    All run where `ALL_CASES` is set, as by `make mutation`.
    """
    if ALL_CASES in os.environ:
        return
    most, cases = cases_by_day(), dict[str, list[pytest.Item]]()
    for item in items:
        path, _, name = item.nodeid.partition("[")[0].partition("::")
        key = f"{path.removeprefix('tests/')}::{name}"
        if key in most and item.get_closest_marker("nightly") is None:
            cases.setdefault(key, []).append(item)
    for key, found in cases.items():
        for item in set(found) - set(evenly(found, most[key])):
            item.add_marker("nightly")


def cases_by_day() -> dict[str, int]:
    """The table, by path below tests/ and name."""
    table: dict[str, int] = tomllib.loads(BUDGET.read_text())["cases_by_day"]
    return table


def evenly(items: list[pytest.Item], count: int) -> list[pytest.Item]:
    """So many of a list, the first among them, as far apart as they can be; all where they are no more."""
    if count >= len(items):
        return items
    return [items[at * (len(items) - 1) // max(count - 1, 1)] for at in range(count)]


@pytest.hookimpl(tryfirst=True)  # the loop has the machine to itself: xdist has no workers yet
def pytest_configure(config: pytest.Config) -> None:
    """Watch the run, in the process that hears of every test."""
    if not hasattr(config, "workerinput"):
        limit = config.getoption("time_limit")
        factor = 1.0 if limit is None else slowness(best_of_three())
        config.pluginmanager.register(Watch(limit, factor, is_whole(config)), "time-budget-watch")


def is_whole(config: pytest.Config) -> bool:
    """Whether the run has every test of the day: no path, no word and no marker but the default selects."""
    everywhere = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return everywhere and not config.option.keyword and config.option.markexpr == "not nightly"


class Watch:
    """Hears how long each test took, and says so at the end."""

    def __init__(self, limit: float | None, factor: float, whole: bool) -> None:
        self.limit, self.factor, self.whole = limit, factor, whole
        self.seconds: Counter[str] = Counter()
        self.start = time.perf_counter()
        self.wall = 0.0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of a test: set-up, call or tear-down."""
        self.seconds[report.nodeid] += report.duration

    @pytest.hookimpl(tryfirst=True)  # before the terminal sums up
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A run over the limit fails, whatever its tests say."""
        self.wall = time.perf_counter() - self.start
        if too_long(self.wall, self.limit, self.factor) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The table of folders, the slowest tests, and the limit."""
        if self.whole:
            terminalreporter.section("time by folder")
            budget = tomllib.loads(BUDGET.read_text())["core_seconds"]
            terminalreporter.write_line("\n".join(table(self.seconds, budget)))
            terminalreporter.write_line("\n".join(slowest(self.seconds)))
            terminalreporter.write_line(f"wall time of the run: {self.wall:.0f} s{told(self.factor)}")
        if message := too_long(self.wall, self.limit, self.factor):
            terminalreporter.write_line(message, red=True, bold=True)


def table(seconds: Mapping[str, float], budget: Mapping[str, float]) -> Iterator[str]:
    """A line for each folder with a budget, and one for tests outside them: tests, core-seconds, budget."""
    taken, tests = Counter[str](), Counter[str]()
    for nodeid, spent in seconds.items():
        folder = folder_of(nodeid, budget)
        taken[folder] += spent
        tests[folder] += 1
    yield f"{'folder':24}{'tests':>8}{'core-seconds':>14}{'budget':>8}"
    for folder in [*budget, *([ELSEWHERE] if tests[ELSEWHERE] else [])]:
        allowed = budget.get(folder, 0)
        over = "  over" if taken[folder] > allowed else ""
        yield f"{folder:24}{tests[folder]:8}{taken[folder]:14.0f}{allowed:8}{over}"
    yield f"{'all':24}{tests.total():8}{taken.total():14.0f}{sum(budget.values()):8}"


def folder_of(nodeid: str, budget: Mapping[str, float]) -> str:
    """The folder of the budget that a test counts for: the longest that it stands in."""
    path = nodeid.split("::")[0].removeprefix("tests/")
    return max((folder for folder in budget if path.startswith(f"{folder}/")), key=len, default=ELSEWHERE)


def slowest(seconds: Mapping[str, float]) -> Iterator[str]:
    """The tests that took longest, the longest first."""
    ranked = sorted(seconds.items(), key=lambda item: -item[1])[:SLOWEST]
    yield from (f"{spent:8.1f} s  {nodeid}" for nodeid, spent in ranked)


def too_long(wall: float, limit: float | None, factor: float) -> str | None:
    """What to say of a run that took longer than it may."""
    if limit is None or wall <= limit * factor:
        return None
    return (
        f"the run took {wall:.0f} s and may take {limit * factor:.0f} s (--time-limit {limit:g}, times {factor:.2f} for this "
        "machine): see `time by folder` for what stands above its budget"
    )


def told(factor: float) -> str:
    """A machine that is slower than those of the budgets, beside a run's time; nothing of others, or where nobody measured."""
    if factor <= 1:
        return ""
    return f"; this machine takes {factor:.2f} times as long as one of CI, which the budgets are of"


def slowness(measured: float) -> float:
    """How much longer this machine may take than one of CI; a faster one gets no less."""
    return max(1.0, measured / REFERENCE_SECONDS)


def best_of_three() -> float:
    """Seconds of the loop on this machine, as quick as it can."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        calibration_loop()
        times.append(time.perf_counter() - start)
    return min(times)


def calibration_loop(rounds: int = 100) -> float:
    """Always the same work, of the kind that tests do: objects of Python, and arrays in and out of the cache."""
    counts: dict[int, int] = {}
    small, large = np.linspace(0.5, 1.5, 1 << 12), np.linspace(0.5, 1.5, 1 << 20)
    for _ in range(rounds):
        for i in range(100_000):
            counts[i * 2_654_435_761 % 4093] = i
        for _ in range(200):
            small = np.sqrt(small * 1.25)
        large = np.sqrt(large * 1.25)
    return float(small[0] + large[0]) + len(counts)


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
