"""`ao-lab reproduce`: hand over to the experiments and list what they wrote.

`experiments` stands above `ao_lab`, and imports run downwards only. The command line is the one place that needs the other
direction, so it looks the package up by name when the command runs, as an entry point would. It uses two names of it:
`EXPERIMENTS`, a mapping whose keys are the names that users type, and `reproduce(names, scale, device, only)`, which
measures, writes `reports/` and returns what it wrote and where.
"""

from __future__ import annotations

import importlib

from ao_lab.cli_formats import known
from ao_lab.cli_output import WrongInput, print_json, print_table


def run_experiments(names: list[str], scale: str, device: str | None, only: list[str], as_json: bool) -> None:
    """Run the named experiments, or those that always run; progress goes to stderr, the outcome to stdout."""
    experiments = importlib.import_module("experiments")
    for name in names:
        known(name, experiments.EXPERIMENTS, "experiment")
    if device == "cuda" and not importlib.import_module("torch").cuda.is_available():
        raise WrongInput("--device cuda: torch sees no GPU here; ao-lab doctor says why")
    made = experiments.reproduce(names or None, scale=scale, device=device, **partly(names, only))
    if as_json:
        print_json([{"what": what, "where": where} for what, where in made])
    else:
        print_table("Reproduced", ["what", "where"], made)


def partly(names: list[str], only: list[str]) -> dict[str, list[str]]:
    """The configurations to which a run is limited; WrongInput for unknown ones, and for other experiments than `decode`."""
    if not only:
        return {}
    if names != ["decode"]:
        raise WrongInput("--only names configurations of one experiment: ao-lab reproduce decode --only NAME")
    try:
        importlib.import_module("experiments.decode_configs").chosen(tuple(only))
    except ValueError as error:
        raise WrongInput(f"--only: {error}") from error
    return {"only": only}
