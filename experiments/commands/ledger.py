"""`ao-lab ledger`: what a GPU validated of each function with kernels, when, and what has changed since."""

from __future__ import annotations

from dataclasses import asdict

from ao_lab.cli.terminal.interrupt import when_stopped
from ao_lab.cli.terminal.output import WrongInput, print_json, print_table
from ao_lab.cli.terminal.progress import say
from experiments.commands.folders import check_clone
from experiments.runs import validations

COLUMNS = ("cases", "compared", "different", "failed")


def run_ledger(check: bool, refresh: bool, as_json: bool, *, seconds: float = validations.SECONDS) -> bool:
    """Show the table, check it, or remake it. False where something was never validated, or differed, and that was asked."""
    if check and refresh:
        raise WrongInput("ledger takes --check or --refresh, not both")
    check_clone("ledger", "the table lies in its reports/, the tests that make it in its tests/gpu/")
    late = remake(seconds) if refresh else []
    problems, changes = validations.problems(), validations.changes()
    if as_json:
        lines = {name: asdict(one) for name, one in validations.read().items()}
        print_json({"validations": lines, "problems": problems, "changes": changes, "not reached": late})
    elif check:
        show_check(problems, changes)
    else:
        show()
    return not (problems or late) or not (check or refresh)


def remake(seconds: float) -> list[str]:
    """Validate on this GPU; what the time did not reach."""
    import torch

    if not torch.cuda.is_available():
        raise WrongInput("ledger --refresh runs on a GPU and torch sees none here; ao-lab doctor says why")
    with when_stopped(lambda: "the table is as it was; the same command starts again"):
        _, late = validations.refresh(seconds)
    if late:
        say(f"not reached in {seconds:.0f} s, their lines are as they were: {', '.join(late)}")
    return late


def show_check(problems: dict[str, str], changes: list[str]) -> None:
    """What has to be validated, as a table, and what has changed since the rest was, as information."""
    if problems:
        title = "Ledger: validate with ao-lab ledger --refresh on a GPU"
        print_table(title, ["function", "problem"], problems.items())
    else:
        print_table("Ledger", ["functions", "state"], [[str(len(validations.functions())), "all validated"]])
    for line in changes:
        say(line)


def show() -> None:
    """One line per function or family."""
    rows = [
        [one.name, *(f"{getattr(one, name):,}" for name in COLUMNS), one.date[:10], one.commit, one.device]
        for one in validations.read().values()
    ]
    print_table("Ledger", ["function", *COLUMNS, "date", "commit", "device"], rows, COLUMNS)


__all__ = ["run_ledger"]
