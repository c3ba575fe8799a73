"""`ao-lab eval`: its options; what it does is in `ao_lab.cli.evaluate`, which is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ao_lab.cli.completion import models_and_folders
from ao_lab.cli.options import (
    CORPUS,
    AsJson,
    BatchSize,
    ChatTemplate,
    IncludePath,
    NumFewshot,
    OnDevice,
    model_folder,
)


def command(
    model_dir: Annotated[
        Path,
        typer.Argument(
            help="Model folder, quantized (ao_lab, compressed-tensors, torchao, ...) or not; or a name, as in ao-lab quantize.",
            parser=model_folder,
            metavar="MODEL_DIR",
            autocompletion=models_and_folders,
        ),
    ],
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks",
            help="perplexity, accuracy, agreement, weights, or tasks of lm-evaluation-harness; comma-separated or repeated.",
        ),
    ] = None,
    limit: Annotated[int, typer.Option(help="Number of sequences (and of examples per harness task).")] = 32,
    length: Annotated[
        int | None, typer.Option(help="Tokens per sequence. Default: 512, or the model's context if shorter.")
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            help="A text file, or wikitext2 with --corpus-path. Default: Python source code of sympy."
        ),
    ] = None,
    corpus_path: Annotated[
        Path | None,
        typer.Option(help=CORPUS),
    ] = None,
    num_fewshot: NumFewshot = None,
    batch_size: BatchSize = None,
    apply_chat_template: ChatTemplate = False,
    include_path: IncludePath = None,
    against: Annotated[
        Path | None,
        typer.Option(
            help="Folder or name of the base model to compare with.",
            parser=model_folder,
            metavar="MODEL_DIR",
            autocompletion=models_and_folders,
        ),
    ] = None,
    device: OnDevice = None,
    save: Annotated[
        bool, typer.Option("--save", help="Write eval.json, and add the results to the model card.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate: perplexity, accuracy, KL divergence from the base model (offline); lm-evaluation-harness tasks if installed."""
    from ao_lab.cli.early import check_counts, check_model, check_texts, check_tokens
    from ao_lab.cli.terminal import work
    from ao_lab.measure.asked import check_tasks

    asked = [name for given in tasks or [] for name in given.split(",") if name]
    for folder in (model_dir, against):
        check_model(folder, "ao-lab quantize or transformers")
    check_counts(limit, length)
    check_tasks(asked, against is not None)
    check_texts(text=text)
    check_tokens(model_dir, length)
    with work("eval", "no result was saved", as_json):
        from ao_lab.cli.evaluate import run_eval
        from ao_lab.eval import HarnessOptions

        run_eval(
            model_dir,
            asked,
            limit=limit,
            length=length,
            text=text,
            corpus=corpus_path,
            harness=HarnessOptions(num_fewshot, batch_size, apply_chat_template, include_path),
            against=against,
            device=device.value if device else None,
            save=save,
            as_json=as_json,
        )
