"""The command line `ao-lab`.

Results go to stdout, progress and errors to stderr. `--json` prints one document on stdout and nothing else there. The exit
code is 0 when all went well, 1 when something failed, 2 for wrong input and for a missing extra, 130 after Ctrl-C and 143 after
SIGTERM. A wrong input, a missing file or a missing library is one clear line; an error that nobody foresaw keeps its traceback,
because it is a fault to report.

Each command imports what it needs when it runs, so that `ao-lab --help` is quick and needs neither torch nor JAX. Packages
above this one register further commands (`ao_lab.cli.plugins`): `reproduce`, `merge`, `corpus`, `pretrain`, `bench` and
`ledger` are those of the experiments.
"""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ao_lab.cli.plot import app as plot_app
from ao_lab.cli.plugins import Commands
from ao_lab.cli.terminal import (
    INTERRUPTED,
    TERMINATED,
    Stopped,
    Terminated,
    WrongInput,
    heeding_sigterm,
    leave,
    printable,
)
from ao_lab.install.extras import MissingExtra, explained

app = typer.Typer(
    name="ao-lab",
    cls=Commands,
    help="A laboratory for low-precision deep learning: formats, schemes and the experiments that measure them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(plot_app, name="plot")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


class Device(StrEnum):
    """Where an experiment runs."""

    CPU = "cpu"
    CUDA = "cuda"


Skip = Annotated[
    list[str] | None,
    typer.Option(help="Layers or parts of the model to leave, by name or re:PATTERN: lm_head, vision_tower."),
]
OnDevice = Annotated[Device | None, typer.Option(help="Default: cuda where there is a GPU, else cpu.")]


class Launches(StrEnum):
    """How a tuned model runs."""

    EAGER = "eager"
    GRAPH = "graph"


class FileFormat(StrEnum):
    """Files of other programs."""

    GGUF = "gguf"
    ONNX = "onnx"


class Layout(StrEnum):
    """How quantized weights are stored."""

    AUTO = "auto"
    COMPRESSED_TENSORS = "compressed-tensors"
    OURS = "ao_lab"


@app.command()
def formats(
    name: Annotated[
        str | None, typer.Argument(help="A format such as float8_e4m3fn. Default: all of them.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Number formats: range, precision, specials; with a name the table of its values."""
    from ao_lab.cli.listings import show_formats

    show_formats(name, as_json)


@app.command()
def schemes(
    name: Annotated[
        str | None, typer.Argument(help="A scheme such as mxfp8_e4m3. Default: all of them.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Schemes: how a tensor is stored; with a name every field of its record."""
    from ao_lab.cli.listings import show_schemes

    show_schemes(name, as_json)


@app.command()
def configs(
    name: Annotated[
        str | None, typer.Argument(help="A configuration such as Int4WeightOnlyConfig. Default: all of them.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Configurations of ao-lab quantize; with a name its options and their defaults."""
    from ao_lab.cli.listings import show_configs

    show_configs(name, as_json)


@app.command()
def quantize(
    model_dir: Annotated[Path, typer.Argument(help="A folder that transformers' save_pretrained wrote.")],
    out_dir: Annotated[Path, typer.Argument(help="Where to write; a new or empty folder.")],
    config: Annotated[
        str | None,
        typer.Option(
            help="A configuration such as Int4WeightOnlyConfig (ao-lab configs), or a scheme such as mxfp4 (ao-lab schemes)."
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="In place of --config: what ao-lab choose wrote, a configuration for each layer."),
    ] = None,
    activation: Annotated[
        str | None,
        typer.Option(
            help="Scheme of the layers' inputs. Default: the configuration's own, of a scheme none."
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUE, an option of the configuration, such as group_size=32; any number of times."
        ),
    ] = None,
    skip: Skip = None,
    sparsity: Annotated[
        str | None,
        typer.Option(
            help="2:4: prune linear layers by magnitude first, and store the kept half (--layout ao_lab)."
        ),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="A text file (or wikitext2 with --corpus-path) that methods read the inputs of layers from, of the kind that "
            "the model is for.",
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="How scales and codes are found, any number of times: rotate, smooth, awq, clip, hqq, gptq, autoround, bias; "
            "kv: scales of a static cache. Default: rounding."
        ),
    ] = None,
    windows: Annotated[int, typer.Option(help="With --calibration: windows of text.")] = 128,
    length: Annotated[int, typer.Option(help="With --calibration: tokens of a window.")] = 512,
    corpus_path: Annotated[
        Path | None,
        typer.Option(help="With --calibration: the folder of the corpus that holds a named text."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="With --calibration: a folder for finished blocks; the same command goes on behind them."
        ),
    ] = None,
    stream: Annotated[
        bool,
        typer.Option(
            "--stream",
            help="With --calibration: one block at a time on the device, weights read from files, data on the host.",
        ),
    ] = False,
    device: Annotated[
        Device | None,
        typer.Option(help="With --method: where the model is while it is quantized. Default: cpu."),
    ] = None,
    layout: Annotated[
        Layout,
        typer.Option(
            help="auto: compressed-tensors, the configuration changed to what its readers compute (told), or ao_lab where that "
            "cannot be. compressed-tensors: the configuration as it is. ao_lab: everything; transformers reads it after "
            "`import ao_lab`."
        ),
    ] = Layout.AUTO,
    as_json: AsJson = False,
) -> None:
    """Quantize a model of transformers; the result loads there and in vLLM."""
    from ao_lab.cli.terminal import whole_or_nothing, work

    with work("quantize", f"nothing was written to {out_dir}", as_json), whole_or_nothing(out_dir):
        from ao_lab.cli.calibration import Calibration

        where = device.value if device else None
        data = Calibration(calibration, method or [], windows, length, corpus_path, where, resume, stream)
        if config is None:
            if plan is None:
                raise WrongInput(
                    "give --config NAME (ao-lab configs lists them), or --plan FILE of ao-lab choose"
                )
            if activation or option or skip or sparsity:
                raise WrongInput(
                    "a plan says which layers have which configuration; leave --config and its options out"
                )
            from ao_lab.cli.choose import run_plan

            run_plan(model_dir, out_dir, plan, layout=layout.value, calibration=data, as_json=as_json)
            return
        if plan is not None:
            raise WrongInput(
                "--config is one configuration, and --plan one for each layer; give one of the two"
            )
        from ao_lab.cli.quantize import run_quantize

        run_quantize(
            model_dir,
            out_dir,
            config,
            activation=activation,
            options=option or [],
            skip=skip,
            sparsity=sparsity,
            layout=layout.value,
            as_json=as_json,
            calibration=data,
        )


@app.command()
def export(
    model_dir: Annotated[Path, typer.Argument(help="A folder of ao-lab quantize.")],
    out_file: Annotated[Path, typer.Argument(help="Where to write; a file that is not there yet.")],
    format: Annotated[
        FileFormat | None,
        typer.Option(help="What to write. Default: by the end of the file's name."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a quantized model for another program: GGUF for llama.cpp, ONNX for onnxruntime and OpenVINO."""
    from ao_lab.cli.terminal import work

    with work("export", f"{out_file} was not written", as_json):
        from ao_lab.cli.export import run_export

        run_export(model_dir, out_file, format.value if format else None, as_json)


@app.command()
def choose(
    model_dir: Annotated[Path, typer.Argument(help="A folder that transformers' save_pretrained wrote.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The plan, for ao-lab quantize --plan.")],
    config: Annotated[
        list[str],
        typer.Option(
            help="An option that a layer may get, any number of times: NAME, or 'NAME key=value ...' as --config and --option "
            "of ao-lab quantize; dense leaves a layer."
        ),
    ],
    calibration: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="A text file (or wikitext2 with --corpus-path) that options are scored and measured by.",
        ),
    ],
    bits: Annotated[float | None, typer.Option(help="Budget: stored bits a weight, scales and all.")] = None,
    size: Annotated[int | None, typer.Option("--bytes", help="Budget: bytes of the chosen weights.")] = None,
    microseconds: Annotated[
        float | None,
        typer.Option(help="Budget: time of the chosen layers' products, measured on the device."),
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="With --microseconds: tokens at once. Default: 1.")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="How codes are found, as for ao-lab quantize: clip, hqq, gptq, autoround, rotate."),
    ] = None,
    skip: Skip = None,
    windows: Annotated[int, typer.Option(help="Windows of text; a fourth is held out to measure by.")] = 32,
    length: Annotated[int, typer.Option(help="Tokens of a window.")] = 512,
    corpus_path: Annotated[
        Path | None,
        typer.Option(help="The folder of the corpus that holds a named text (ao-lab corpus prose)."),
    ] = None,
    layout: Annotated[
        Layout,
        typer.Option(
            help="compressed-tensors: options as readers of that layout compute them. Else as they are."
        ),
    ] = Layout.AUTO,
    seed: Annotated[int, typer.Option(help="Of the labels that are drawn from the model.")] = 0,
    device: OnDevice = None,
    as_json: AsJson = False,
) -> None:
    """Choose a configuration for each layer under a budget of bits, bytes or time, and measure the choice."""
    from ao_lab.cli.terminal import work

    with work("choose", f"no plan was written to {out}", as_json):
        from ao_lab.cli.calibration import Calibration
        from ao_lab.cli.choose import Wanted, run_choose

        where = device.value if device else None
        data = Calibration(calibration, method or [], windows, length, corpus_path, where)
        wanted = Wanted(
            data, config, bits, size, microseconds, rows, layout=layout.value, seed=seed, skip=skip
        )
        run_choose(model_dir, out, wanted, as_json)


@app.command()
def probe(
    model_dir: Annotated[Path, typer.Argument(help="A folder that transformers' save_pretrained wrote.")],
    data: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="A text file (or wikitext2 with --corpus-path); other models: .safetensors or .npz of their arguments.",
        ),
    ],
    candidate: Annotated[
        list[str] | None,
        typer.Option(
            help="Any number of times: a recipe (rowwise), a scheme of weights (nf4), 'WEIGHT x INPUT', or a configuration, "
            "'NAME key=value ...'. Default: rowwise."
        ),
    ] = None,
    skip: Skip = None,
    budget: Annotated[
        float, typer.Option(help="What outputs may move by, in their standard deviations.")
    ] = 0.05,
    tokens: Annotated[int, typer.Option(help="Tokens that are sampled of each layer's inputs.")] = 1024,
    windows: Annotated[int, typer.Option(help="Windows of text; a fourth is held out to measure by.")] = 32,
    length: Annotated[int, typer.Option(help="Tokens of a window.")] = 512,
    directions: Annotated[
        int,
        typer.Option(min=1, help="Backward passes of each batch; more predict sharper from few examples."),
    ] = 4,
    corpus_path: Annotated[
        Path | None,
        typer.Option(help="The folder of the corpus that holds a named text (ao-lab corpus prose)."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the report as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a figure (.png, .svg, .pdf).")] = None,
    seed: Annotated[int, typer.Option(help="Of the tokens and directions that are drawn.")] = 0,
    device: OnDevice = None,
    as_json: AsJson = False,
) -> None:
    """Which layers are safe in low precision, which would be quick, and why: errors on data, and what they cost the outputs."""
    from ao_lab.cli.terminal import work

    with work("probe", "no report was written", as_json):
        from ao_lab.cli.probe import Wanted, run_probe

        where = device.value if device else None
        wanted = Wanted(
            data,
            candidate or [],
            skip,
            windows,
            length,
            tokens,
            budget,
            directions,
            seed,
            corpus_path,
            where,
            out,
            plot,
        )
        run_probe(model_dir, wanted, as_json)


@app.command("eval")
def evaluate(
    model_dir: Annotated[
        Path, typer.Argument(help="A folder of ao-lab quantize, of torchao, or of transformers.")
    ],
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks",
            help="perplexity, accuracy, agreement, weights, or tasks of lm-evaluation-harness; commas or several times.",
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option(help="Windows of text (and examples of each task of the harness).")
    ] = 32,
    length: Annotated[
        int | None, typer.Option(help="Tokens of a window. Default: 512, or the model's context if shorter.")
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(help="A text file, or wikitext2 with --corpus-path. Default: Python source, of sympy."),
    ] = None,
    corpus_path: Annotated[
        Path | None,
        typer.Option(help="The folder of the corpus that holds a named text (ao-lab corpus prose)."),
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(help="Harness: examples before each question. Default: the task's own.")
    ] = None,
    batch_size: Annotated[
        str | None, typer.Option(help="Harness: requests at once, a number, auto or auto:N. Default: 1.")
    ] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Harness: ask by the tokenizer's chat template.")
    ] = False,
    include_path: Annotated[
        Path | None, typer.Option(help="Harness: a folder with further tasks (YAML).")
    ] = None,
    against: Annotated[Path | None, typer.Option(help="The folder of the model that it was made of.")] = None,
    device: OnDevice = None,
    save: Annotated[
        bool, typer.Option("--save", help="Write eval.json, and the results into the card.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Perplexity, accuracy and distance from the base model, offline; tasks of lm-evaluation-harness where it is."""
    from ao_lab.cli.terminal import work

    with work("eval", "no result was saved", as_json):
        from ao_lab.cli.evaluate import run_eval
        from ao_lab.eval import HarnessOptions

        run_eval(
            model_dir,
            [name for given in tasks or [] for name in given.split(",") if name],
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


@app.command()
def tune(
    model_dir: Annotated[
        Path, typer.Argument(help="A folder of transformers, or one of quantized weights, tuned as it is.")
    ],
    recipe: Annotated[str | None, typer.Option(help="Tune training by this recipe, such as rowwise.")] = None,
    config: Annotated[
        str | None, typer.Option(help="Tune the model quantized by this configuration or scheme.")
    ] = None,
    activation: Annotated[str | None, typer.Option(help="As for ao-lab quantize, with --config.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="As for ao-lab quantize, with --config.")] = None,
    skip: Skip = None,
    pad: Annotated[
        bool, typer.Option("--pad", help="With --recipe: pad lengths that it does not take.")
    ] = False,
    rows: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Rows (tokens) to measure, any number of times. Default: 1 and 512, with --recipe 2048.",
        ),
    ] = None,
    launches: Annotated[
        Launches, typer.Option(help="How the model runs: graph is CUDA graphs, and torch.compile with them.")
    ] = Launches.EAGER,
    error: Annotated[float | None, typer.Option(help="The largest error of a product, such as 0.05.")] = None,
    time: Annotated[
        float | None,
        typer.Option(help="Take the smallest error within so many times the quickest time, such as 1.2."),
    ] = None,
    device: OnDevice = None,
    as_json: AsJson = False,
) -> None:
    """Measure which kernels a model's layers are quickest with on this device, and save the choices."""
    from ao_lab.cli.terminal import work

    with work("tune", "no choice was saved", as_json):
        from ao_lab.cli.tune import Wanted, run_tune

        where, how = device.value if device else None, launches.value
        wanted = Wanted(
            recipe, config, activation, option or [], skip, pad, rows or [], error, time, how, where
        )
        run_tune(model_dir, wanted, as_json)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """What this machine can run, and why not; exit code 1 where something is broken."""
    from ao_lab.cli.doctor import report

    if not report(as_json):
        raise typer.Exit(1)


def show_version(asked: bool) -> None:
    """Print the version and stop."""
    if asked:
        from ao_lab.install.versions import __version__

        sys.stdout.write(__version__ + "\n")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
    verbose: Annotated[
        int,
        typer.Option(
            "-v",
            "--verbose",
            count=True,
            help="Say on stderr what is done (the logger ao_lab); -vv says more.",
        ),
    ] = 0,
) -> None:
    """Options that stand before the command."""
    if verbose:
        from ao_lab.cli.terminal import log_to_stderr

        log_to_stderr(verbose)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code."""
    try:
        with heeding_sigterm():
            return int(app(args=arguments, standalone_mode=False) or 0)
    except (typer.Abort, KeyboardInterrupt):
        return complain("stopped", INTERRUPTED)
    except Terminated:
        return complain("stopped", TERMINATED)
    except Stopped as error:
        return complain(str(error), error.code)
    except (WrongInput, MissingExtra) as error:
        return complain(str(error), 2)
    except BrokenPipeError:
        return unread()
    except (OSError, ImportError) as error:
        return complain(*described(error))
    except typer.TyperException as error:
        words = error.format_message()
        return complain(f"{words} (ao-lab --help lists what there is)", error.exit_code) if words else 2


def described(error: OSError | ImportError) -> tuple[str, int]:
    """The line about a missing file or library, and its code: 2 where an extra brings the library."""
    if isinstance(error, ModuleNotFoundError) and isinstance(found := explained(error), MissingExtra):
        return str(found), 2
    return f"{type(error).__name__}: {error}", 1


def unread() -> int:
    """Whoever read our output has left, as `head` does: nothing more is written, at the end of the process either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def complain(message: str, code: int) -> int:
    """One line on stderr; the exit code is passed through."""
    sys.stderr.write("ao-lab: " + printable(" ".join(message.split())) + "\n")
    return code


def entry() -> None:
    """The program `ao-lab`."""
    leave(main())
