"""Experiment `speed`: how fast the reference is on the CPU, as ratios to libraries that people use, in one run.

Both sides of a pair are called in turn, after a check that ours is right; a ratio is the peer's median time over ours, and its
quantiles (20 and 80 percent) are those of the ratios of neighbouring calls. A peer that is not installed leaves its
rows missing but for one that says so. Threads are left as the runtimes set them, and recorded: how many each side may use, and
how many cores it kept busy. Import times are medians over fresh processes, beyond that of what is imported first.
"""

from __future__ import annotations

import importlib.metadata
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable

import numpy as np

from experiments.harness.progress import bar
from experiments.harness.rows import ROOT, Journal, Row
from experiments.harness.settings import Settings
from experiments.speed.baselines import COMPARISONS, THREADS, Comparison, Pair
from experiments.speed.cpu_linear import LAYERS

EXPERIMENT = "speed"
TITLE = "Speed of the reference on the CPU"
COUNTS = {"quick": 2**24, "full": 2**24}
REPEATS = 15
IMPORT_REPEATS = 9
# name: (what is imported first, what is timed); the bar is 150 ms beyond the first.
IMPORTS = {"reference": ("numpy", "reference"), "ao_lab": ("numpy, torch", "ao_lab")}
IMPORT_BAR = 0.150


def subject(settings: Settings) -> str:
    """What the rows are about: random numbers of a seed, and the peers that are installed, with their versions."""
    peers = dict.fromkeys(comparison.needs for comparison in COMPARISONS if not comparison.missing)
    return "-".join([f"seed{settings.seed}", *(name + importlib.metadata.version(name) for name in peers)])


def run(settings: Settings, journal: Journal | None = None) -> list[Row]:
    """Rows of all comparisons and import times."""
    journal = journal if journal is not None else Journal()
    x = np.random.default_rng(settings.seed).standard_normal(COUNTS[settings.scale], dtype=np.float32)
    x = x.reshape(-1, 4096)
    table = f"speed/{settings.scale}/random-normal"
    with bar("speed", len(COMPARISONS) + len(LAYERS) + len(IMPORTS)) as step:
        for comparison in (*COMPARISONS, *LAYERS):
            if not journal.finished(table, comparison.peer, comparison.name):
                journal.add(rows_of(settings, comparison.name, comparison.peer, compared(comparison, x)))
            step(comparison.name)
        for name, (first, timed) in IMPORTS.items():
            method = f"import {name}"
            if not journal.finished(table, f"beyond {first}", method):
                journal.add(rows_of(settings, method, f"beyond {first}", import_times(first, timed)))
            step(method)
    return journal.rows


def rows_of(settings: Settings, method: str, setting: str, values: dict[str, tuple[float, str]]) -> list[Row]:
    """Rows of one method."""
    return [
        settings.row(EXPERIMENT, "speed", "random-normal", setting, method, metric, value, unit)
        for metric, (value, unit) in values.items()
    ]


def compared(comparison: Comparison, x: np.ndarray) -> dict[str, tuple[float, str]]:
    """Ratio and times of a pair, or one row that says that the peer is missing."""
    if comparison.missing:
        return {"bar": (comparison.bar, "ratio"), f"peer missing: install {comparison.needs}": (1, "")}
    pair = comparison.make(x)
    pair.check()
    ours, theirs = interleaved(pair)
    ratios = np.array(theirs) / np.array(ours)
    return {
        "ratio": (statistics.median(theirs) / statistics.median(ours), "ratio"),
        "ratio, 20%": (float(np.quantile(ratios, 0.2)), "ratio"),
        "ratio, 80%": (float(np.quantile(ratios, 0.8)), "ratio"),
        "bar": (comparison.bar, "ratio"),
        "ours": (statistics.median(ours) * 1e3, "ms"),
        "theirs": (statistics.median(theirs) * 1e3, "ms"),
        "threads": (THREADS[comparison.runtime](), ""),
        "ours, cores busy": (cores_busy(pair.ours), ""),
        "theirs, cores busy": (cores_busy(pair.theirs), ""),
        "elements": (x.size, ""),
    }


def interleaved(pair: Pair) -> tuple[list[float], list[float]]:
    """Seconds of each call, ours and theirs in turn, the first of each dropped."""
    ours, theirs = [], []
    for _ in range(REPEATS + 1):
        ours.append(seconds(pair.ours))
        theirs.append(seconds(pair.theirs))
    return ours[1:], theirs[1:]


def seconds(call: Callable[[], object]) -> float:
    """Time of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def cores_busy(call: Callable[[], object], times: int = 5) -> float:
    """Processor time of all threads over time passed, in a few calls."""
    passed, used = time.perf_counter(), time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - used) / (time.perf_counter() - passed)


def import_times(first: str, timed: str) -> dict[str, tuple[float, str]]:
    """Milliseconds to import `timed` after `first`, in fresh processes."""
    code = (
        f"import time, {first}; started = time.perf_counter(); import {timed}; "
        "print(time.perf_counter() - started)"
    )
    found = list(_printed(code, IMPORT_REPEATS))
    low, middle, high = np.quantile(found, (0.2, 0.5, 0.8))
    return {
        "time": (float(middle) * 1e3, "ms"),
        "time, 20%": (float(low) * 1e3, "ms"),
        "time, 80%": (float(high) * 1e3, "ms"),
        "bar": (IMPORT_BAR * 1e3, "ms"),
    }


def _printed(code: str, times: int) -> Iterable[float]:
    for _ in range(times):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise ValueError(f"a fresh Python could not run {code!r}: {done.stderr.strip()}")
        yield float(done.stdout)
