"""The commands `reproduce`, `bench` and `ledger`: their options. What they do is imported when they run."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


class Scale(StrEnum):
    """How large an experiment is."""

    QUICK = "quick"
    FULL = "full"


class Device(StrEnum):
    """Where an experiment runs."""

    CPU = "cpu"
    CUDA = "cuda"


def reproduce(
    tables: Annotated[
        list[str] | None, typer.Argument(help="Experiments to run; all of them without.")
    ] = None,
    scale: Annotated[Scale, typer.Option(help="quick: minutes on two cores; full: for a GPU.")] = Scale.QUICK,
    device: Annotated[
        Device | None, typer.Option(help="By default CUDA where there is a GPU, else the CPU.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Of decode: methods or makers to measure, such as int8wo or torchao; all without."),
    ] = None,
    reports: Annotated[
        Path | None,
        typer.Option(
            help="Where to write; without, $AO_LAB_REPORTS, or reports/ in the clone, or ./reports where there is no clone."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run the experiments and write tables, figures and pages; what an interrupted run measured is not measured again."""
    from experiments.commands.reproduce import run_experiments

    where = device.value if device else None
    run_experiments(tables or [], scale.value, where, only or [], as_json, reports=reports)


def bench(
    kernels: Annotated[
        list[str] | None,
        typer.Argument(
            help="Kernels, by name or part of it such as mxfp4 or dequantize; all of them without."
        ),
    ] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="A shape such as 16384x4096, any number of times; all without.")
    ] = None,
    no_baselines: Annotated[
        bool, typer.Option("--no-baselines", help="Only our kernels: no torch, no torchao.")
    ] = False,
    listed: Annotated[bool, typer.Option("--list", help="Say what can be measured; needs no GPU.")] = False,
    as_json: AsJson = False,
) -> None:
    """Time the kernels on this GPU against copies and baselines; all of them together are written to reports/."""
    from experiments.commands.bench import run_bench

    run_bench(kernels or [], shape or [], not no_baselines, listed, as_json)


def ledger(
    check: Annotated[
        bool, typer.Option("--check", help="List entries that do not stand; exit code 1 if any.")
    ] = False,
    refresh: Annotated[
        bool,
        typer.Option("--refresh", help="On a GPU: test and measure what is stale; goes on where time ended."),
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="With --refresh: what is not stale, too.")
    ] = False,
    seconds: Annotated[float, typer.Option(help="With --refresh: how long it may take.")] = 480.0,
    as_json: AsJson = False,
) -> None:
    """What was tested and measured on a GPU of each function with kernels, and whether its code is still the same."""
    from experiments.commands.ledger import run_ledger

    if not run_ledger(check, refresh, as_json, everything=everything, seconds=seconds):
        raise typer.Exit(1)


__all__ = ["bench", "ledger", "reproduce"]
