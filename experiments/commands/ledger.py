"""`ao-lab ledger`: what a GPU validated of each function with kernels, when, and what has changed since."""

from __future__ import annotations

from dataclasses import asdict

from ao_lab.cli.terminal.output import WrongInput, print_json, print_table
from ao_lab.cli.terminal.progress import say
from experiments.commands.folders import check_clone
from experiments.runs import validations
from experiments.runs.validations import COUNTS


def run_ledger(check: bool, refresh: bool, as_json: bool, *, seconds: float = validations.SECONDS) -> bool:
    """Show the table, check it, or remake it. False where something was never validated, or differed, and that was asked."""
    if check and refresh:
        raise WrongInput("ledger takes --check or --refresh, not both")
    check_clone("ledger", "the table lies in its reports/, the tests that make it in its tests/gpu/")
    late = validate(seconds) if refresh else []
    problems, changes = validations.problems(), validations.changes()
    if as_json:
        lines = {name: asdict(one) for name, one in validations.read().items()}
        print_json({"validations": lines, "problems": problems, "changes": changes, "not reached": late})
    elif check or refresh:
        show_check(problems, changes, late)
    else:
        show(changes)
    return not (problems or late) or not (check or refresh)


def validate(seconds: float) -> list[str]:
    """Validate on this GPU; whose tests the time did not reach."""
    import torch

    if not torch.cuda.is_available():
        raise WrongInput("ledger --refresh runs on a GPU and torch sees none here; ao-lab doctor says why")
    _, late = validations.refresh(seconds)
    return late


def show_check(problems: dict[str, str], changes: list[str], late: list[str]) -> None:
    """What has to be validated, as a table, and what has changed since the rest was, as information."""
    if problems:
        title = "Ledger: validate with ao-lab ledger --refresh on a GPU"
        print_table(title, ["function", "problem"], problems.items())
    late = [f"not reached in time, as they were: {', '.join(late)}"] if late else []
    for line in [f"{len(validations.functions())} functions, {len(problems)} problems", *changes, *late]:
        say(line)


def show(changes: list[str]) -> None:
    """One line per function or family, and what has changed since."""
    rows = [
        [one.name, *(f"{getattr(one, name):,}" for name in COUNTS), one.date[:10], one.commit, one.device]
        for one in validations.read().values()
    ]
    print_table("Ledger", ["function", *COUNTS, "date", "commit", "device"], rows, COUNTS)
    for line in changes:
        say(line)
