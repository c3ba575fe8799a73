"""`ao-lab merge`: rows that were measured at the same time elsewhere, into reports/."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ao_lab.cli.terminal.output import WrongInput, print_json, print_table
from ao_lab.install.extras import check_extra
from experiments.commands.folders import paths


def run_merge(folders: Sequence[Path], reports: Path | None, as_json: bool) -> None:
    """Take the rows, write the pages again, and list both."""
    check_extra("experiments")
    from experiments.report.pages import write_pages
    from experiments.runs.merge import merge

    places = paths(reports)
    try:
        written = merge(folders, places)
    except ValueError as error:
        raise WrongInput(str(error)) from error
    written += write_pages(places) if written else []
    if as_json:
        print_json([{"what": what, "where": where} for what, where in written])
        return
    nothing = [("nothing: all their rows are here", str(places.reports))]
    print_table("Merged", ["what", "where"], written or nothing)
