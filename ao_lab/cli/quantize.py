"""`ao-lab quantize`: a folder of a transformers model in, a quantized folder out that other programs read."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ao_lab.checkpoint.io.links import links_out
from ao_lab.checkpoint.io.strict_json import shown
from ao_lab.cli.configs import check_name, config_classes, options_of
from ao_lab.cli.copied_files import SETTINGS, copy_the_rest
from ao_lab.cli.layout import say, select_layout
from ao_lab.cli.skipped_layers import SkippedLayers
from ao_lab.cli.sparsity import HEAD, select_sparse_layout, sparse_model
from ao_lab.cli.terminal.output import WrongInput, print_json, print_table
from ao_lab.cli.terminal.progress import track_progress
from ao_lab.cli.terminal.requirements import check_room, check_writable, without_model
from ao_lab.install.extras import needed

if TYPE_CHECKING:
    from ao_lab.checkpoint.api import Saved
    from ao_lab.config.base import Config
    from ao_lab.quantization.api import Progress
    from ao_lab.quantization.report import Report

#: Files that transformers, or ao_lab, reads weights from.
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")
GRANULARITY = re.compile(r"(Per\w+)(?:\(([\d\s,-]*)\))?")


def run_quantize(
    source: Path,
    target: Path,
    name: str,
    *,
    activation: str | None,
    options: list[str],
    skip: list[str] | None,
    sparsity: str | None,
    layout: str,
    as_json: bool,
) -> None:
    """Quantize weight by weight while they are read, save, and say what became of each layer.

    X
    """
    check_folders(source, target)
    config = config_of(name, activation, options)
    if sparsity is None and config.sparsity is not None:
        raise WrongInput(
            f"--option sparsity={config.sparsity} is for pruned weights; --sparsity {config.sparsity} prunes them too"
        )
    plan = (
        select_layout(config, name, layout)
        if sparsity is None
        else select_sparse_layout(config, sparsity, layout)
    )
    from ao_lab.checkpoint.model_card import write_card
    from ao_lab.quantization.api import report_of

    skipped_layers = SkippedLayers(skip, HEAD if sparsity is not None else ())
    try:
        if sparsity is None:
            plan = plan.for_model(source, skipped_layers)
        with progress_bar(as_json) as progress:
            load = loaded if sparsity is None else sparse_model
            model = load(source, plan.config, skipped_layers, progress)
        skipped_layers.check()
        report, before = report_of(model), stored_bytes(source, model)
        beside, tensors = unloaded(source, model)
        plan, saved = plan.saved(model, target, beside)
    except (ValueError, FileNotFoundError) as error:
        raise WrongInput(str(error)) from error
    files = copy_the_rest(source, target)
    command = " ".join(
        ["ao-lab quantize --config", name, *([f"--activation {activation}"] if activation else [])]
        + [f"--option {option}" for option in options]
        + [f"--skip {layer}" for layer in skip or []]
        + ([f"--sparsity {sparsity}"] if sparsity else [])
        + ([f"--layout {layout}"] if layout != "auto" else [])
    )
    told = {**plan.told(saved.limits), "tensors": tensors, "files": files}
    notes = (*plan.reasons, *plan.changes, *saved.limits)
    write_card(
        target, base_model=str(source), command=command, notes=notes, beside=tensors, base_folder=source
    )
    show(report, saved, before, skipped_layers, told, as_json)


def config_of(name: str, activation: str | None, options: list[str]) -> Config:
    """The configuration of a class's name or of a scheme's; WrongInput with what there is."""
    from ao_lab.config.base import SchemeConfig
    from ao_lab.config.recipe import named

    given, classes = dict(map(parsed, options)), config_classes()
    try:
        scheme = None if name in classes else named(name)
    except ValueError:
        check_name(name)
        raise
    kind = classes.get(name, SchemeConfig)
    check_options(name, kind, given)
    fixed = {} if scheme is None else {"scheme": scheme}
    try:
        return kind(**{**fixed, "activation_scheme": activation, **given})
    except (TypeError, ValueError) as error:
        raise WrongInput(f"--config {name}: {error}") from error


def check_options(name: str, kind: type[Config], given: Collection[str]) -> None:
    """WrongInput, with the options that there are, for one that the configuration lacks."""
    known = [field.name for field in fields(kind) if field.init]
    if unknown := [option for option in given if option not in known]:
        raise WrongInput(
            f"--config {name} has no option {', '.join(unknown)}; it has {', '.join(options_of(kind))} (ao-lab configs shows "
            "their defaults)"
        )


def parsed(option: str) -> tuple[str, Any]:
    """key=value, the value as JSON where it is that, a granularity where it is called so: PerRow, PerGroup(64)."""
    from ao_lab.config import granularity

    key, equals, value = option.partition("=")
    if not equals or not key.isidentifier():
        raise WrongInput(f"--option {option}: write key=value, for instance group_size=32")
    if (found := GRANULARITY.fullmatch(value)) and found[1] in granularity.NAMES:
        try:
            numbers = tuple(map(int, re.findall(r"-?\d+", found[2] or "")))
            arguments = (numbers,) if found[1] == "PerBlock" else numbers
            return key, getattr(granularity, found[1])(*arguments)
        except (TypeError, ValueError) as error:
            raise WrongInput(
                f"--option {shown(option)}: write it with its numbers, PerGroup(64) or PerBlock(128, 128)"
            ) from error
    try:
        return key, json.loads(value)
    except (ValueError, RecursionError):
        return key, value


def check_folders(source: Path, target: Path) -> None:
    """WrongInput where there is no model, or where the result would fall among other files."""
    if not (source / "config.json").is_file():
        raise WrongInput(without_model(source, "transformers' save_pretrained"))
    if outside := links_out(source, SETTINGS):
        raise WrongInput(f"{source / outside[0]} is a link out of the model's folder; copy the file there")
    if not any(path for pattern in WEIGHTS for path in source.glob(pattern)):
        raise WrongInput(f"{source} has a config.json and no weights: no file named model.safetensors")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise WrongInput(f"{target} is there already and not an empty folder; choose another one")
    check_writable(target, "OUT_DIR")
    # Weights of 32 bits become at least one bit each.
    check_room(target, sum(file.stat().st_size for file in source.glob("*.safetensors")) // 32, "OUT_DIR")


def loaded(source: Path, config: Config, accepts: SkippedLayers, progress: Progress | None) -> Any:
    """The quantized model, the rest in the dtype in which it was saved; its dense weights are never all in memory."""
    from ao_lab.checkpoint.streaming.api import quantize_pretrained

    transformers = needed("transformers")

    hide_progress: Any = transformers.utils.logging.disable_progress_bar
    hide_progress()
    return quantize_pretrained(source, config, accepts, progress=progress)


@contextmanager
def progress_bar(as_json: bool) -> Iterator[Progress]:
    """Shows weights as they are quantized: a bar on a terminal's stderr, lines elsewhere and beside JSON."""
    with track_progress("quantize", plain=as_json, transient=True) as work:
        yield lambda name, done, total: work.at(done, name, total)


