"""What `ao-lab pretrained` does: list the models that packages hold, or make the folder of one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout

from ao_lab.cli.terminal import WrongInput, print_json, print_table, say, track_progress
from experiments.commands.work import paths
from experiments.models.pretrained import MODELS, Pretrained, model_record, pretrained


def run_pretrained(name: str | None, accept: Sequence[str], as_json: bool) -> None:
    """List all models, or fetch one and say where it lies; WrongInput where it cannot be had."""
    if name is None:
        show_models(list(MODELS.values()), as_json)
        return
    try:
        record = model_record(name)
        cache = paths().cache
        if not as_json:
            # On stdout stands the folder alone: --model $(ao-lab pretrained NAME).
            with redirect_stdout(sys.stderr):
                show_model(record)
        with track_progress("pretrained", None, plain=as_json) as work:
            folder = pretrained(name, cache, accept=accept, step=work.step)
    except ValueError as error:
        raise WrongInput(str(error)) from error
    if as_json:
        print_json({**record.describe(), "folder": str(folder)})
    else:
        say(f"{record.title} is ready; any command that takes a model's folder takes it")
        sys.stdout.write(f"{folder}\n")


def show_models(records: Sequence[Pretrained], as_json: bool) -> None:
    """A line per model."""
    if as_json:
        print_json([record.describe() for record in records])
        return
    lines = [
        [
            one.name,
            one.task,
            f"{one.parameters / 1e6:.0f} M",
            megabytes(one),
            one.licence,
            one.grid,
            one.purpose,
        ]
        for one in records
    ]
    columns = [
        "name",
        "task",
        "parameters",
        "download",
        "licence",
        "the file's weights are on the grid",
        "for",
    ]
    print_table("Pretrained models", columns, lines, ["parameters", "download"])


def show_model(record: Pretrained) -> None:
    """What a record says."""
    facts = [
        ["task", record.task],
        ["parameters", f"{record.parameters:,}"],
        ["download", megabytes(record)],
        ["licence", record.licence],
        *([["terms", f"{record.terms[1]}; accepted by --accept {record.terms[0]}"]] if record.terms else []),
        ["grid of the weights", record.grid],
        ["measured", record.purpose],
        ["packages", ", ".join(part.requirement for part in record.parts)],
        ["SHA-256", record.sha256],
    ]
    print_table(f"Model {record.title}", ["field", "value"], facts)


def megabytes(record: Pretrained) -> str:
    """Decimal megabytes of the wheels."""
    return f"{record.download / 1e6:.0f} MB"
