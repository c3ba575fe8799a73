"""`ao-lab pretrain`: train language models from scratch at learning rates and seeds of one's own, as rows of `pretraining`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ao_lab.cli.terminal.interrupt import when_stopped
from ao_lab.cli.terminal.output import WrongInput, print_json, print_table
from ao_lab.cli.terminal.progress import say
from ao_lab.cli.terminal.requirements import check_device
from experiments.commands.folders import paths

EXPERIMENT = "pretraining"


@dataclass(frozen=True)
class Wanted:
    """What to train: the name of a size, rates (none: the size's own), seeds, the budget, sequences a step."""

    size: str
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    seconds: float | None
    megabytes: float | None
    batch: int | None


def run_pretrain(
    wanted: Wanted,
    scale: str,
    device: str | None,
    corpus: tuple[str, Path | None],
    reports: Path | None,
    as_json: bool,
) -> None:
    """Train and publish; what an interrupted run trained is not trained again."""
    from experiments.models.pretraining.settings import Budget
    from experiments.pretraining.plans import settings_with, sweep
    from experiments.runs.run import run_all
    from experiments.runs.settings import settings_for
    from experiments.runs.texts import text_for

    check_device(device)
    try:
        size = None if wanted.megabytes is None else round(wanted.megabytes * 1e6)
        budget = Budget(bytes=size, seconds=wanted.seconds)
        trainings = sweep(wanted.size, budget, wanted.rates, wanted.seeds, wanted.batch)
        text = text_for([EXPERIMENT], *corpus)
    except ValueError as error:
        raise WrongInput(str(error)) from error
    folders = paths(reports)
    settings = replace(settings_with(settings_for(scale, device, folders.cache), trainings), text=text)
    say(f"pretrain writes to {folders.reports} and keeps checkpoints in {folders.cache}")
    with when_stopped(lambda: f"checkpoints are in {folders.cache}; the same command goes on from there"):
        written = run_all([EXPERIMENT], settings, folders)
    if as_json:
        print_json([{"what": what, "where": where} for what, where in written])
    else:
        print_table("Trained", ["what", "where"], written)


__all__ = ["Wanted", "run_pretrain"]
