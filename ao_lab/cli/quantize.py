"""`ao-lab quantize`: a folder of a transformers model in, a quantized folder out that other programs read.

What lies beside the weights of a model's folder, and goes along into the quantized one: tokenizer, processor, settings.

The result is made to be handed on, so it holds files of the model's folder alone. A link that leads out of it is not followed:
whoever made the folder may have pointed it at any file of this machine. The Hub's cache, whose folders are links into blobs of
the same repository, counts as one folder. Code goes along only where a tokenizer or a processor names it; the model itself is
one of transformers' own classes. Whatever stays behind is told.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ao_lab.checkpoint.io.files import hub_name, leads_out, links_out, resolved, roots
from ao_lab.checkpoint.io.strict_json import LARGEST_FILE, parsed, regular_size, shown
from ao_lab.cli.early import check_model, check_weights
from ao_lab.cli.layout import (
    HEAD,
    SkippedLayers,
    say,
    select_layout,
    select_sparse_layout,
    sparse_model,
    undivided_note,
)
from ao_lab.cli.named_config import config_of, with_options
from ao_lab.cli.terminal import (
    WrongInput,
    check_new_folder,
    check_room,
    check_writable,
    console,
    lines,
    print_json,
    print_table,
    track_progress,
)
from ao_lab.cli.terminal import say as say_now
from ao_lab.install.extras import needed, wrong_input
from ao_lab.transforms.report import groups

if TYPE_CHECKING:
    from ao_lab.checkpoint.api import Saved
    from ao_lab.cli.calibration import Calibration
    from ao_lab.config.base import Config
    from ao_lab.quantization.report import Layer, Report
    from ao_lab.transforms.plan import Progress

#: Files of the model's own folder that are made anew, or are of its weights alone: these in any program's format, results of
#: evaluations, and what `ao-lab pretrained` made them of.
REMADE = re.compile(
    r"(?:model|ao_lab|pytorch_model|tf_model|flax_model|consolidated|diffusion_pytorch_model)[^/]*\.(?:safetensors|bin|pth?|h5|"
    r"msgpack)|.*\.gguf|.*\.index\.json|(?:eval|pretrained)\.json|.*\.safetensors"
)
#: Ends of other files that may be weights in a second format; small ones are voices, prompts, statistics.
HEAVY = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data", ".ot")
LARGEST = 32 * 2**20
#: The file by which sentence-transformers names the sub-folders that it loads, with their weights.
MODULES = "modules.json"
#: The file whose code ao_lab and transformers do not need: the model is one of transformers' own classes.
MODEL_CONFIG = "config.json"


#: Settings that transformers reads, unknown entries too, and that are written with the result: the text of a link out of the
#: folder would go along.
SETTINGS = (MODEL_CONFIG, "generation_config.json")


def copy_the_rest(source: Path, target: Path) -> list[str]:
    """Copy what lies beside the weights, with sub-folders, where the result has no such file; what is left out, a line each."""
    places, parts = roots(source), _parts(source)
    code = _named_code(source)
    left: list[str] = []
    for name in _names(source, left, target, parts):
        file = source / name
        whole = name.parts[0] in parts and len(name.parts) > 1
        if (target / name).exists() or (len(name.parts) == 1 and REMADE.fullmatch(name.name)):
            continue
        reason = _reason(file, name, places, code, whole)
        if reason:
            left.append(f"left out: {shown(str(name))}, {reason}")
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target / name)
        if name.suffix == ".py":
            left.append(
                f"copied: {shown(str(name))}, code of the tokenizer or processor; transformers runs it only with "
                "trust_remote_code=True, ao_lab never does"
            )
    return left


def _reason(file: Path, name: Path, places: tuple[Path, ...], code: set[str], whole: bool) -> str:
    """Why a file is left out; "" where it is not."""
    if leads_out(file, places):
        return "a link out of the model's folder; copy the file there if it belongs to the model"
    if not file.is_file():
        return "no regular file"
    if name.suffix == ".py" and name.name not in code:
        return "code that no tokenizer or processor refers to"
    heavy = name.name.endswith(HEAVY) and file.stat().st_size > LARGEST
    return "weights in another format" if heavy and not whole else ""


def _names(source: Path, left: list[str], target: Path, parts: set[str]) -> Iterator[Path]:
    """Files by their paths in the folder, in order.

    Hidden sub-folders (.git, .cache) are none of the model's, and neither is the result, nor what is a model of its own
    (another result). Those that the model loads (`parts`) are.
    """
    for folder, folders, files in os.walk(source):
        place = Path(folder)
        links = [name for name in folders if (place / name).is_symlink()]
        left += [
            f"left out: {shown(str((place / name).relative_to(source)))}, a link to a folder"
            for name in links
        ]
        names = [name for name in folders if name not in links and not name.startswith(".")]
        names = [name for name in names if resolved(place / name) != resolved(target)]
        models = [
            name
            for name in names
            if (place / name / MODEL_CONFIG).is_file()
            and any((place / name).glob("*.safetensors"))
            and str((place / name).relative_to(source)) not in parts
        ]
        left += [
            f"left out: {shown(str((place / name).relative_to(source)))}, a separate model" for name in models
        ]
        folders[:] = sorted(set(names) - set(models))
        yield from ((place / name).relative_to(source) for name in sorted(files))


def _read(file: Path) -> Any:
    try:
        if regular_size(file) > LARGEST_FILE:
            return None
        return parsed(file.read_bytes(), str(file), nonfinite=True)
    except (OSError, ValueError):
        return None


def _parts(source: Path) -> set[str]:
    """Sub-folders that sentence-transformers loads."""
    modules = _read(source / MODULES)
    found = modules if isinstance(modules, list) else []
    return {str(one["path"]) for one in found if isinstance(one, dict) and one.get("path")}


def _named_code(source: Path) -> set[str]:
    """Files of code that the auto_map of a tokenizer or a processor names."""
    names: set[str] = set()
    for file in source.glob("*.json"):
        fields = _read(file) if file.name.endswith("config.json") and file.name != MODEL_CONFIG else None
        entries = fields.get("auto_map") if isinstance(fields, dict) else None
        values = entries.values() if isinstance(entries, dict) else ()
        for value in values:
            targets = value if isinstance(value, list) else [value]
            names |= {
                f"{one.partition('.')[0]}.py" for one in targets if isinstance(one, str) and "--" not in one
            }
    return names


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
    calibration: Calibration | None = None,
    base_model: str | None = None,
) -> None:
    """Quantize weight by weight while they are read, save, and say what became of each layer."""
    check_folders(source, target)
    name, options = with_options(name, options)
    config = config_of(name, activation, options)
    if sparsity is None and config.sparsity is not None:
        raise WrongInput(
            f"--option sparsity={config.sparsity} expects pruned weights; use --sparsity {config.sparsity}, which prunes them"
        )
    calibrates = calibration is not None and (calibration.methods or calibration.text is not None)
    if calibrates and sparsity is not None:
        raise WrongInput(
            f"--sparsity {sparsity} with --method: methods would overwrite the zeros of pruned weights; drop one of the two"
        )
    check_groups(source, config, name)
    load: Callable[..., Any] = loaded if sparsity is None else sparse_model
    if calibration is not None and calibrates:
        load = calibration.loader()
    plan = (
        select_layout(config, name, layout)
        if sparsity is None
        else select_sparse_layout(config, sparsity, layout)
    )
    if calibration is not None:
        plan = plan.for_methods(calibration.methods)
    from ao_lab.checkpoint.card_origin import history_of
    from ao_lab.checkpoint.model_card import write_card
    from ao_lab.quantization.api import report_of

    skipped_layers = SkippedLayers(skip, HEAD if sparsity is not None else ())
    try:
        if sparsity is None:
            plan = plan.for_model(source, skipped_layers)
        if plan.undivided and calibrates:
            say_now(plan.undivided)
        with progress_bar(as_json) as progress:
            model = load(source, plan.config, skipped_layers, progress)
        skipped_layers.check()
        report, before = report_of(model), stored_bytes(source, model)
        beside, tensors = unloaded(source, model)
        with lines("quantize: writing the folder", always=as_json):
            plan, saved = plan.saved(model, target, beside)
    except (ValueError, FileNotFoundError) as error:
        raise WrongInput(str(error)) from error
    files = copy_the_rest(source, target)
    command = " ".join(
        ["ao-lab quantize --config", name, *([f"--activation {activation}"] if activation else [])]
        + [f"--option {option}" for option in options]
        + [f"--skip {layer}" for layer in skip or []]
        + ([f"--sparsity {sparsity}"] if sparsity else [])
        + (calibration.command() if calibration is not None and calibrates else [])
        + ([f"--layout {layout}"] if layout != "auto" else [])
    )
    told = {**plan.told(saved.limits, target), "tensors": tensors, "beside": files}
    told["undivided"] = undivided_note(report.layers, plan.config)
    told["few_tokens"] = report.few_judges()
    told["bits_per_parameter"] = bits_per_parameter(saved, model)
    notes = (*plan.reasons, *plan.changes, *saved.limits)
    write_card(
        target,
        base_model=base_model or hub_name(source) or str(source),
        command=command,
        notes=notes,
        beside=tensors,
        base_folder=source,
        history=history_of(model),
    )
    show(report, saved, before, skipped_layers, told, as_json)


def check_folders(source: Path, target: Path) -> None:
    """WrongInput where there is no model, or where the result would fall among other files."""
    check_model(source, "transformers' save_pretrained")
    if outside := links_out(source, SETTINGS):
        raise WrongInput(f"{source / outside[0]} is a link out of the model's folder; copy the file there")
    check_weights(source)
    check_new_folder(target)
    check_writable(target, "OUT_DIR")
    # Weights of 32 bits become at least one bit each.
    check_room(target, sum(file.stat().st_size for file in source.glob("*.safetensors")) // 32, "OUT_DIR")


def check_groups(source: Path, config: Config, name: str) -> None:
    """WrongInput, before anything long begins, where the groups of a configuration divide no matrix of the folder's files."""
    from ao_lab.checkpoint.io.shards import has_weights, look_at
    from ao_lab.config.recipe import undividing

    scale = config.recipe().weight.scale
    block = scale.block
    if not isinstance(block, int) or block < 1 or scale.partial or not has_weights(source):
        return
    with wrong_input():
        specs = look_at(source).specs
    matrices = [spec.shape for spec in specs.values() if len(spec.shape) > 1]
    lengths = {length for shape in matrices for length in shape[-2:]}
    if matrices and all(length % block for length in lengths):
        raise WrongInput(f"--config {name}: {undividing(block, [shape[-1] for shape in matrices])}")


