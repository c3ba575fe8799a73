"""`ao-lab tune`: measures what the products of a folder's model take on this device, on random input, and saves the choices.

What is tuned is what runs later: a dense folder converted for training (`--recipe`) or quantized (`--config`), as
`convert_for_training_` and `quantize_` do it, or a folder of quantized weights as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ao_lab.checkpoint.api import load_pretrained
from ao_lab.checkpoint.model_builder import read_config
from ao_lab.cli.layout import HEAD, SkippedLayers
from ao_lab.cli.named_config import config_of as quantization_of
from ao_lab.cli.named_config import with_options
from ao_lab.cli.quantize import loaded
from ao_lab.cli.terminal import (
    WrongInput,
    check_device,
    check_writable,
    console,
    print_json,
    print_table,
    track_progress,
)
from ao_lab.gemm.choices import Choice, Problem, device_name, path_of
from ao_lab.measure.folders import check_folder, longest
from ao_lab.measure.folders import loaded as dense_model
from ao_lab.quantization.report import explain
from ao_lab.training.api import convert_for_training_
from ao_lab.training.products import has_fp8
from ao_lab.transforms.layers import routers, shorten
from ao_lab.tuning.api import Tuned, scheme_name, tune
from ao_lab.tuning.candidates import Limits
from reference.training.recipe import recipe_of

#: Rows (tokens) of a training step where none are given.
TRAINED = (2048,)
#: Rows (tokens) of a generated token and of a prompt where none are given.
SERVED = (1, 512)
#: The most tokens that run through the model: of more rows, a layer's are repeated.
MOST = 2048
#: What is said of a recipe on a device without FP8 units.
EMULATED = (
    "{} has no FP8 units: recipes are emulated there for their accuracy, not for speed, so each layer keeps the recipe (all "
    "matmuls that --error allows); tune on the GPU that trains"
)


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for, see `ao-lab tune --help`."""

    recipe: str | None = None
    config: str | None = None
    activation: str | None = None
    options: list[str] = field(default_factory=list)
    skip: list[str] | None = None
    pad: bool = False
    rows: list[int] = field(default_factory=list)
    error: float | None = None
    time: float | None = None
    launches: str = "eager"
    device: str | None = None


