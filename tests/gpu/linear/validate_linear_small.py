"""On a GPU: `linear_small` exact on integers, within its bound on others, the same bits twenty times; then its times.

    PYTHONPATH=. python tests/gpu/linear/validate_linear_small.py [--bits 40] [--times 120] [--schemes int4_g128 int8_rowwise]
        [--compared mxfp4 nvfp4] [--rows 1 16] [--shapes 0 1] [--candidates 12] [--whole 4] [--tensor]

Kernels are compiled on all cores first, without the GPU. --bits, --times: seconds after which nothing of a part starts (0:
leave it out), compilation included. --schemes: those that are timed; --compared: those of --bits, by
default all. --candidates: tiles that are timed of each number of rows; --whole: that are compared on
whole layers. --tensor: first layers of quantize_ with preshuffled weights (`small/tensors.py`), 40 seconds, and two
weights in one launch (`small/pairs.py`) with their times, 20; with --bits 0 --times 0 nothing else. --pairs: the latter
alone. Prints as it goes, writes $OUT/linear_small.json after every row. Exits with 1 on any difference, 2
where not all was compared.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Container, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.gpu.linear.small import bits, pairs, tensors, weights
from tests.gpu.linear.small import times as speed

BEGIN = time.monotonic()
#: Schemes in the order in which they are timed.
SCHEMES = ("int4_g128", "int8_rowwise", "int4_g32", "fp8_rowwise", "int4_g128_asymmetric")


def say(text: str) -> None:
    """With the seconds that have passed."""
    sys.stdout.write(f"[{time.monotonic() - BEGIN:6.1f}] {text}\n")
    sys.stdout.flush()


def said(text: str) -> str:
    """The same."""
    say(text)
    return text


def submitted(pool: ProcessPoolExecutor, tasks: list[Any]) -> list[Future[str]]:
    """Compilations, side by side, in this order."""
    return [pool.submit(weights.compiled, task) for task in dict.fromkeys(tasks)]


def compile_all(futures: list[Future[str]], seconds: float) -> None:
    """Wait; what is late is compiled where it is called."""
    begin, wrong = time.monotonic(), 0
    try:
        for future in as_completed(futures, timeout=max(0.1, seconds)):
            if future.result():
                wrong += 1
                say(f"WRONG {future.result()}")
    except TimeoutError:
        for future in futures:
            future.cancel()
    done = sum(future.done() and not future.cancelled() for future in futures)
    say(f"compiled {done} of {len(futures)} calls, waited {time.monotonic() - begin:.1f} s, {wrong} failed")


def grouped(tasks: list[Any]) -> Iterator[list[Any]]:
    """Tasks of one weight."""
    for _, each in groupby(tasks, key=lambda task: task[:2]):
        yield list(each)


def compare(
    pool: ProcessPoolExecutor, seconds: float, most: int, names: Container[str]
) -> tuple[list[str], list[str]]:
    """What is wrong of these schemes, and what no time was left for."""
    end = time.monotonic() + seconds
    odd, whole = bits.odd_tasks(names), bits.whole_tasks(most, names)
    compile_all(submitted(pool, [*odd, *whole]), seconds * 0.6)
    parts: list[tuple[str, Callable[..., Iterator[str]], list[Any]]] = []
    for tasks in grouped(odd):
        parts += [("exact", bits.wrong_of, tasks), ("bound", bits.outside_of, tasks)]
    parts += [("exact", bits.wrong_of, tasks) for tasks in grouped(whole)]
    wrong, late = [], []
    for what, check, tasks in parts:
        label = f"{what} {tasks[0][0]} {tasks[0][1]}, {len(tasks)} calls"
        if time.monotonic() > end:
            late.append(label)
            continue
        try:
            found = list(check(tasks))
        except Exception as error:  # noqa: BLE001  others go on
            found = [f"{label}: {type(error).__name__}: {str(error)[-300:]}"]
        say("\n    ".join([f"{label}: {len(found)} wrong", *found[:6]]))
        wrong += found
    return wrong, late


def look_at_tensors(alone: bool) -> list[str]:
    """What is wrong with layers of preshuffled weights, and with two at once. alone: these only."""
    wrong: list[str] = []
    for label, check in (*(() if alone else tensors.checks()), *pairs.checks()):
        try:
            found = list(check)
        except Exception as error:  # noqa: BLE001  others go on
            found = [f"{label}: {type(error).__name__}: {str(error)[-600:]}"]
        say("\n    ".join([f"tensor {label}: {len(found)} wrong", *found[:6]]))
        wrong += found
    return wrong


def measure(pool: ProcessPoolExecutor, options: Any, found: dict[str, Any]) -> None:
    """Times, written after each."""
    end = time.monotonic() + options.times
    shapes = [speed.SHAPES[at] for at in options.shapes]
    compiling = {
        name: submitted(pool, [
            (name, shape, count, tiling, "bfloat16", False)
            for shape in shapes for count in options.rows
            for tiling in weights.tilings(name, shape, count, options.candidates)
        ])
        for name in options.schemes
    }  # fmt: skip
    for name, futures in compiling.items():
        # Those of the schemes behind go on while this one is timed.
        compile_all(futures, 0.6 * (end - time.monotonic()))
        for shape in shapes:
            time_shape(name, shape, options, found, end)


def time_shape(name: str, shape: tuple[int, int], options: Any, found: dict[str, Any], end: float) -> None:
    """All numbers of rows of a shape."""
    if time.monotonic() > end:
        say(f"not timed: {name} {shape}")
        return
    size = weights.filled_weight(name, shape).nbytes
    arranged = speed.several(lambda: weights.filled_weight(name, shape), size)
    peers = speed.Peers(name, shape)
    for count in options.rows:
        if time.monotonic() > end:
            say(f"not timed: {name} {shape} {count} rows")
            continue
        row = speed.timed(name, shape, count, arranged, peers, options.candidates)
        say(speed.told(row))
        found["times"].append(row)
        written(found)


def written(found: dict[str, Any]) -> None:
    """Into $OUT, where there is one."""
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "linear_small.json").write_text(json.dumps(found, indent=1))


def parsed(arguments: list[str] | None) -> Any:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bits", type=float, default=40.0)
    parser.add_argument("--times", type=float, default=120.0)
    parser.add_argument("--tensor", action="store_true")
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--schemes", nargs="*", default=SCHEMES, choices=tuple(weights.KINDS))
    parser.add_argument(
        "--compared", nargs="*", choices=tuple(weights.KINDS), help="schemes of --bits; all of them"
    )
    parser.add_argument("--rows", type=int, nargs="*", default=speed.COUNTS)
    parser.add_argument(
        "--shapes", type=int, nargs="*", default=range(len(speed.SHAPES)), help="their numbers"
    )
    parser.add_argument("--candidates", type=int, default=12)
    parser.add_argument("--whole", type=int, default=4)
    parser.add_argument("--workers", type=int, default=min(32, os.cpu_count() or 1))
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Compare, then time."""
    options = parsed(arguments)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "wrong": [], "late": [], "times": []}
    say(f"{found['device']}, {options.workers} processes compile")
    os.environ.setdefault("OMP_NUM_THREADS", "4")
    if options.tensor or options.pairs:
        found["wrong_tensors"] = look_at_tensors(not options.tensor)
        found["pairs"] = [*map(said, pairs.lines())]
        written(found)
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
        if options.bits > 0:
            found["wrong"], found["late"] = compare(
                pool, options.bits, options.whole, options.compared or weights.KINDS
            )
            say(f"{len(found['wrong'])} wrong, not compared: {found['late'] or 'nothing'}")
            written(found)
        if options.times > 0:
            measure(pool, options, found)
        pool.shutdown(wait=False, cancel_futures=True)
    return 1 if found["wrong"] or found.get("wrong_tensors") else 2 if found["late"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
