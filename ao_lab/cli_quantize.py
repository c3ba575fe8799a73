"""`ao-lab quantize`: a folder of a transformers model in, a quantized folder out that other programs read."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ao_lab.cli_output import WrongInput, print_json, print_table

if TYPE_CHECKING:
    from ao_lab.checkpoints import Saved
    from ao_lab.configs import Config
    from ao_lab.quantize_model import Progress
    from ao_lab.report import Report

#: Files of the model's folder that are made anew, and so not copied.
REMADE = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json", "eval.json")


def run_quantize(
    source: Path,
    target: Path,
    name: str,
    *,
    activation: str | None,
    options: list[str],
    skip: list[str],
    layout: str,
    as_json: bool,
) -> None:
    """Quantize weight by weight while they are read, save, and say what became of each layer."""
    config = config_of(name, activation, options)
    check_folders(source, target)
    from ao_lab.checkpoints import save_pretrained
    from ao_lab.model_card import write_card
    from ao_lab.quantize_model import report_of

    try:
        with progress_bar(as_json) as progress:
            model = loaded(source, config, skip, progress)
        report, before = report_of(model), stored_bytes(source, model)
        saved = save_pretrained(model, target, layout=layout)
    except ValueError as error:
        raise WrongInput(str(error)) from error
    copy_the_rest(source, target)
    command = " ".join(
        ["ao-lab quantize --config", name, *([f"--activation {activation}"] if activation else [])]
        + [f"--option {option}" for option in options]
    )
    write_card(target, base_model=str(source), command=command, notes=saved.reasons)
    show(report, saved, before, as_json)


def config_of(name: str, activation: str | None, options: list[str]) -> Config:
    """The configuration of a class's name or of a scheme's; WrongInput with what there is."""
    import ao_lab
    from ao_lab.recipes import named

    given = dict(map(parsed, options))
    try:
        if name in ao_lab.__all__ and name.endswith("Config") and name != "FqnToConfig":
            made: Config = getattr(ao_lab, name)(**given, activation_scheme=activation)
            return made
        return ao_lab.SchemeConfig(scheme=named(name), activation_scheme=activation, **given)
    except (TypeError, ValueError) as error:
        classes = ", ".join(sorted(n for n in ao_lab.__all__ if n.endswith("Config") and n != "FqnToConfig"))
        raise WrongInput(
            f"--config {name}: {error}. It is a scheme (ao-lab schemes lists them) or one of {classes}"
        ) from error


def parsed(option: str) -> tuple[str, Any]:
    """key=value, the value as JSON where it is that."""
    key, equals, value = option.partition("=")
    if not equals or not key.isidentifier():
        raise WrongInput(f"--option {option}: write key=value, for instance group_size=32")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def check_folders(source: Path, target: Path) -> None:
    """WrongInput where there is no model, or where the result would fall among other files."""
    if not (source / "config.json").is_file():
        raise WrongInput(
            f"{source} has no config.json; give a folder that transformers' save_pretrained wrote"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise WrongInput(f"{target} is there already and not an empty folder; choose another one")


def loaded(source: Path, config: Config, skip: list[str], progress: Progress | None) -> Any:
    """The quantized model, the rest in the dtype in which it was saved; its dense weights are never all in memory."""
    import transformers

    from ao_lab.streaming import quantize_pretrained

    hide_progress: Any = transformers.utils.logging.disable_progress_bar
    hide_progress()
    return quantize_pretrained(source, config, kept_out(skip), progress=progress)


@contextmanager
def progress_bar(as_json: bool) -> Iterator[Progress | None]:
    """Shows weights as they are quantized, on a terminal's stderr; None where there is no terminal, and beside JSON."""
    if as_json or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda name, done, total: bar.update(task, description=name, completed=done, total=total)


def stored_bytes(source: Path, model: Any) -> int:
    """Bytes of the folder's weights: of its safetensors files, or else what the model would take without quantization."""
    from ao_lab.streaming import weight_files

    try:
        return sum(file.stat().st_size for file in weight_files(source))
    except FileNotFoundError:
        return sum(parameter.numel() * parameter.dtype.itemsize for parameter in model.parameters())


def kept_out(skip: list[str]) -> Any:
    """A filter of nn.Linear but those that are named, or end in .NAME."""
    from ao_lab.layers import is_linear

    ends = tuple(f".{name}" for name in skip)
    return lambda module, path: is_linear(module) and not f".{path}".endswith(ends or (" ",))


def copy_the_rest(source: Path, target: Path) -> None:
    """Tokenizer, generation settings and whatever else lies beside the weights."""
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(REMADE) and not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)


def show(report: Report, saved: Saved, before: int, as_json: bool) -> None:
    """The layers and the sizes, as a table or as JSON."""
    rows = [
        {
            "layer": layer.name,
            "scheme": layer.scheme,
            "kernel": layer.kernel,
            "bytes": layer.bytes,
            "reason": layer.reason,
        }
        for layer in report.layers
    ]
    sizes = {
        "layout": saved.layout,
        "bytes_before": before,
        "bytes": saved.bytes,
        "reasons": list(saved.reasons),
    }
    if as_json:
        print_json({**sizes, "layers": rows})
        return
    cells = [[str(value) or "-" for value in row.values()] for row in rows]
    print_table("Layers", ["layer", "scheme", "kernel", "bytes", "reason"], cells, numbers=["bytes"])
    print_table(
        "Folder", ["layout", "bytes before", "bytes"], [[saved.layout, str(before), str(saved.bytes)]]
    )


__all__ = ["run_quantize"]