def stored_bytes(source: Path, model: Any) -> int:
    """Bytes of the folder's weights: of its safetensors files, or else what the model would take without quantization."""
    from ao_lab.checkpoint.io.shards import look_at

    try:
        return look_at(source).bytes
    except FileNotFoundError:
        return sum(parameter.numel() * parameter.dtype.itemsize for parameter in model.parameters())


def unloaded(source: Path, model: Any) -> tuple[dict[str, Any], list[str]]:
    """Tensors of the folder that transformers does not load, and that go along as they are (heads that predict later tokens,
    for instance); and what is to be said of them and of those that no model of the class has."""
    from ao_lab.checkpoint.experts.conversion import unused_names
    from ao_lab.checkpoint.io.shards import has_weights, look_at
    from ao_lab.checkpoint.streaming.quantized_folder import is_quantized

    if not has_weights(source) or is_quantized(source):
        return {}, []
    folder = look_at(source)
    beside, unknown = unused_names(folder, model)
    told = [
        f"{what}: {len(names)} tensors that transformers does not load ({', '.join(names[:2])}, for instance)"
        for what, names in (("kept in high precision", beside), ("left out", unknown))
        if names
    ]
    return folder.read(beside), told


def show(
    report: Report,
    saved: Saved,
    before: int,
    skipped_layers: SkippedLayers,
    told: dict[str, Any],
    as_json: bool,
) -> None:
    """The layers, the sizes, and what is to be known of the layout, as tables or as JSON."""
    rows = [
        {
            "layer": layer.name,
            "scheme": layer.scheme,
            "kernel": layer.kernel,
            "sparsity": layer.sparsity,
            "storage": layer.storage,
            "bytes": layer.bytes,
            "reason": skipped_layers.told(layer),
        }
        for layer in report.layers
    ]
    if as_json:
        print_json({**told, "bytes_before": before, "bytes": saved.bytes, "layers": rows})
        return
    # Of a model that was not pruned two columns would say nothing.
    empty = {"sparsity": "", "storage": "dense"}
    columns = [
        key
        for key in (rows[0] if rows else ())
        if key not in empty or any(row[key] != empty[key] for row in rows)
    ]
    # Why a linear layer is quantized goes without saying.
    kinds = {layer.name: layer.kind for layer in report.changed}
    plain = [{**row, "reason": ""} if row["reason"] == kinds.get(str(row["layer"])) else row for row in rows]
    cells = [[str(row[key]) or "-" for key in columns] for row in plain]
    print_table("Layers", columns, cells, numbers=["bytes"])
    print_table(
        "Folder", ["layout", "bytes before", "bytes"], [[saved.layout, str(before), str(saved.bytes)]]
    )
    say(told)


__all__ = ["run_quantize"]
