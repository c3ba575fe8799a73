"""Folders of a command: that they can be written, and that there is a clone where a command needs one."""

from __future__ import annotations

from pathlib import Path

from ao_lab.cli.terminal.output import WrongInput
from ao_lab.cli.terminal.requirements import check_writable
from ao_lab.install.extras import is_clone
from experiments.harness.paths import Paths


def paths(reports: Path | None = None) -> Paths:
    """Where a run writes, `reports` instead of its default; WrongInput where that cannot be written."""
    folders = Paths.default(reports)
    check_writable(folders.reports, "the folder of reports")
    check_writable(folders.cache, "the cache (AO_LAB_CACHE names another)")
    return folders


def check_clone(command: str, why: str) -> None:
    """WrongInput where ao_lab was installed from a wheel, which lacks what a command needs."""
    if not is_clone():
        raise WrongInput(f"{command} needs a clone of ao_lab: {why}")


__all__ = ["check_clone", "paths"]
