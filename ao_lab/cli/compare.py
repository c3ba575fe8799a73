"""`ao-lab compare`: configurations of one model side by side, as one table and one picture."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from ao_lab.cli.completion import config_names, configs_and_folders, method_names
from ao_lab.cli.options import (
    AsJson,
    BatchSize,
    ChatTemplate,
    CorpusPath,
    IncludePath,
    Layout,
    ModelDir,
    NumFewshot,
    OnDevice,
)
from ao_lab.cli.terminal import (
    WrongInput,
    check_device,
    check_writable,
    console,
    kept_in,
    print_json,
    print_table,
    say,
    track_progress,
    when_stopped,
)
from ao_lab.install.extras import wrong_input


def command(
    model_dir: ModelDir,
    more: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG]...",
            help="Configurations to compare: names (ao-lab configs), 'NAME key=value ...', a scheme (ao-lab schemes), or a "
            "folder with a quantized version of the model. Default: seven common configurations.",
            autocompletion=configs_and_folders,
        ),
    ] = None,
    configs: Annotated[
        list[str] | None,
        typer.Option(
            "--configs",
            help="The same as an option; comma-separated or repeated.",
            autocompletion=config_names,
        ),
    ] = None,
    config: Annotated[list[str] | None, typer.Option("--config", hidden=True)] = None,
    text: Annotated[
        str | None,
        typer.Option(
            "--text",
            "--eval",
            metavar="TEXT",
            help="Evaluation text: a file, or wikitext2 with --corpus-path. Default: Python source code of sympy.",
        ),
    ] = None,
    corpus_path: CorpusPath = None,
    calibration: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Calibration data for methods: a text file, or wikitext2."),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Quantization algorithm, as for ao-lab quantize: clip, awq, 'gptq damping=0.01', ...",
            autocompletion=method_names,
        ),
    ] = None,
    calibration_windows: Annotated[
        int, typer.Option("--calibration-windows", help="Number of calibration sequences.")
    ] = 128,
    windows: Annotated[int | None, typer.Option("--windows", hidden=True)] = None,
    limit: Annotated[
        int, typer.Option(help="Number of evaluation sequences (and of examples per harness task).")
    ] = 32,
    length: Annotated[
        int | None, typer.Option(help="Tokens per sequence. Default: 512, or the model's context if shorter.")
    ] = None,
    new_tokens: Annotated[
        int, typer.Option(help="Tokens of the timed generate() call; 0 skips speed and memory.")
    ] = 32,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            help="Tasks of lm-evaluation-harness, where it is installed; comma-separated or repeated."
        ),
    ] = None,
    num_fewshot: NumFewshot = None,
    batch_size: BatchSize = None,
    apply_chat_template: ChatTemplate = False,
    include_path: IncludePath = None,
    tolerance: Annotated[
        float,
        typer.Option(
            help="The best configuration: the smallest that surely loses no more than so many percent of perplexity (upper end "
            "of the 95% interval)."
        ),
    ] = 1.0,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="A folder for the results, the table and the picture; after an interruption the same command resumes there.",
        ),
    ] = None,
    layout: Annotated[
        Layout,
        typer.Option(
            help="Measure what ao-lab quantize writes in this layout. auto: as there, changes of a configuration are printed; "
            "ao_lab: configurations unchanged."
        ),
    ] = Layout.AUTO,
    device: OnDevice = None,
    as_json: AsJson = False,
) -> None:
    """Compare configurations on a model of your own: perplexity and its change (95% interval), KL, size, speed, memory."""
    from ao_lab.cli.early import (
        COMPARISON,
        check_counts,
        check_harness,
        check_methods,
        check_model,
        check_texts,
        check_tokenizer,
        check_tokens,
        check_weights,
    )

    asked = [name for given in tasks or [] for name in split(given)]
    check_model(model_dir, "ao-lab quantize or transformers")
    check_counts(limit, length, new_tokens)
    check_texts(text=text, calibration=calibration)
    check_harness(asked)
    check_methods(method or [], calibration)
    check_tokens(model_dir, length, new_tokens)
    named = [name for given in [*(configs or []), *(config or [])] for name in split(given)]
    for name in [*named, *(more or [])]:
        configuration(name)
    check_tokenizer(model_dir)
    check_weights(model_dir)
    with when_stopped(lambda: kept_in(out, COMPARISON)):
        from ao_lab.eval import HarnessOptions

        where = device.value if device else None
        run(model_dir, [*named, *(more or [])], out, where, as_json, layout.value,
            text=text, corpus=corpus_path, calibration=calibration, methods=tuple(method or ()),
            calibration_windows=windows or calibration_windows, limit=limit, length=length, new_tokens=new_tokens,
            tolerance=tolerance, tasks=asked,
            harness=HarnessOptions(num_fewshot, batch_size, apply_chat_template, include_path))  # fmt: skip


def run(
    model_dir: Path,
    names: list[str],
    out: Path | None,
    device: str | None,
    as_json: bool,
    layout: str,
    **settings: Any,
) -> None:
    """Compare, and show the table; exit code 1 where no configuration could be measured."""
    from ao_lab.install.extras import lacking, missing
    from ao_lab.measure.compare import PICTURE, TABLE, compare
    from ao_lab.measure.configurations import USUAL
    from ao_lab.measure.times import OK

    check_device(device)
    if out is not None:
        check_writable(out, "--out")
    configs = {name: configuration(name) for name in dict.fromkeys(names or USUAL)}
    written, changes = as_written(model_dir, configs, layout)
    with track_progress("compare", plain=as_json, transient=True) as work:
        work.first_is_least = True
        found = compare(
            model_dir,
            written,
            changes=changes,
            layout=layout,
            device=device,
            out=out,
            progress=lambda what, done, total: work.at(done, what, total),
            **settings,
        )
    if as_json:
        print_json(found.to_dict())
    else:
        show(found)
    if out is not None and not as_json:
        without = lacking("plot")
        more = f"; no picture: {missing(without)}" if without else f", {out / PICTURE} the picture"
        say(f"{out / TABLE} holds the table{more}")
    others = [row.status for row in found.rows[1:]]
    if others and OK not in others:
        raise typer.Exit(1)


def split(given: str) -> list[str]:
    """Names with commas between; one that holds a comma itself is given as an argument of its own."""
    return [name.strip() for name in given.split(",") if name.strip()]


def configuration(text: str) -> Any:
    """What a name with options stands for, or a folder; WrongInput with the nearest names, and how options are written."""
    from ao_lab.cli.listings import config_classes
    from ao_lab.cli.named_config import config_of

    if (Path(text) / "config.json").is_file():
        return Path(text)
    try:
        name, *settings = shlex.split(text)
    except ValueError as error:
        raise WrongInput(f"{text}: write NAME, or 'NAME key=value ...' ({error})") from error
    if "," in name:
        first = name.partition(",")[0]
        raise WrongInput(f"{text}: options follow the name after a space, in quotes: '{first} key=value ...'")
    if settings:
        try:
            with wrong_input():
                return config_of(name, None, settings)
        except WrongInput as error:
            # Here no option is written before a name.
            raise WrongInput(re.sub(r"--(config|option) ", "", str(error))) from error
    from ao_lab.config.base import config_named

    config_classes()  # all of them are known by name then
    try:
        return config_named(name)
    except ValueError as error:
        raise WrongInput(f"{error}; and no folder with a config.json is there") from error


def as_written(source: Path, configs: dict[str, Any], layout: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The configurations that `ao-lab quantize` writes for a layout, and what each was changed in, where it was. What does not
    fit the model is said, before a weight is read; WrongInput where none fits."""
    from ao_lab.cli.layout import SkippedLayers, select_layout

    written, changes, misfits = dict(configs), dict[str, str](), dict[str, str]()
    for name, config in configs.items():
        if isinstance(config, Path):
            continue
        plan = select_layout(config, name, layout)
        try:
            plan = plan.for_model(source, SkippedLayers(None))
        except ValueError as error:
            misfits[name] = str(error).removeprefix("quantize_: ")
        written[name] = plan.config
        if plan.changes:
            changes[name] = "; ".join(plan.changes)
    if misfits and len(misfits) == len(configs):
        # Before anything is measured beside which nothing would stand.
        raise WrongInput("; ".join(f"{name}: {why}" for name, why in misfits.items()))
    for name, why in misfits.items():
        say(f"{name} will have failed: {why}")
    return written, changes


def show(found: Any) -> None:
    """The tables, which configuration is best, and what they hold for."""
    titles = (f"{found.model} on {found.conditions['text']}", "Size and speed", "Tasks")
    for title, (head, *rows) in zip(titles, found.tables(), strict=False):
        print_table(title, head, rows, head[1:])
    answer = [found.best] if found.best else []
    for note in answer:
        console().print(note, markup=False, style="bold", end="\n\n")
    for note in found.notes[len(answer) :]:
        console().print(note, markup=False)