def loaded(source: Path, config: Config, accepts: SkippedLayers, progress: Progress | None) -> Any:
    """The quantized model, the rest in the dtype in which it was saved; its dense weights are never all in memory."""
    from ao_lab.checkpoint.streaming import quantize_pretrained
    from ao_lab.quantization.groups import told_elsewhere

    transformers = needed("transformers")

    hide_progress: Any = transformers.utils.logging.disable_progress_bar
    hide_progress()
    with told_elsewhere():
        return quantize_pretrained(source, config, accepts, progress=progress)


@contextmanager
def progress_bar(as_json: bool) -> Iterator[Progress]:
    """Shows weights as they are quantized: a bar on a terminal's stderr, lines elsewhere and beside JSON."""
    with track_progress("quantize", plain=as_json, transient=True) as work:
        work.at(0, "reading the model")
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
    from ao_lab.checkpoint.experts import unused_names
    from ao_lab.checkpoint.io.shards import has_weights, look_at
    from ao_lab.checkpoint.streaming import is_quantized

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


#: Columns of the table of layers.
GROUPED = ("layer", "layers", "scheme", "kernel", "sparsity", "storage", "bytes", "reason")
#: What they are called where it says more than their names.
HEADINGS = {"bytes": "bytes in memory"}


def grouped(layers: Sequence[Layer]) -> list[dict[str, Any]]:
    """Rows of layers: those that are alike but for the number of their block as one, their count, and bytes of all."""
    return [
        {**row_of(one), "layers": len(alike), "bytes": sum(layer.bytes for layer in alike)}
        for one, alike in groups(layers)
    ]


