"""What `tests/gpu/validate.py` knows by a name: checks that yield what is wrong, and rows of times; and one run of them.

A check is a label and a call whose result is what is wrong, a line each; what it raises is wrong too, and the others go
on. Rows of times are dictionaries with microseconds by method under "us". After `Asked.seconds` nothing new of a part
starts; what was not compared is named, and has not passed. A check whose library is not installed was not reached either.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from experiments.harness.revision import commit, versions

Check = tuple[str, Callable[[], Iterable[str] | None]]
Row = dict[str, Any]
PARTS = ("bits", "times")
#: Lines of a check that are printed.
SHOWN = 6
#: Of this process, see `Asked.shard`: where there are several, each compiles what its checks need, and nothing beforehand.
SHARD = (0, 1)
#: What a check may import and not find: modules of this project are not among them.
OWN = ("reference", "fast", "ao_lab", "experiments", "tests")


@dataclass(frozen=True)
class Asked:
    """What the command line chose. Of schemes, rows and shapes a subject has defaults; every: all variants of a kernel."""

    device: str = "cuda"
    parts: Sequence[str] = PARTS
    only: str = ""
    seconds: float = 60.0
    schemes: Sequence[str] = ()
    rows: Sequence[int] = ()
    shapes: Sequence[tuple[int, ...]] = ()
    every: bool = False
    out: Path | None = None
    #: Which of the checks: those whose number leaves the first when it is divided by the second.
    shard: tuple[int, int] = (0, 1)


@dataclass(frozen=True)
class Subject:
    """A name, what it is about, its checks, its times, and whether its checks run on a CPU too, where `fast` is the
    reference."""

    name: str
    about: str
    checks: Callable[[Asked], Iterable[Check]]
    times: Callable[[Asked], Iterator[Row]] | None = None
    on_cpu: bool = False


class Progress:
    """What a subject has found so far, printed as it comes and written into a folder where one was asked for."""

    def __init__(self, name: str, asked: Asked) -> None:
        self.name, self.asked, self.begin = name, asked, time.monotonic()
        self.done, self.wrong, self.late, self.rows = 0, list[str](), list[str](), list[Row]()
        #: Checks by the module that they lack.
        self.missing: dict[str, list[str]] = {}
        self.ended = False

    def say(self, text: str) -> None:
        """Print with the seconds that have passed."""
        sys.stdout.write(f"[{time.monotonic() - self.begin:6.1f}] {self.name}: {text}\n")
        sys.stdout.flush()

    def attempt(self, label: str, call: Callable[[], Iterable[str] | None]) -> None:
        """Make a check. SystemExit where the GPU is lost to this process."""
        begin, lost = time.monotonic(), False
        try:
            found = list(call() or ())
        except Exception as error:  # noqa: BLE001  others go on
            if module := missing_module(error):
                self.missing.setdefault(module, []).append(label)
                return
            found, lost = [described(error)], is_lost()
        self.done += 1
        self.wrong += [f"{label}: {line}" for line in found]
        took = f"{time.monotonic() - begin:.1f} s"
        self.say(
            "\n    ".join([f"{label}: {f'{len(found)} WRONG' if found else 'right'}, {took}", *found[:SHOWN]])
        )
        if lost:
            self.say("the GPU is lost to this process")
            raise SystemExit(self.verdict())
        self.write()

    @property
    def left_out(self) -> list[str]:
        """Labels of checks that were not made, for a module that is missing or for time."""
        return [*(label for labels in self.missing.values() for label in labels), *self.late]

    def add(self, row: Row) -> None:
        """Keep a row."""
        self.rows.append(row)
        self.say(told(row))
        self.write()

    def write(self) -> None:
        """NAME.json in the folder: device, what is wrong, what was left out and for which modules that are missing, what
        chose some of the checks, and the rows. ended: false until all that was asked is done, and where the GPU was lost to
        this process."""
        if self.asked.out is not None:
            about = {
                "device": device_name(self.asked.device),
                "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "commit": commit(),
                "versions": versions(self.asked.device),
                "wrong": self.wrong,
            }
            of = {"checks": self.done, "left out": self.left_out, "missing": [*self.missing]}
            content = {
                **about, **of, "chosen by": choosing(self.asked), "ended": self.ended, "times": self.rows
            }  # fmt: skip
            path = self.asked.out / f"{self.name}{shard_suffix(self.asked.shard)}.json"
            path.write_text(json.dumps(content, indent=1, default=str) + "\n")

    def verdict(self) -> int:
        """Print the sum; 1 where something was wrong, 2 where something was left out, else 0."""
        self.say(f"{self.done} checks, {len(self.wrong)} wrong, {len(self.rows)} rows of times")
        for module, labels in self.missing.items():
            self.say(f"NOT REACHED, pip install {module}: {'; '.join(labels)}")
        if self.late:
            self.say(f"NOT REACHED, no time: {'; '.join(self.late)}")
        self.write()
        return 1 if self.wrong else 2 if self.left_out else 0


def choosing(asked: Asked) -> str:
    """The arguments that choose some of a subject's checks, shares aside; nothing for all checks."""
    given = {"only": [asked.only] if asked.only else [], "schemes": asked.schemes, "rows": asked.rows}
    given["shapes"] = ["x".join(map(str, one)) for one in asked.shapes]
    words = (f"--{name} {' '.join(map(str, values))}" for name, values in given.items() if values)
    return " ".join([*words, *([] if "bits" in asked.parts else ["--part times"])])


