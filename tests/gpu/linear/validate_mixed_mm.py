"""On a Hopper GPU: `sm90_w4a16_gemm` bit for bit, a hundred times, and its times beside torch's bfloat16 product.

    PYTHONPATH=. python tests/gpu/linear/validate_mixed_mm.py [--bits 40] [--times 60] [--cases 0 1] [--all]
        [--schemes int4_g128] [--rows 256 1024] [--shapes 0 1] [--scaled 15]
        [--compared PATH [--seconds 150] [--parallel 16]]

--bits, --times: seconds after which nothing of a part starts (0: leave it out). --cases: numbers of cases of
`mixed/bits.py`. --all: every variant that the rule has, not the one it takes. Prints as it goes, writes $OUT/mixed_mm.json.
--scaled: seconds for scales of rows (`mixed/row_scales.py`), their bits, then times of --schemes.
--compared: nothing but times of variants, of `linear_small`, the dense route and bfloat16 (`mixed/compared.py`, by default all
of its schemes and rows), written to PATH after each; nothing starts after --seconds, what is compiled before included. Exits
with 1 on any difference.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from fast.gemm.small_m_or_gemm import MOST
from fast.kernels.sm90_w4a16_gemm.host import NAME
from fast.kernels.sm90_w4a16_gemm.select import candidates, choose
from fast.kernels.sm90_w4a16_gemm.variants import sources, with_scales
from fast.launch.nvrtc import cached_cubin
from tests.gpu.linear.mixed import compared, row_scales
from tests.gpu.linear.mixed.bits import CASES, wrong_of
from tests.gpu.linear.mixed.compared import weight_named
from tests.gpu.linear.mixed.times import Weights
from tests.gpu.linear.small import weights

BEGIN = time.monotonic()
SHAPES = ((14336, 4096), (4096, 14336), (4096, 4096), (28672, 4096), (6144, 4096))
#: Of whole tiles, and those whose last tile would have few.
ROWS = (160, 256, 300, 512, 600, 860, 1024, 1500, 2048, 8192)


def say(text: str) -> None:
    """With the seconds that have passed."""
    sys.stdout.write(f"[{time.monotonic() - BEGIN:6.1f}] {text}\n")
    sys.stdout.flush()


def compile_all(options: Any) -> None:
    """Variants of all that is compared or timed, on all cores; nothing of a GPU is touched."""
    jobs = set()
    if options.bits > 0:
        for case in (CASES[at] for at in options.cases):
            weight = weight_named(case[0])
            some = candidates(case[2], case[1][1], weight) if options.all else chosen(case)
            jobs |= {(one, weight, str(case[3]).removeprefix("torch.")) for one in some}
    for case in row_scales.CASES if options.scaled > 0 else ():
        weight = weight_named(case[0])
        jobs |= {
            (with_scales(one, weight), weight, str(case[3]).removeprefix("torch.")) for one in chosen(case)
        }
    for name in options.schemes if options.times > 0 else ():
        weight = weight_named(name)
        for length in {SHAPES[at][1] for at in options.shapes}:
            jobs |= {
                (one, weight, "bfloat16") for rows in options.rows for one in candidates(rows, length, weight)
            }
    with multiprocessing.get_context("fork").Pool(min(16, os.cpu_count() or 1)) as pool:
        pool.map(compiled, sorted(jobs), chunksize=1)
    say(f"compiled {len(jobs)} variants")


def chosen(case: tuple[Any, ...]) -> list[Any]:
    """The rule's variants of a case of bits, and of all columns of its weight."""
    name, shape, count = case[:3]
    return [choose(rows, *shape, weight_named(name)) for rows in (count, shape[1])]


def compiled(job: Any) -> None:
    """Into the cache on the disk."""
    cached_cubin(*sources(*job, job[2]), name=NAME)


def compare(options: Any) -> list[str]:
    """What is wrong."""
    end, wrong = time.monotonic() + options.bits, list[str]()
    for at in options.cases:
        if time.monotonic() > end:
            say(f"not compared: {CASES[at]}")
            continue
        found = list(wrong_of(CASES[at], options.all))
        say("\n    ".join([f"{CASES[at]}: {len(found)} wrong", *found[:8]]))
        wrong += found
    return wrong


