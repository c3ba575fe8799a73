"""`torchrun --standalone --nproc-per-node 2 -m experiments.distributed [--only NAME] [--seconds S] [--out DIR]`, or without
torchrun `python -m experiments.distributed --ranks 2`: cases of several ranks, a row each as it comes.

The exit code is 1 where a case failed. Cases of which the reports have no passed row of this device, scale and number of ranks
go first, and with `--missing` they alone. `ao-lab reproduce distributed` runs the same, and writes pages. Of torchrun's
processes the first starts the ranks, as many as torchrun was asked for, and starts them again behind a case that ends them."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

import torch

from experiments.distributed.cases import Case, chosen
from experiments.distributed.launch import launch, stand_by
from experiments.distributed.ranks import EXPERIMENT, STARTED, Plan, failed, in_need, run_rank
from experiments.harness.paths import Paths, shown
from experiments.harness.rows import read
from experiments.runs.settings import SCALES, settings_for

CASES = f"{__package__}.run"


def main(argv: list[str] | None = None) -> int:
    """Be a rank where torchrun's variables say so, else start ranks; exit code 2 for input that makes no sense."""
    arguments = parser().parse_args(argv)
    try:
        cases = chosen(importlib.import_module(arguments.cases).CASES, arguments.only)
        if arguments.listed:
            sys.stdout.writelines(f"{case.kind}: {case.name}: {case.expected}\n" for case in cases)
            return 0
        plan = plan_of(arguments, cases)
        if STARTED in os.environ:
            stand_by(os.environ[STARTED])
            return run_rank(plan)
        if os.environ.get("RANK", "0") != "0":
            return 0  # the first of torchrun's processes starts ranks, and starts them again behind one that dies
        given = sys.argv[1:] if argv is None else argv
        code = launch(plan, arguments.ranks, given)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    wrong = failed(plan)
    sys.stdout.write(f"{len(plan.cases)} cases, {len(wrong)} failed: {shown(plan.path)}\n")
    sys.stdout.writelines(f"failed: {name}\n" for name in wrong)
    return code


def plan_of(arguments: argparse.Namespace, cases: list[Case]) -> Plan:
    """What is to run; ValueError for more ranks than GPUs."""
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    ranks = int(os.environ.get("WORLD_SIZE", arguments.ranks))
    if device == "cuda" and torch.cuda.device_count() < ranks:
        found = torch.cuda.device_count()
        raise ValueError(f"{ranks} ranks take {ranks} GPUs, found {found}; use fewer ranks or --device cpu")
    if os.environ.get("LOCAL_WORLD_SIZE", str(ranks)) != str(ranks):
        raise ValueError(
            "ranks of one host only, which meet in a folder: torchrun --standalone --nproc-per-node N"
        )
    if ranks < 2:
        raise ValueError(
            f"cases are of two and more ranks, got {ranks}; --ranks 2, or --nproc-per-node 2 of torchrun"
        )
    scale = arguments.scale or ("full" if device == "cuda" else "quick")
    paths = Paths.default()
    settings = settings_for(scale, device, paths.cache)
    known = read(paths.data / f"{EXPERIMENT}.csv")
    ordered = in_need(cases, known, settings, ranks, arguments.missing)
    return Plan(ordered, settings, arguments.out or paths.cache / EXPERIMENT, arguments.seconds)


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog="python -m experiments.distributed", description=__doc__)
    made.add_argument(
        "--only", action="append", default=[], help="a case, a group or a kind of them; several times"
    )
    made.add_argument(
        "--missing", action="store_true", help="leave out what reports say has passed here before"
    )
    made.add_argument("--seconds", type=float, help="start nothing after so many")
    made.add_argument("--out", type=Path, help="a folder of reports: rows go to data/distributed.csv in it")
    made.add_argument("--ranks", type=int, default=2, help="without torchrun: so many processes of this host")
    made.add_argument("--device", choices=("cpu", "cuda"))
    made.add_argument("--scale", choices=SCALES, help="default: full on GPUs, quick on CPUs")
    made.add_argument("--cases", default=CASES, help="a module whose CASES are run")
    made.add_argument("--list", dest="listed", action="store_true", help="say what there is; runs nothing")
    return made


if __name__ == "__main__":
    sys.exit(main())