def shard_suffix(shard: tuple[int, int]) -> str:
    """What names a shard's file; nothing for all checks."""
    return "" if shard[1] == 1 else f".{shard[0]}-of-{shard[1]}"


def perform(subject: Subject, asked: Asked) -> int:
    """All that was asked of a subject; see `Progress.verdict`."""
    global SHARD
    progress, SHARD = Progress(subject.name, asked), asked.shard
    if "bits" in asked.parts:
        mine = (
            each for at, each in enumerate(subject.checks(asked)) if at % asked.shard[1] == asked.shard[0]
        )
        for label, call in mine:
            if asked.only not in label:
                continue
            if time.monotonic() - progress.begin > asked.seconds:
                progress.late.append(label)
            else:
                progress.attempt(label, call)
    if "times" in asked.parts and subject.times is not None and asked.device != "cpu":
        end = time.monotonic() + asked.seconds
        for row in subject.times(asked):
            progress.add(row)
            if time.monotonic() > end:
                progress.say("the time is over: rows that would follow are not measured")
                break
    progress.ended = True
    return progress.verdict()


def told(row: Row) -> str:
    """A row as a line: what it is of, microseconds by method, and how many times as fast as the first method the rule's is."""
    about = " ".join(
        f"{key} {value}" for key, value in row.items() if not isinstance(value, dict) and value is not None
    )
    times = row.get("us", {})
    times = times if isinstance(times, dict) else {}
    each = "  ".join(f"{name} {us:.2f}" for name, us in times.items())
    text = f"{about}: {each}" if each else about
    if row.get("rule") in times:
        text += f"  (rule x{next(iter(times.values())) / times[row['rule']]:.3f})"
    return text + "".join(f"  FAILED {name}: {why}" for name, why in row.get("failed", {}).items())


def described(error: Exception) -> str:
    """The first line of what was raised, and where."""
    places = traceback.extract_tb(error.__traceback__)
    where = " < ".join(f"{one.name}:{one.lineno}" for one in reversed(places[-3:]))
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]} ({where})"


def missing_module(error: Exception) -> str:
    """The library that an exception says is not installed; nothing for another exception, a module of this project, or one
    that a library which is installed does not have."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return "" if name in OWN or not name or find_spec(name) is not None else name


def is_lost() -> bool:
    """Whether nothing of this process runs on the GPU any more, as after an illegal access."""
    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def device_name(device: str) -> str:
    """The GPU's, or the device's."""
    return torch.cuda.get_device_name() if device != "cpu" else device


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Shapes, dtypes and all bits, those of NaN and of zeros too, wherever the tensors lie; compared there where both do."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    place = one.device if one.device == other.device else "cpu"
    pair = (t.detach().to(place).contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(*pair)


def differs(label: str, got: Any, wanted: torch.Tensor) -> Iterator[str]:
    """A line where a tensor has other values (a NaN among them) than another one, or is none."""
    if got is None:
        yield f"{label}: the kernel does not take this"
    elif got.shape != wanted.shape or got.dtype != wanted.dtype:
        yield f"{label}: {got.dtype} of shape {tuple(got.shape)}, not {wanted.dtype} of shape {tuple(wanted.shape)}"
    elif not torch.equal(got, wanted.to(got.device)):
        places = (got != wanted.to(got.device)).nonzero()
        yield f"{label}: {len(places)} of {got.numel()} differ, first at {places[:3].tolist()}"


def beyond(label: str, got: Any, truth: torch.Tensor, allowed: torch.Tensor) -> Iterator[str]:
    """A line where results are farther from float64 ones than allowed, or not numbers, or are none."""
    if got is None:
        yield f"{label}: the kernel does not take this"
        return
    far = ~((got.to(truth.device).double() - truth).abs() <= allowed)
    if far.any():
        yield f"{label}: {int(far.sum())} of {got.numel()} outside of the bound, first at {far.nonzero()[:3].tolist()}"


def in_threads(function: Callable[[Any], object], tasks: Iterable[Any]) -> None:
    """Calls side by side that let other threads run, as NVRTC does."""
    if SHARD[1] > 1:
        return
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(function, dict.fromkeys(tasks)))


def in_processes(function: Callable[[Any], object], tasks: Iterable[Any]) -> None:
    """Calls side by side of what takes seconds each, such as Triton's compiler, into caches on the disk. Failures show again
    where a kernel is used."""
    if SHARD[1] > 1:
        return
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), get_context("spawn")) as pool:
        futures = [pool.submit(function, task) for task in dict.fromkeys(tasks)]
    failed = [str(one.exception())[:300] for one in futures if one.exception()]
    if failed:
        print(f"{len(failed)} of {len(futures)} were not compiled: {failed[0]}", flush=True)


__all__ = [
    "PARTS", "Asked", "Check", "Progress", "Row", "Subject", "beyond", "described", "differs", "in_processes", "in_threads",
    "perform", "same_bits", "told",
]  # fmt: skip