def run_tune(folder: Path, wanted: Wanted, as_json: bool) -> None:
    """Load, convert or quantize, tune, and show what was chosen and where it is saved."""
    device = torch.device(wanted.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    check_before(folder, wanted, device)
    rows = wanted.rows or list(SERVED if wanted.recipe is None else TRAINED)
    try:
        with track_progress("tune", plain=as_json, transient=True) as work:
            model = prepared(folder, wanted, device)
            made = tune(
                model,
                sample_of(model, rows, longest(folder), device),
                rows=rows,
                error_budget=wanted.error,
                time_budget=wanted.time,
                launches=wanted.launches,
                progress=lambda name, done, total: work.at(done, name, total),
            )
    except (ValueError, TypeError, FileNotFoundError) as error:
        raise WrongInput(str(error)) from error
    show(told(folder, wanted, model, made, device), as_json)


def check_before(folder: Path, wanted: Wanted, device: torch.device) -> None:
    """WrongInput for what would only be found after the model is loaded."""
    check_folder(folder)
    check_device(wanted.device)
    if wanted.recipe is not None and wanted.config is not None:
        raise WrongInput("give either --recipe, for training, or --config, for a quantized model")
    if (wanted.recipe or wanted.config) is None and read_config(folder).get("quantization_config") is None:
        raise WrongInput(
            f"{folder} holds no quantized weights; give --recipe NAME to tune its training, such as rowwise, or --config NAME "
            f"to tune it quantized, such as Int8DynamicActivationInt8WeightConfig"
        )
    for given, option in ((wanted.activation, "--activation"), (wanted.options, "--option")):
        if given and wanted.config is None:
            raise WrongInput(f"{option} belongs to --config, which is not given")
    if wanted.pad and wanted.recipe is None:
        raise WrongInput("--pad belongs to --recipe, which is not given")
    try:
        Limits(wanted.error, wanted.time, wanted.launches)
        if wanted.recipe is not None:
            recipe_of(wanted.recipe)
    except ValueError as error:
        words = str(error).replace("error_budget", "--error").replace("time_budget", "--time")
        raise WrongInput(words) from error
    check_writable(path_of(device).parent, "the folder of saved choices (set AO_LAB_CACHE to change it)")


def prepared(folder: Path, wanted: Wanted, device: torch.device) -> nn.Module:
    """The model as it is tuned."""
    skipped = SkippedLayers(wanted.skip, HEAD if wanted.recipe is not None else ())
    if wanted.recipe is not None:
        model = dense_model(folder, str(device))
        routing = routers(model)
        convert_for_training_(
            model,
            wanted.recipe,
            lambda layer, name: skipped(layer, name) and name not in routing,
            pad=wanted.pad,
        )
    elif wanted.config is not None:
        name, options = with_options(wanted.config, wanted.options)
        config = quantization_of(name, wanted.activation, options)
        model = loaded(folder, config, skipped, None).to(device)
    else:
        return load_pretrained(folder).to(device).requires_grad_(False)
    skipped.check()
    return model if wanted.recipe is not None else model.requires_grad_(False)


def sample_of(model: nn.Module, rows: Sequence[int], longest: int, device: torch.device) -> dict[str, Any]:
    """Random arguments for a model: as many tokens as the largest of `rows` that is at most `MOST`, or an image.

    WrongInput for models of other inputs. longest: tokens that one sequence may have.
    """
    config: Any = getattr(model, "config", None)
    name = getattr(model, "main_input_name", None)
    random = torch.Generator().manual_seed(0)
    if name == "pixel_values" and isinstance(size := getattr(config, "image_size", None), int):
        image = torch.randn(1, getattr(config, "num_channels", 3), size, size, generator=random)
        return {name: image.to(device, getattr(model, "dtype", torch.float32))}
    table: Any = getattr(model, "get_input_embeddings", lambda: None)()
    if name != "input_ids" or table is None:
        raise WrongInput(
            f"{type(model).__name__} needs {name or 'an unknown input'}, and ao-lab tune only generates token ids and images; "
            f"call ao_lab.tune(model, sample_input) in Python"
        )
    config.use_cache = False
    tokens = max((count for count in rows if count <= MOST), default=MOST)
    length = min(tokens, longest)
    ids = torch.randint(table.weight.shape[0], (tokens // length, length), generator=random).to(device)
    return {name: ids} | ({"decoder_input_ids": ids} if config.is_encoder_decoder else {})


def told(folder: Path, wanted: Wanted, model: nn.Module, made: Tuned, device: torch.device) -> dict[str, Any]:
    """All that the command says."""
    layers = {layer.name: layer.tuned for layer in explain(model).layers}
    owners: dict[Problem, list[str]] = {}
    for name, choices in layers.items():
        for choice in choices:
            owners.setdefault(choice.problem, []).append(name.removesuffix(".weight"))
    emulated = wanted.recipe is not None and not has_fp8(device)
    return {
        "model": folder.resolve().name,
        "recipe": wanted.recipe,
        "config": wanted.config,
        "device": device_name(device),
        "launches": wanted.launches,
        "saved": made.path,
        "notes": [EMULATED.format("a CPU" if device.type == "cpu" else "this GPU")] if emulated else [],
        "not_tuned": [name for name, choices in layers.items() if not choices],
        "choices": [row_of(choice, owners.get(choice.problem, [])) for choice in made.choices],
    }


def row_of(choice: Choice, layers: list[str]) -> dict[str, Any]:
    """A choice for programs."""
    problem = asdict(choice.problem)
    return {
        "layers": layers,
        **problem,
        "a": scheme_name(problem["a"]),
        "b": scheme_name(problem["b"]),
        "chosen": choice.kernel,
        "seconds": choice.candidate.seconds,
        "error": choice.candidate.error,
        "candidates": [asdict(candidate) for candidate in choice.candidates],
    }


def show(result: dict[str, Any], as_json: bool) -> None:
    """The choices as a table, or all of it as JSON."""
    if as_json:
        print_json(result)
        return
    columns = ["direction", "n x k", "rows up to", "chosen", "us", "error", "beside", "layers"]
    title = f"{result['model']}, {result['recipe'] or result['config'] or 'as it is'}, on {result['device']}"
    print_table(title, columns, map(cells, result["choices"]), ["rows up to", "us", "error"])
    out = console()
    if result["not_tuned"]:
        out.print(f"not tuned: {shorten(result['not_tuned'])}", markup=False)
    for note in result["notes"]:
        out.print(note, markup=False)
    out.print(
        f"saved in {result['saved']}; layers on this device use these kernels from now on", markup=False
    )


def cells(row: dict[str, Any]) -> list[str]:
    """A choice as a line of the table."""
    others = [c for c in row["candidates"] if c["seconds"] is not None and c["kernel"] != row["chosen"]]
    lengths = f"{row['n']} x {row['k']}" + (f", {row['experts']} experts" if row["experts"] else "")
    return [
        row["direction"],
        lengths,
        str(row["rows"]),
        row["chosen"],
        microseconds(row["seconds"]),
        "-" if row["error"] is None else f"{row['error']:.1e}",
        ", ".join(f"{c['kernel']} {microseconds(c['seconds'])}" for c in others) or "-",
        shorten(row["layers"], 1) or "-",
    ]


def microseconds(seconds: float | None) -> str:
    """A time as the table has it."""
    return "-" if seconds is None else f"{seconds * 1e6:.1f}"
