"""Experiment `speed`: how fast the reference is on the CPU, as ratios to other libraries' functions, and import times.

No numbers are published beside these rows: the other libraries run here, in the same process. Both sides of a pair are called
in turn, after a check that ours is right; a ratio is the baseline's median time over ours, and its quantiles (20 and 80
percent) are those of the ratios of neighbouring calls. A library that is not installed is a row that says so. Threads are left
as the runtimes set them, and recorded: how many each side may use, and how many cores it kept busy. Import times are medians
over fresh processes, beyond the time of what is imported first.
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
from experiments.runs.settings import Settings
from experiments.speed import cpu_linear, cpu_rows
from experiments.speed.baselines import COMPARISONS, THREADS, Comparison, Pair
from experiments.speed.targets import IMPORT_TARGET, MISSING, TARGET_METRIC

EXPERIMENT = "speed"
TITLE = "Speed of the reference on the CPU"
COUNTS = {"quick": 2**24, "full": 2**24}
REPEATS = 15
#: Quantized layers beside dense ones: with one row of inputs, with several.
LAYERS = (*cpu_linear.LAYERS, *cpu_rows.LAYERS)
IMPORT_REPEATS = 9
#: Name: (what is imported first, what is timed).
IMPORTS = {"reference": ("numpy", "reference"), "ao_lab": ("numpy, torch", "ao_lab")}


def subject(settings: Settings) -> str:
    """What a journal can be resumed for: the seed, and the installed libraries with their versions."""
    libraries = dict.fromkeys(comparison.library for comparison in COMPARISONS if not comparison.missing)
    return "-".join(
        [f"seed{settings.seed}", *(name + importlib.metadata.version(name) for name in libraries)]
    )


def run(settings: Settings, journal: Journal | None = None) -> list[Row]:
    """Rows of all comparisons and import times."""
    journal = journal if journal is not None else Journal()
    x = np.random.default_rng(settings.seed).standard_normal(COUNTS[settings.scale], dtype=np.float32)
    x = x.reshape(-1, 4096)
    table = f"speed/{settings.scale}/random-normal"
    with bar("speed", len(COMPARISONS) + len(LAYERS) + len(IMPORTS)) as step:
        for comparison in (*COMPARISONS, *LAYERS):
            if not journal.finished(table, comparison.baseline, comparison.name):
                journal.add(rows_of(settings, comparison.name, comparison.baseline, compared(comparison, x)))
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
    """Ratio and times of a pair; of a missing library its status."""
    if comparison.missing:
        target = {TARGET_METRIC: (comparison.target, "ratio")}
        return {**target, f"{MISSING}: install {comparison.library}": (1, "")}
    pair = comparison.build(x)
    pair.check()
    ours, theirs = interleaved(pair)
    ratios = np.array(theirs) / np.array(ours)
    return {
        "ratio": (statistics.median(theirs) / statistics.median(ours), "ratio"),
        "ratio, 20%": (float(np.quantile(ratios, 0.2)), "ratio"),
        "ratio, 80%": (float(np.quantile(ratios, 0.8)), "ratio"),
        TARGET_METRIC: (comparison.target, "ratio"),
        "ours": (statistics.median(ours) * 1e3, "ms"),
        "theirs": (statistics.median(theirs) * 1e3, "ms"),
        "threads": (THREADS[comparison.runtime](), ""),
        "ours, cores busy": (cores_busy(pair.ours), ""),
        "theirs, cores busy": (cores_busy(pair.theirs), ""),
        "elements": (x.size, ""),
    }


def interleaved(pair: Pair) -> tuple[list[float], list[float]]:
    """Seconds of each call, ours and theirs in turn, without the first of each."""
    ours, theirs = [], []
    for _ in range(REPEATS + 1):
        ours.append(seconds(pair.ours))
        theirs.append(seconds(pair.theirs))
    return ours[1:], theirs[1:]


def seconds(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def cores_busy(call: Callable[[], object], times: int = 5) -> float:
    """Processor time of all threads over elapsed time, in a few calls."""
    started, used = time.perf_counter(), time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - used) / (time.perf_counter() - started)


def import_times(first: str, timed: str) -> dict[str, tuple[float, str]]:
    """Milliseconds to import `timed` after `first`, in fresh processes."""
    code = (
        f"import time, {first}; started = time.perf_counter(); import {timed}; "
        "print(time.perf_counter() - started)"
    )
    times = list(_printed(code, IMPORT_REPEATS))
    low, middle, high = np.quantile(times, (0.2, 0.5, 0.8))
    return {
        "time": (float(middle) * 1e3, "ms"),
        "time, 20%": (float(low) * 1e3, "ms"),
        "time, 80%": (float(high) * 1e3, "ms"),
        TARGET_METRIC: (IMPORT_TARGET * 1e3, "ms"),
    }


def _printed(code: str, times: int) -> Iterable[float]:
    for _ in range(times):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise ValueError(f"a fresh Python could not run {code!r}: {done.stderr.strip()}")
        yield float(done.stdout)
