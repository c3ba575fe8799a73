"""`ao-lab ledger`: what is known on a GPU of each function with kernels, and whether it is known of the code as it is now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ao_lab.cli.terminal.interrupt import when_stopped
from ao_lab.cli.terminal.output import WrongInput, print_json, print_table
from experiments.commands.folders import check_clone, paths
from experiments.ledger import ledger
from experiments.ledger import refresh as remaking


def run_ledger(
    check: bool,
    refresh: bool,
    as_json: bool,
    *,
    everything: bool = False,
    seconds: float = remaking.TOTAL_SECONDS,
    only: Sequence[str] = (),
) -> bool:
    """Show the ledger, check it, or remake what is stale. False where entries do not stand and that was the question."""
    if check and refresh:
        raise WrongInput("ledger takes --check or --refresh, not both")
    if everything and not refresh:
        raise WrongInput("ledger takes --all with --refresh")
    check_parts(only, refresh)
    check_clone("ledger", "the entries lie in its reports/, the tests that make them in its tests/gpu/")
    if refresh:
        if not remaking.has_device():
            raise WrongInput(
                "ledger --refresh runs on a GPU and torch sees none here; ao-lab doctor says why"
            )
        folders = paths()
        with when_stopped(
            lambda: (
                f"finished tests are in {folders.reports}, measured rows in {folders.cache}; run it again to go on"
            )
        ):
            remaking.refresh(seconds, everything, parts=tuple(only) or remaking.PARTS)
    problems: dict[str, str] = ledger.problems()
    if as_json:
        print_json({"entries": ledger.shown(), "problems": problems})
    elif check:
        show_problems(problems, len(ledger.read()))
    else:
        show_entries(ledger.shown(), problems)
    return not problems or not (check or refresh)


def check_parts(only: Sequence[str], refresh: bool) -> None:
    """WrongInput for parts that are none, or without --refresh."""
    if only and not refresh:
        raise WrongInput("ledger takes --only with --refresh")
    unknown = [name for name in only if name not in remaking.PARTS]
    if unknown:
        raise WrongInput(
            f"unknown part {unknown[0]!r} of the ledger; the parts are {', '.join(remaking.PARTS)}"
        )


def show_problems(problems: dict[str, str], count: int) -> None:
    """The functions whose entries do not stand, or that all do."""
    if problems:
        title = "Ledger: remake with ao-lab ledger --refresh on a GPU"
        print_table(title, ["function", "problem"], problems.items())
    else:
        print_table("Ledger", ["entries", "state"], [[str(count), "all as the code is"]])


def show_entries(entries: dict[str, Any], problems: dict[str, str]) -> None:
    """One line per function."""
    rows = []
    for name in sorted({*entries, *problems}):
        entry = entries.get(name, {})
        tests, benchmarks = entry.get("tests", {}), entry.get("benchmarks", {})
        rows.append(
            [
                name,
                entry.get("date", ""),
                entry.get("gpu", ""),
                f"{tests.get('passed', 0)}/{tests.get('run', 0)}",
                f"{benchmarks.get('reached', 0)}/{benchmarks.get('measured', 0)}",
                problems.get(name, "as the code is"),
            ]
        )
    columns = ["function", "date", "GPU", "tests passed", "targets reached", "state"]
    print_table("Ledger", columns, rows, ["tests passed", "targets reached"])


__all__ = ["run_ledger"]
