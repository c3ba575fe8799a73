"""`ao-lab bench`: time the kernels on this GPU, against the fewest bytes that they must move and against baselines.

`experiments.kernels.bench` measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ao_lab.cli.terminal.interrupt import when_stopped
from ao_lab.cli.terminal.output import WrongInput, print_json, print_table
from experiments.commands.folders import paths
from experiments.kernels import bench


def run_bench(names: list[str], shapes: list[str], baselines: bool, listed: bool, as_json: bool) -> None:
    """List the kernels, measure all of them and publish, or measure some and only show them."""
    try:
        work = bench.choose(names, shapes)
    except ValueError as error:
        raise WrongInput(str(error)) from error
    if listed:
        show_list(
            [case for case in bench.listing() if case["name"] in {one[0].name for one in work}], as_json
        )
        return
    if not bench.has_device():
        raise WrongInput("bench: kernels are timed on a GPU and torch sees none here; ao-lab doctor says why")
    written: Sequence[tuple[str, str]] = ()
    if names or shapes:
        with when_stopped(lambda: "measurements of a part are not stored; the same command starts again"):
            lines = bench.part(work, with_baselines=baselines)
    else:
        folders = paths()
        with when_stopped(lambda: f"what was measured is in {folders.cache}; the same command goes on"):
            lines, written = bench.complete(with_baselines=baselines, paths=folders)
    show(lines, [bench.as_json(line) for line in lines], written, as_json)


def show_list(cases: list[dict[str, Any]], as_json: bool) -> None:
    """What can be measured."""
    if as_json:
        print_json(cases)
        return
    rows = [
        [
            case["name"],
            " ".join(case["shapes"]),
            f"{case['bytes_per_element']:.3f}",
            ", ".join(f"{metric} {value:g}" for metric, value in case["targets"].items()),
            ", ".join(case["missing"]),
        ]
        for case in cases
    ]
    print_table("Kernels", ["name", "shapes", "bytes/element", "targets", "missing"], rows, ["bytes/element"])


def show(
    lines: Sequence[Any], records: list[dict[str, Any]], written: Sequence[tuple[str, str]], as_json: bool
) -> None:
    """What was measured, and where it was written."""
    if as_json:
        print_json({"lines": records, "written": [{"what": what, "where": where} for what, where in written]})
        return
    columns = ["kernel", "shape", "us", "TB/s", "of copy", "best baseline", "target met"]
    rows = [[line.case, line.shape, *numbers(line), baseline(line), line.verdict] for line in lines]
    print_table("Bench", columns, rows, ["us", "TB/s", "of copy"])
    if written:
        print_table("Written", ["what", "where"], written)


def numbers(line: Any) -> list[str]:
    """Time, rate and fraction; nothing where they were not measured."""
    found = [line.values.get(metric) for metric in ("time", "rate", "fraction")]
    return [
        "" if value is None else f"{value:.{digits}f}" for value, digits in zip(found, (1, 2, 3), strict=True)
    ]


def baseline(line: Any) -> str:
    """The best baseline with its time over ours, and whether it is faster."""
    best = line.best_baseline
    return "" if best is None else f"{best.baseline} {best.ratio:.2f}x{' FASTER' if line.slower_than else ''}"
