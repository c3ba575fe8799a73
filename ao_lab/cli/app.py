"""The command line `ao-lab`.

Results go to stdout, progress and errors to stderr. `--json` prints one document on stdout and nothing else there. The exit
code is 0 when all went well, 1 when something failed, 2 for wrong input and for a missing extra, 130 after Ctrl-C and 143 after
SIGTERM. A wrong input, a missing file or a missing library is one clear line; an error that nobody foresaw keeps its traceback,
because it is a fault to report.

Each command imports what it needs when it runs, so that `ao-lab --help` is quick and needs neither torch nor JAX. Packages
above this one register further commands (`ao_lab.cli.plugins`): `reproduce`, `merge`, `corpus`, `pretrain`, `bench-kernels` and
`ledger` are those of the experiments.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ao_lab.cli.bench import command as bench_command
from ao_lab.cli.compare import command as compare_command
from ao_lab.cli.completion import config_names, format_names, method_names, scheme_names
from ao_lab.cli.eval import command as eval_command
from ao_lab.cli.options import (
    CALIBRATION,
    CORPUS,
    LENGTH,
    AsJson,
    Device,
    FormatOfFile,
    GgufEmbedding,
    Launches,
    Layout,
    ModelDir,
    OnDevice,
    Skip,
    model_folder,
)
from ao_lab.cli.plot import app as plot_app
from ao_lab.cli.plugins import Commands, helped, way_out
from ao_lab.cli.probe import command as probe_command
from ao_lab.cli.terminal import (
    INTERRUPTED,
    TERMINATED,
    Stopped,
    Terminated,
    WrongInput,
    heeding_sigterm,
    leave,
    printable,
    quiet_imports,
    short_warnings,
)
from ao_lab.install.extras import MissingExtra, explained
from ao_lab.measure.asked import LENGTH as TOKENS

app = typer.Typer(
    name="ao-lab",
    cls=Commands,
    help="Low-precision deep learning: quantize, calibrate, evaluate and export models; number formats and schemes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(plot_app, name="plot")


@app.command()
def formats(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A format such as float8_e4m3fn. Default: all of them.", autocompletion=format_names
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List number formats: range, precision, special values; with a name, all its values."""
    from ao_lab.cli.listings import show_formats

    show_formats(name, as_json)


