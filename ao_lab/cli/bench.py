"""`ao-lab bench`: times of the linear layers and of generate() of a model of your own, or of shapes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ao_lab.cli.completion import config_names, configs_and_folders, models_and_folders
from ao_lab.cli.options import MODEL_FOLDER, AsJson, OnDevice, model_folder
from ao_lab.cli.terminal import (
    WrongInput,
    check_device,
    check_writable,
    console,
    kept_in,
    print_json,
    print_table,
    track_progress,
    when_stopped,
)

if TYPE_CHECKING:
    from ao_lab.measure.times import Benchmark


def command(
    model: Annotated[
        Path | None,
        typer.Option(
            help=f"{MODEL_FOLDER} A quantized one is timed as it is.",
            parser=model_folder,
            metavar="MODEL_DIR",
            autocompletion=models_and_folders,
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="M,N,K", help="Tokens, outputs and inputs of a linear layer, repeatable."),
    ] = None,
    more: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG]...",
            help="Configurations (ao-lab configs), 'NAME key=value', or schemes (ao-lab schemes). Default: seven common ones.",
            autocompletion=configs_and_folders,
        ),
    ] = None,
    configs: Annotated[
        list[str] | None,
        typer.Option(
            "--configs",
            help="The same as an option: names with commas between, or several times.",
            autocompletion=config_names,
        ),
    ] = None,
    config: Annotated[list[str] | None, typer.Option("--config", hidden=True)] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Tokens of the layers' inputs, and sequences of generate(), repeatable. Default: 1 and 16.",
        ),
    ] = None,
    new_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of generate() that are timed; 0 leaves generate() out.")
    ] = 16,
    rounds: Annotated[
        int,
        typer.Option(
            min=1, help="Timed calls of generate() per model, after one that warms up (two, compiled)."
        ),
    ] = 3,
    compiled: Annotated[
        bool | None,
        typer.Option(
            "--compiled/--no-compiled",
            help="Whether generate() is timed compiled too, which takes a GPU. Default: where there is one.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="A folder for the times (benchmark.json); after an interruption the same command resumes there.",
        ),
    ] = None,
    device: OnDevice = None,
    as_json: AsJson = False,
) -> None:
    """Time the linear layers and generate() of a model of your own, or layers of shapes: quantized beside unquantized.

    Exit code 1 where no configuration could be timed.
    """
    from ao_lab.cli.compare import configuration, split
    from ao_lab.cli.early import BENCHMARK, check_model, check_tokens, check_weights

    if model is None and not shape:
        raise WrongInput("give a model (--model DIR) or shapes (--shape M,N,K), or both")
    check_model(model, "ao-lab quantize or transformers")
    if model is not None:
        check_weights(model)
        check_tokens(model, new_tokens=new_tokens)
    shapes = [shape_of(one) for one in shape or []]
    names = [*(name for given in [*(configs or []), *(config or [])] for name in split(given)), *(more or [])]
    chosen = {name: configuration(name) for name in dict.fromkeys(names)} if names else None
    check_device(device.value if device else None)
    if out is not None:
        check_writable(out, "--out")
    with (
        when_stopped(lambda: kept_in(out, BENCHMARK)),
        track_progress("bench", plain=as_json, transient=True) as work,
    ):
        from ao_lab.measure.benchmark import TAKEN, benchmark
        from ao_lab.measure.times import OK

        found = benchmark(
            model,
            shapes=shapes,
            configs=chosen,
            batch=batch or (1, 16),
            new_tokens=new_tokens,
            rounds=rounds,
            out=out,
            compiled=compiled,
            device=device.value if device else None,
            progress=lambda what, done, total: work.at(done, what, total),
        )
    if as_json:
        print_json(found.to_dict())
    else:
        show(found)
    others = [row.status for row in found.rows if row.name not in TAKEN]
    if others and OK not in others:
        raise typer.Exit(1)


def shape_of(given: str) -> list[int]:
    """The three numbers of M,N,K; WrongInput for anything else."""
    wrong = WrongInput(
        f"--shape {given}: write M,N,K, tokens, outputs and inputs of a layer, such as 16,4096,4096 (ao-lab bench-kernels "
        "takes shapes of our own benchmarks)"
    )
    try:
        found = [int(one) for one in given.split(",")]
    except ValueError as error:
        raise wrong from error
    if len(found) != 3 or min(found) < 1:
        raise wrong
    return found


#: Columns that are set to the right.
NUMBERS = ("time", "time a token", "baseline", "tokens/s", "speedup")


def show(found: Benchmark) -> None:
    """The tables, and what they hold for."""
    for title, (head, *rows) in found.tables():
        print_table(title, head, rows, NUMBERS)
    for note in found.notes:
        console().print(note, markup=False)
