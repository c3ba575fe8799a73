"""`ao-lab ledger`: what is known on a GPU of each kernel file, and whether it is known of the file as it is now.

Of `experiments.ledger.ledger` this uses `read`, `problems`,
`refresh` and `has_device`.
"""

from __future__ import annotations

from typing import Any

from ao_lab.cli.experiments import check_clone, of_experiments, places
from ao_lab.cli.terminal.interrupt import when_stopped
from ao_lab.cli.terminal.output import WrongInput, print_json, print_table


def run_ledger(check: bool, refresh: bool, as_json: bool) -> bool:
    """Show the ledger, check it, or make all of it anew. False where entries are missing, stale or failed and it was asked."""
    if check and refresh:
        raise WrongInput("ledger takes --check or --refresh, not both")
    check_clone("ledger", "the entries lie in its reports/, the tests that make them in its tests/gpu/")
    ledger = of_experiments("experiments.ledger.ledger")
    if refresh:
        if not ledger.has_device():
            raise WrongInput(
                "ledger --refresh runs on a GPU and torch sees none here; ao-lab doctor says why"
            )
        folders = places()
        with when_stopped(
            lambda: f"the ledger is as it was, measured rows are kept in {folders.cache}; run it again"
        ):
            ledger.refresh()
    problems: dict[str, str] = ledger.problems()
    entries: dict[str, Any] = ledger.read()["kernels"]
    if as_json:
        print_json({"kernels": entries, "problems": problems})
    elif check:
        show_problems(problems, len(entries))
    else:
        show_entries(entries, problems)
    return not problems or not (check or refresh)


def show_problems(problems: dict[str, str], count: int) -> None:
    """The files whose entries do not stand, or that all do."""
    if problems:
        print_table(
            "Ledger: remake with ao-lab ledger --refresh on a GPU", ["file", "problem"], problems.items()
        )
    else:
        print_table("Ledger", ["entries", "state"], [[str(count), "all as the code is"]])


def show_entries(entries: dict[str, Any], problems: dict[str, str]) -> None:
    """One line per file."""
    rows = []
    for name in sorted({*entries, *problems}):
        entry = entries.get(name, {})
        tests = entry.get("tests") or {}
        benchmarks = entry.get("benchmarks") or []
        rows.append(
            [
                name,
                entry.get("date", ""),
                entry.get("gpu", ""),
                f"{tests.get('passed', 0)}/{tests.get('run', 0)}",
                f"{sum(not one['missed'] for one in benchmarks)}/{len(benchmarks)}",
                problems.get(name, "as the code is"),
            ]
        )
    columns = ["file", "date", "GPU", "tests passed", "bars reached", "state"]
    print_table("Ledger", columns, rows, ["tests passed", "bars reached"])
