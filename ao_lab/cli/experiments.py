"""The experiments, as the command line reaches them: they stand above `ao_lab`, so they are looked up by name when a command
runs, as an entry point would; a user's own package `experiments` is not taken for ours."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from ao_lab.cli.terminal.output import WrongInput
from ao_lab.cli.terminal.requirements import check_writable
from ao_lab.install import shadowing as neighbours
from ao_lab.install.extras import is_clone


def of_experiments(name: str = "experiments") -> Any:
    """A module of the experiments, imported."""
    neighbours.check("experiments")
    return importlib.import_module(name)


def places(reports: Path | None = None) -> Any:
    """Where a run writes, `reports` instead of its default; WrongInput where that cannot be written."""
    made = of_experiments().Places.default(reports)
    check_writable(made.reports, "the folder of reports")
    check_writable(made.cache, "the cache (AO_LAB_CACHE names another)")
    return made


def check_clone(command: str, why: str) -> None:
    """WrongInput where ao_lab was installed from a wheel, which lacks what a command needs."""
    if not is_clone():
        raise WrongInput(f"{command} needs a clone of ao_lab: {why}")


__all__ = ["check_clone", "of_experiments", "places"]