def compare_scaled(options: Any) -> list[str]:
    """What is wrong of scales of rows; times of one shape."""
    end, wrong = time.monotonic() + options.scaled, list[str]()
    for case in row_scales.CASES:
        if time.monotonic() > end:
            say(f"not compared: scales of rows, {case}")
            continue
        found = list(row_scales.wrong_of(case))
        say("\n    ".join([f"scales of rows, {case}: {len(found)} wrong", *found[:8]]))
        wrong += found
    for name in options.schemes:
        made = Weights(name, SHAPES[0])
        for count in (64, 128, 256):
            if time.monotonic() < end:
                say(row_scales.told(made, count))
    return wrong


def measure(options: Any, found: dict[str, Any]) -> None:
    """Times, written after each."""
    end = time.monotonic() + options.times
    for name in options.schemes:
        for shape in (SHAPES[at] for at in options.shapes):
            made = Weights(name, shape)
            for count in options.rows:
                if time.monotonic() > end:
                    say(f"not timed: {name} {shape} {count} rows")
                    continue
                text, took = made.told(count, options.all)
                say(text)
                found["times"].append({"scheme": name, "shape": shape, "rows": count, "times": took})
                written(found)


def compare_kernels(options: Any) -> None:
    """Times of all cells that there is time for, written to a file after each."""
    schemes = options.schemes or compared.SCHEMES
    cells = list(compared.cells(schemes, compared.SHAPES, options.rows or compared.ROWS))
    compile_cells(cells, options.parallel)
    rows: list[dict[str, Any]] = []
    made = None
    for name, shape, count in cells:
        if time.monotonic() - BEGIN > options.seconds:
            say(
                f"not timed: {name} {shape} {count} rows and what follows, {len(cells) - len(rows)} of {len(cells)}"
            )
            return
        if made is None or (made.name, made.shape) != (name, shape):
            made = compared.Weights(name, shape)
        rows.append(compared.row_of(made, count))
        say(compared.told(rows[-1]))
        found = {"device": torch.cuda.get_device_name(), "rows": rows}
        options.compared.write_text(json.dumps(found, indent=1))


def compile_cells(cells: list[Any], parallel: int) -> None:
    """Variants of `sm90_w4a16_gemm` and kernels of `linear_small`, on all cores; nothing of a GPU is touched."""
    own = {
        (one, weight_named(name), "bfloat16")
        for name, shape, count in cells
        for one in compared.variants_of(name, shape, count)
    }
    small = [
        (name, shape, count, None, "bfloat16", False) for name, shape, count in cells if count <= MOST
    ]  # fmt: skip
    with multiprocessing.get_context("fork").Pool(parallel) as pool:
        first = pool.map_async(compiled, sorted(own), chunksize=1)
        wrong = pool.map(weights.compiled, small, chunksize=1)
        first.get()
    say("\n".join([f"compiled {len(own)} variants, {len(small)} of linear_small", *filter(None, wrong)]))


def written(found: dict[str, Any]) -> None:
    """Into $OUT, where there is one."""
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "mixed_mm.json").write_text(json.dumps(found, indent=1))


def parsed(arguments: list[str] | None) -> Any:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bits", type=float, default=40.0)
    parser.add_argument("--times", type=float, default=60.0)
    parser.add_argument("--scaled", type=float, default=15.0)
    parser.add_argument("--cases", type=int, nargs="*", default=range(len(CASES)))
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--schemes", nargs="*", choices=tuple(weights.KINDS))
    parser.add_argument("--rows", type=int, nargs="*")
    parser.add_argument("--shapes", type=int, nargs="*", default=range(len(SHAPES)), help="their numbers")
    parser.add_argument("--compared", type=Path, metavar="PATH")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--parallel", type=int, default=min(16, os.cpu_count() or 1))
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Compare, then time."""
    options = parsed(arguments)
    if options.compared is not None:
        compare_kernels(options)
        return 0
    options.schemes, options.rows = options.schemes or ("int4_g128",), options.rows or ROWS
    compile_all(options)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "wrong": [], "times": []}
    say(found["device"])
    if options.bits > 0:
        found["wrong"] = compare(options)
        written(found)
    if options.scaled > 0:
        found["wrong"] += compare_scaled(options)
        written(found)
    if options.times > 0:
        measure(options, found)
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