@app.command()
def schemes(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A scheme such as mxfp8_e4m3, or a prefix such as torchao. Default: those of ao_lab.",
            autocompletion=scheme_names,
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also the schemes that follow other libraries.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List quantization schemes (element format, scales, zero points); with a name, what its fields say."""
    from ao_lab.cli.schemes import show_schemes

    show_schemes(name, as_json, everything)


@app.command()
def configs(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A configuration such as Int4WeightOnlyConfig, or a word: int4, W8A8. Default: all of them.",
            autocompletion=config_names,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List configurations for ao-lab quantize; with a name, its options and their defaults."""
    from ao_lab.cli.listings import show_configs

    show_configs(name, as_json)


@app.command()
def quantize(
    model_dir: ModelDir,
    out_dir: Annotated[Path, typer.Argument(help="Output folder; new or empty.")],
    config: Annotated[
        str | None,
        typer.Option(
            help="A configuration (ao-lab configs) such as Int4WeightOnlyConfig or 'Int4WeightOnlyConfig group_size=32', or a "
            "scheme such as mxfp4 (ao-lab schemes).",
            autocompletion=config_names,
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="Instead of --config: the plan of ao-lab choose, a configuration for each layer."),
    ] = None,
    activation: Annotated[
        str | None,
        typer.Option(
            help="Scheme of the activations (layer inputs). Default: the configuration's; with a scheme, none (weight-only)."
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="group_size=32, for instance: the same as --config 'NAME group_size=32'; repeatable."
        ),
    ] = None,
    skip: Skip = None,
    sparsity: Annotated[
        str | None,
        typer.Option(
            help="2:4: prune linear weights by magnitude first and store the compressed half (--layout ao_lab)."
        ),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            rich_help_panel=CALIBRATION,
            help="Calibration data: a text file, or wikitext2 with --corpus-path. Use text like that the model will see.",
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=CALIBRATION,
            help="Quantization algorithm, repeatable: rotate, smooth, awq, clip, hqq, gptq, autoround, lowrank, bias; kv: "
            "static scales of a KV cache. With options: 'gptq damping=0.01' (its classes' in ao_lab.calibration). Default: "
            "round to nearest.",
            autocompletion=method_names,
        ),
    ] = None,
    windows: Annotated[
        int,
        typer.Option(
            "--windows",
            rich_help_panel=CALIBRATION,
            help="Number of calibration sequences.",
        ),
    ] = 128,
    calibration_windows: Annotated[int | None, typer.Option("--calibration-windows", hidden=True)] = None,
    length: Annotated[int | None, typer.Option(rich_help_panel=CALIBRATION, help=LENGTH)] = None,
    corpus_path: Annotated[
        Path | None,
        typer.Option(rich_help_panel=CALIBRATION, help=CORPUS),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=CALIBRATION,
            help="Folder for finished blocks; after an interruption the same command resumes there.",
        ),
    ] = None,
    stream: Annotated[
        bool,
        typer.Option(
            "--stream",
            rich_help_panel=CALIBRATION,
            help="Keep one transformer block at a time on the device; weights are read from files, activations stay in host "
            "memory.",
        ),
    ] = False,
    device: Annotated[
        Device | None,
        typer.Option(
            rich_help_panel=CALIBRATION, help="Device on which --method quantizes the model. Default: cpu."
        ),
    ] = None,
    layout: Annotated[
        Layout,
        typer.Option(
            help="auto: compressed-tensors if possible, the configuration adapted to what its loaders compute (changes are "
            "printed), else ao_lab. compressed-tensors: the configuration unchanged, or an error. ao_lab: any configuration; "
            "transformers loads it after `import ao_lab`."
        ),
    ] = Layout.AUTO,
    base_model: Annotated[
        str | None,
        typer.Option(help="Name on the Hub that the model card gives the model. Default: its own card's."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Quantize a Hugging Face model; the result loads in transformers, and in vLLM where it has kernels."""
    from ao_lab.cli.early import check_counts, check_methods, check_quantize, check_skip, check_tokens
    from ao_lab.cli.terminal import check_new_folder, whole_or_nothing, work

    # Before what takes seconds to import.
    check_quantize(model_dir, config, activation, option or [])
    check_methods(method or [], calibration)
    check_new_folder(out_dir)
    check_skip(model_dir, skip or [])
    check_counts(length=length)
    check_tokens(model_dir, length)
    kept = f"nothing was written to {out_dir}"
    calibrated = None if calibration is None else model_dir
    with work("quantize", kept, as_json, resume, calibrated), whole_or_nothing(out_dir):
        from ao_lab.cli.calibration import Calibration

        where = device.value if device else None
        count = windows if calibration_windows is None else calibration_windows
        data = Calibration(
            calibration, method or [], count, length or TOKENS, corpus_path, where, resume, stream
        )
        if config is None:
            if plan is None:
                raise WrongInput(
                    "give --config NAME (ao-lab configs lists them), or --plan FILE, written by ao-lab choose"
                )
            if activation or option or skip or sparsity:
                raise WrongInput(
                    "--plan already assigns a configuration to each layer; drop --activation, --option, --skip and --sparsity"
                )
            from ao_lab.cli.choose import run_plan

            where = layout.value
            run_plan(
                model_dir,
                out_dir,
                plan,
                layout=where,
                calibration=data,
                as_json=as_json,
                base_model=base_model,
            )
            return
        if plan is not None:
            raise WrongInput(
                "--config is one configuration for all layers, --plan one for each layer; give only one of them"
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
            base_model=base_model,
        )


@app.command()
def export(
    model_dir: Annotated[
        Path,
        typer.Argument(help="Folder written by ao-lab quantize.", parser=model_folder, metavar="MODEL_DIR"),
    ],
    out_file: Annotated[Path, typer.Argument(help="Output file; must not exist yet.")],
    format: FormatOfFile = None,
    embedding: GgufEmbedding = None,
    as_json: AsJson = False,
) -> None:
    """Export a quantized model: GGUF for llama.cpp, ONNX for onnxruntime and OpenVINO."""
    from ao_lab.cli.early import check_model
    from ao_lab.cli.terminal import work

    check_model(model_dir, "ao-lab quantize")
    with work("export", f"{out_file} was not written", as_json):
        from ao_lab.cli.export import run_export

        run_export(model_dir, out_file, format.value if format else None, as_json, embedding)


@app.command()
def choose(
    model_dir: ModelDir,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Output file: the plan for ao-lab quantize --plan.")
    ],
    config: Annotated[
        list[str],
        typer.Option(
            help="A candidate configuration, repeatable: NAME, or 'NAME key=value ...' as --config and --option of ao-lab "
            "quantize; dense leaves a layer unquantized.",
            autocompletion=config_names,
        ),
    ],
    calibration: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="Calibration data that candidates are scored on: a text file, or wikitext2 with --corpus-path.",
        ),
    ],
    bits: Annotated[
        float | None, typer.Option(help="Budget: average stored bits per weight, scales included.")
    ] = None,
    size: Annotated[int | None, typer.Option("--bytes", help="Budget: bytes of the weights.")] = None,
    microseconds: Annotated[
        float | None,
        typer.Option(help="Budget: total time of the layers' matmuls, measured on the device."),
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="With --microseconds: tokens per forward pass. Default: 1.")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Quantization algorithm, repeatable: clip, hqq, gptq, autoround, rotate.",
            autocompletion=method_names,
        ),
    ] = None,
    skip: Skip = None,
    windows: Annotated[
        int, typer.Option(help="Number of sequences; a quarter is held out for evaluation.")
    ] = 32,
    length: Annotated[int | None, typer.Option(help=LENGTH)] = None,
    corpus_path: Annotated[
        Path | None,
        typer.Option(help=CORPUS),
    ] = None,
    layout: Annotated[
        Layout,
        typer.Option(
            help="compressed-tensors: candidates as loaders of that layout compute them. Otherwise unchanged."
        ),
    ] = Layout.AUTO,
    seed: Annotated[int, typer.Option(help="Random seed, of labels sampled from the model.")] = 0,
    device: OnDevice = None,
    as_json: AsJson = False,
) -> None:
    """Mixed precision: choose a configuration per layer under a budget of bits, bytes or time, and measure the result."""
    from ao_lab.cli.early import check_source, check_texts
    from ao_lab.cli.terminal import work

    check_source(model_dir, config, length, skip or [])
    check_texts(calibration=calibration)
    with work("choose", f"no plan was written to {out}", as_json):
        from ao_lab.cli.calibration import Calibration
        from ao_lab.cli.choose import Wanted, run_choose

        where = device.value if device else None
        data = Calibration(calibration, method or [], windows, length or TOKENS, corpus_path, where)
        wanted = Wanted(
            data, config, bits, size, microseconds, rows, layout=layout.value, seed=seed, skip=skip
        )
        run_choose(model_dir, out, wanted, as_json)


app.command("probe")(probe_command)
app.command("eval")(eval_command)
app.command("compare")(compare_command)
app.command("bench")(bench_command)


@app.command()
def tune(
    model_dir: ModelDir,
    recipe: Annotated[
        str | None, typer.Option(help="Tune training with this recipe, such as rowwise.")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            help="Tune inference, quantized with this configuration or scheme.", autocompletion=config_names
        ),
    ] = None,
    activation: Annotated[str | None, typer.Option(help="With --config: as for ao-lab quantize.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="With --config: as for ao-lab quantize.")] = None,
    skip: Skip = None,
    pad: Annotated[
        bool, typer.Option("--pad", help="With --recipe: pad dimensions that it does not support.")
    ] = False,
    rows: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Tokens per forward pass (batch size x sequence length) to measure, repeatable. Default: 1 and 512; with "
            "--recipe 2048.",
        ),
    ] = None,
    launches: Annotated[
        Launches,
        typer.Option(help="eager, or graph: CUDA graphs, as with torch.compile mode reduce-overhead."),
    ] = Launches.EAGER,
    error: Annotated[
        float | None, typer.Option(help="Largest relative error of a matmul, such as 0.05.")
    ] = None,
    time: Annotated[
        float | None,
        typer.Option(
            help="Choose the most accurate kernel within this factor of the fastest time, such as 1.2."
        ),
    ] = None,
    device: OnDevice = None,
    as_json: AsJson = False,
) -> None:
    """Measure the fastest kernel for each layer on this device, and save the choices."""
    from ao_lab.cli.early import check_configuration, check_source
    from ao_lab.cli.terminal import work

    check_source(model_dir, [], None, skip or [])
    check_configuration(config, activation, option or [])
    with work("tune", "no choice was saved", as_json):
        from ao_lab.cli.tune import Wanted, run_tune

        where, how = device.value if device else None, launches.value
        wanted = Wanted(
            recipe, config, activation, option or [], skip, pad, rows or [], error, time, how, where
        )
        run_tune(model_dir, wanted, as_json)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Check what this machine can run, and why not; exit code 1 if something is broken."""
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
            help="Log progress to stderr (logger ao_lab); -vv logs details.",
        ),
    ] = 0,
    imports: Annotated[
        list[Path] | None,
        typer.Option(
            "--import",
            metavar="FILE.py",
            help="Run this file first: formats and schemes that it registers (ao_lab.register) have names then; repeatable.",
        ),
    ] = None,
) -> None:
    """Options that stand before the command."""
    from ao_lab.cli.plugins import run_file

    for file in imports or []:
        run_file(file)
    if verbose:
        from ao_lab.cli.terminal import log_to_stderr

        log_to_stderr(verbose)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code."""
    try:
        with heeding_sigterm(), quiet_imports(), short_warnings():
            code = int(app(args=arguments, standalone_mode=False) or 0)
            # Typer makes an exit code of Ctrl-C where no command heeded it.
            return complain("stopped", code) if code == INTERRUPTED else code
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
        told = f"{words.removesuffix('.')}{way_out(error)} (see {helped(error)} --help)"
        return complain(told, error.exit_code) if words else 2
    except (RuntimeError, MemoryError) as error:
        if not is_full(error):
            raise
        words = str(error) or "there is not enough memory"
        return complain(f"{words}; use a smaller model, fewer or shorter sequences, or --device cpu", 1)


def is_full(error: RuntimeError | MemoryError) -> bool:
    """Whether memory does not suffice; torch, whose errors say so, has been imported where there is one."""
    if "torch" not in sys.modules:
        return isinstance(error, MemoryError)
    from ao_lab.measure.memory import out_of_memory

    return out_of_memory(error)


def described(error: OSError | ImportError) -> tuple[str, int]:
    """The line about a missing file or library, and its code: 2 where an extra brings the library."""
    if isinstance(error, ModuleNotFoundError) and isinstance(found := explained(error), MissingExtra):
        return str(found), 2
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}; make room, or name a folder on another disk", 1
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
