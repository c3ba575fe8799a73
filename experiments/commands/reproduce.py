"""`ao-lab reproduce`: hand over to the experiments and list what they wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ao_lab.cli.formats import known
from ao_lab.cli.terminal.interrupt import when_stopped
from ao_lab.cli.terminal.output import WrongInput, print_json, print_table
from ao_lab.cli.terminal.progress import say
from ao_lab.cli.terminal.requirements import check_device
from ao_lab.install.extras import check_extra
from experiments.commands.folders import paths
from experiments.data.corpora.record import DEFAULT
from experiments.harness.registry import EXPERIMENTS, LIMITED


def run_experiments(
    names: list[str],
    scale: str,
    device: str | None,
    only: list[str],
    as_json: bool,
    *,
    reports: Path | None = None,
    corpus: tuple[str, Path | None] = (DEFAULT, None),
    seconds: float | None = None,
    workers: int = 1,
    changed: bool = False,
) -> bool:
    """Run the named experiments, or those that always run; progress goes to stderr, the outcome to stdout.

    corpus: its name, and its folder where it has one. seconds: after which nothing more starts, where that can be. workers: how
    many trainings run at once, likewise. changed: rows whose code has not changed since are taken as measured. Returns whether
    no measurement was lost.
    """
    from experiments.fp8_training.training.workers import LOST
    from experiments.runs.run import reproduce

    check_extra("experiments")
    for name in names:
        known(name, EXPERIMENTS, "experiment")
    check_device(device)
    more: dict[str, Any] = {**partly(names, only), **limited(names, seconds), **other_text(names, *corpus)}
    more |= {**shared(names, workers), "changed": changed}
    folders = paths(reports)
    LOST.clear()
    say(f"reproduce writes to {folders.reports} and keeps what it has measured in {folders.cache}")
    with when_stopped(
        lambda: f"what was measured is kept in {folders.cache}; the same command goes on from there"
    ):
        written = reproduce(names or None, scale=scale, device=device, paths=folders, **more)
    if as_json:
        print_json([{"what": what, "where": where} for what, where in written])
    else:
        print_table("Reproduced", ["what", "where"], written)
    if LOST:
        say(
            f"{len(LOST)} measurements were lost, {LOST[0]} first (errors are above); the same command goes on with them"
        )
    return not LOST


def write_pages_alone(names: list[str], changed: bool, reports: Path | None, as_json: bool) -> None:
    """Write pages and figures of all published rows, and measure nothing."""
    from experiments.report.pages import write_pages

    if names or changed:
        raise WrongInput(
            "--pages measures nothing and writes the pages of all experiments: ao-lab reproduce --pages"
        )

    folders = paths(reports)
    with folders.alone():
        written = write_pages(folders)
    if as_json:
        print_json([{"what": what, "where": where} for what, where in written])
    else:
        print_table("Written", ["what", "where"], written)


def partly(names: list[str], only: list[str]) -> dict[str, list[str]]:
    """The configurations or parts to which a run is limited; WrongInput for unknown ones, and for experiments without any."""
    if not only:
        return {}
    if names not in (["decode"], *([name] for name in LIMITED)):
        raise WrongInput("--only names parts of one experiment: ao-lab reproduce decode --only NAME")
    try:
        if names == ["decode"]:
            from experiments.decode.configs import chosen

            chosen(tuple(only))
        else:
            EXPERIMENTS[names[0]].run_module().check_parts(only)
    except ValueError as error:
        raise WrongInput(f"--only: {error}") from error
    return {"only": only}


def limited(names: list[str], seconds: float | None) -> dict[str, float]:
    """The limit of a run; WrongInput for one that is not positive, and for experiments that cannot stop in between."""
    if seconds is None:
        return {}
    if names not in ([name] for name in LIMITED) or not seconds > 0:
        raise WrongInput(
            "--seconds is a positive limit of one experiment: ao-lab reproduce fp8_training --seconds 480"
        )
    return {"seconds": seconds}


def shared(names: list[str], workers: int) -> dict[str, int]:
    """How many trainings run at once; WrongInput for none, and for experiments whose trainings do not."""
    if workers == 1:
        return {}
    if names not in ([name] for name in LIMITED if EXPERIMENTS[name].trained) or workers < 1:
        raise WrongInput(
            "--workers is a positive number of processes of one experiment: ao-lab reproduce fp8_training --workers 4"
        )
    return {"workers": workers}


def other_text(names: list[str], corpus: str, path: Path | None) -> dict[str, Any]:
    """The corpus of a run that is not given the default; WrongInput where there is no such text."""
    from experiments.runs.texts import text_for

    try:
        text = text_for(names, corpus, path)
    except ValueError as error:
        raise WrongInput(str(error)) from error
    return {} if text is None else {"text": text}