def row_of(layer: Layer) -> dict[str, Any]:
    """One layer as JSON has it."""
    return {
        "layer": layer.name,
        "scheme": layer.scheme,
        "kernel": layer.kernel,
        "sparsity": layer.sparsity,
        "storage": layer.storage,
        "bytes": layer.bytes,
        "reason": layer.reason,
    }


def bits_per_parameter(saved: Saved, model: Any) -> float:
    """Bits of the files over all parameters of the model, embeddings too, and without those that calibration added (low-rank
    residuals), which are in the files alone."""
    from ao_lab.transforms.low_rank import FACTORS

    named = model.named_parameters()
    count: int = sum(one.numel() for name, one in named if name.rpartition(".")[2] not in FACTORS)
    return 8 * saved.bytes / max(count, 1)


def summary(report: Report, saved: Saved, before: int, whole: float) -> str:
    """That it is done: the folder, its size in megabytes, and the bits that a quantized weight takes there with its scales and
    low-rank residuals; whole: those of a parameter of the model."""
    beside = 8 * report.residual_bytes / max(sum(prod(layer.shape) for layer in report.changed), 1)
    sizes = f"{saved.bytes / 1e6:,.4g} MB of weights (before: {before / 1e6:,.4g} MB)"
    bits = f"{saved.bits + beside:.4g} bits per quantized weight"
    return f"done: {saved.files[0].parent}, {sizes}, {bits}, {whole:.3g} bits/param of the model"


def show(
    report: Report,
    saved: Saved,
    before: int,
    skipped_layers: SkippedLayers,
    told: dict[str, Any],
    as_json: bool,
) -> None:
    """The layers, the sizes, and what is to be known of the layout, as tables or as JSON."""
    layers = [replace(layer, reason=skipped_layers.told(layer)) for layer in report.layers]
    rows = [row_of(layer) for layer in layers]
    if as_json:
        folder = saved.files[0].parent
        written = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
        sizes = {"bytes_before": before, "bytes": saved.bytes, "bits": saved.bits}
        print_json({**told, "files": written, **sizes, "layers": rows})
        return
    console().print(summary(report, saved, before, told["bits_per_parameter"]))
    # A plan names each layer that it leaves, and so has no such line.
    for note in filter(None, (told.get("undivided"), told.get("few_tokens"))):
        console().print(note, markup=False)
    say(told)
    # Of a model that was not pruned two columns would say nothing.
    empty = {"sparsity": "", "storage": "dense"}
    columns = [
        key
        for key in (GROUPED if rows else ())
        if key not in empty or any(row[key] != empty[key] for row in rows)
    ]
    # Why a linear layer is quantized goes without saying.
    plain = [replace(one, reason="") if one.changed and one.reason == one.kind else one for one in layers]
    cells = [[str(row[key]) or "-" for key in columns] for row in grouped(plain)]
    print_table(
        "Layers", [HEADINGS.get(key, key) for key in columns], cells, numbers=["layers", HEADINGS["bytes"]]
    )
