"""`ao-lab probe`: which layers of a folder's model are safe in low precision, which are quick, and why."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ao_lab.cli.calibration import BATCH, Calibration
from ao_lab.cli.options import CORPUS, LENGTH, AsJson, ModelDir, OnDevice, Skip
from ao_lab.cli.terminal import (
    WrongInput,
    check_device,
    check_writable,
    console,
    print_json,
    print_table,
    track_progress,
    work,
)
from ao_lab.measure.asked import LENGTH as TOKENS

if TYPE_CHECKING:
    from ao_lab.probe.report import ProbeReport

#: Files of named tensors, the arguments of a model that reads no text.
TENSORS = (".safetensors", ".npz")
#: What is probed unless something is asked for.
CANDIDATES = ("rowwise",)


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for."""

    data: str
    #: Recipes, schemes, "WEIGHT x INPUT", or "CONFIG key=value ...".
    candidates: list[str] = field(default_factory=list)
    skip: list[str] | None = None
    windows: int = 32
    length: int = 512
    tokens: int = 1024
    budget: float = 0.05
    directions: int = 4
    seed: int = 0
    corpus: Path | None = None
    device: str | None = None
    out: Path | None = None
    plot: Path | None = None
    compare: Path | None = None

    def recipes(self) -> dict[str, Any]:
        """Candidates by what was typed; WrongInput for unknown ones."""
        from ao_lab.cli.listings import config_classes
        from ao_lab.cli.named_config import config_of
        from ao_lab.probe.candidates import candidates_of

        found: dict[str, Any] = {}
        for text in self.candidates or CANDIDATES:
            try:
                name, *options = shlex.split(text)
                given = config_of(name, None, options) if name in config_classes() else text
                found[text] = next(iter(candidates_of(given).values()))
            except ValueError as error:
                raise WrongInput(f"--candidate {text}: {error}") from error
        return found


def command(
    model_dir: ModelDir,
    data: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="Data: a text file, or wikitext2 with --corpus-path; for other models a .safetensors or .npz of their inputs.",
        ),
    ],
    candidate: Annotated[
        list[str] | None,
        typer.Option(
            help="What to try, repeatable: a training recipe (rowwise), a weight scheme (nf4), 'WEIGHT x INPUT', or a "
            "configuration, 'NAME key=value ...'. Default: rowwise."
        ),
    ] = None,
    skip: Skip = None,
    budget: Annotated[
        float, typer.Option(help="Largest acceptable change of the outputs, in their standard deviations.")
    ] = 0.05,
    tokens: Annotated[int, typer.Option(help="Tokens sampled from each layer's inputs.")] = 1024,
    windows: Annotated[
        int, typer.Option(help="Number of sequences; a quarter is held out for evaluation.")
    ] = 32,
    length: Annotated[int | None, typer.Option(help=LENGTH)] = None,
    directions: Annotated[
        int,
        typer.Option(
            min=1, help="Backward passes per batch; more give a better prediction from few examples."
        ),
    ] = 4,
    corpus_path: Annotated[
        Path | None,
        typer.Option(help=CORPUS),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the report as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a figure (.png, .svg, .pdf).")] = None,
    compare: Annotated[
        Path | None, typer.Option(help="An earlier report (--out): show layers whose error has moved since.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed, of sampled tokens and directions.")] = 0,
    device: OnDevice = None,
    as_json: AsJson = False,
) -> None:
    """Which layers are safe in low precision, which would be faster, and why: errors on data, and their effect on outputs."""
    from ao_lab.cli.early import check_source

    check_source(model_dir, [], length, skip or [])
    with work("probe", "no report was written", as_json):
        where = device.value if device else None
        wanted = Wanted(
            data,
            candidate or [],
            skip,
            windows,
            length or TOKENS,
            tokens,
            budget,
            directions,
            seed,
            corpus_path,
            where,
            out,
            plot,
            compare,
        )
        run_probe(model_dir, wanted, as_json)


def run_probe(source: Path, wanted: Wanted, as_json: bool) -> None:
    """Probe, write what was asked for, and show it."""
    from ao_lab.cli.layout import SkippedLayers, check_layers
    from ao_lab.measure.folders import by_transformers, check_folder
    from ao_lab.probe.api import probe_

    recipes = wanted.recipes()
    check_device(wanted.device)
    for path, option in ((wanted.out, "--out"), (wanted.plot, "--plot")):
        if path is not None:
            check_writable(path.parent, f"the folder of {option}")
    before = earlier(wanted.compare, recipes)
    check_folder(source)
    skipped = SkippedLayers(wanted.skip)
    model = by_transformers(source, None)
    check_layers(source, model)
    skipped.check_in(model)
    model = model.to(wanted.device or "cpu")
    batches = batches_of(source, model, wanted)
    try:
        with track_progress("probe", plain=as_json, transient=True) as work:
            report = probe_(
                model, batches, recipes, filter_fn=linear_but(skipped), tokens=wanted.tokens, budget=wanted.budget,
                directions=wanted.directions, seed=wanted.seed, progress=lambda what, done, total: work.at(done, what, total),
            )  # fmt: skip
    except ValueError as error:
        raise WrongInput(str(error)) from error
    # What was measured is kept where there is nothing to compare it with.
    if wanted.out is not None:
        report.to_json(wanted.out)
    if wanted.plot is not None:
        draw(report, wanted.plot)
    moved = moved_since(report, before, wanted.compare)
    show(report, as_json, moved)


def earlier(path: Path | None, candidates: Iterable[str]) -> ProbeReport | None:
    """The report to compare with, read before anything is measured; WrongInput where the file holds none, or none of these
    candidates."""
    from ao_lab.probe.report import ProbeReport

    try:
        found = None if path is None else ProbeReport.from_json(path)
        if found is not None:
            found.check_shared(candidates)
        return found
    except ValueError as error:
        raise WrongInput(f"--compare {path}: {error}") from error


def moved_since(report: ProbeReport, before: ProbeReport | None, path: Path | None) -> list[list[str]] | None:
    """Layers whose error has moved, lines of `MOVED`; None without an earlier report."""
    if before is None:
        return None
    try:
        found = report.moved(before)
    except ValueError as error:
        raise WrongInput(f"--compare {path}: {error}") from error
    lines = []
    for (name, candidate), size in found.items():
        errors = [one.site(name).candidates[candidate].norm_ratio for one in (before, report)]
        lines.append([name, candidate, *(f"{one.value:.4g}" for one in errors if one), f"{size:+.1f}"])
    return lines


def linear_but(skipped: Any) -> Any:
    """Linear layers that --skip does not name; routers stay."""
    from ao_lab.transforms.layers import is_linear

    def linear(module: Any, path: str) -> bool:
        return skipped(module, path) and is_linear(module)

    linear.leaves_routers = True  # type: ignore[attr-defined]
    return linear


def batches_of(source: Path, model: Any, wanted: Wanted) -> list[Any]:
    """Windows of a text, or slices of the tensors of a file; WrongInput where there are none."""
    path = Path(wanted.data)
    if path.suffix in TENSORS:
        return tensor_batches(path, model, wanted)
    from ao_lab.eval import check_text
    from ao_lab.measure.folders import check_language_model

    try:
        check_language_model(model, source)
        check_text(wanted.data, wanted.corpus)
    except (ValueError, WrongInput) as error:
        raise WrongInput(
            f"--data {wanted.data}: {error}; a model of images or features takes a .safetensors or .npz of its arguments"
        ) from error
    data = Calibration(wanted.data, [], wanted.windows, wanted.length, wanted.corpus, wanted.device)
    return list(data.batches(source, model))


def tensor_batches(path: Path, model: Any, wanted: Wanted) -> list[dict[str, Any]]:
    """The tensors of a file, arguments of the model, cut along their first axis; floats in the model's dtype."""
    import inspect

    import numpy as np
    import torch
    from safetensors.torch import load_file

    if not path.is_file():
        raise WrongInput(f"--data {path} is no file")
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        else:
            tensors = load_file(path)
    except Exception as error:  # errors of both libraries, some of no public class
        raise WrongInput(f"--data {path} holds no tensors: {error}") from error
    lengths = {len(x) if x.dim() else 0 for x in tensors.values()}
    if len(lengths) != 1 or not min(lengths):
        raise WrongInput(
            f"--data {path}: tensors have one first axis, the examples; got lengths {sorted(lengths)}"
        )
    known = [
        name
        for name, one in inspect.signature(model.forward).parameters.items()
        if one.kind is not one.VAR_KEYWORD
    ]
    if unknown := sorted(set(tensors) - set(known)):
        raise WrongInput(
            f"--data {path}: {type(model).__name__} has no argument {', '.join(unknown)}; it takes {', '.join(known)}"
        )
    device = wanted.device or "cpu"
    tensors = {name: x.to(model.dtype) if x.is_floating_point() else x for name, x in tensors.items()}
    return [
        {name: x[start : start + BATCH].to(device) for name, x in tensors.items()}
        for start in range(0, lengths.pop(), BATCH)
    ]


def draw(report: ProbeReport, path: Path) -> None:
    """The figure of a report as a file."""
    from ao_lab.install.extras import needed

    size = max(6, len(report.sites) / 5), max(5, len(report.candidates) / 6)
    figure, axes = needed("matplotlib.pyplot").subplots(figsize=size)
    report.plot(axes)
    try:
        figure.savefig(path, bbox_inches="tight")
    except ValueError as error:
        raise WrongInput(f"--plot {path}: {error}") from error


#: Of layers that have moved: columns, and keys of the JSON.
MOVED = ("site", "candidate", "error before", "error now", "standard errors")


def show(report: ProbeReport, as_json: bool, moved: list[list[str]] | None = None) -> None:
    """Tables, or the report's JSON; with an earlier report what has moved since."""
    import json

    from ao_lab.probe.report import COLUMNS

    if as_json:
        told = [dict(zip(MOVED, line, strict=True)) for line in moved or ()]
        print_json(json.loads(report.to_json()) | ({} if moved is None else {"moved": told}))
        return
    for name in report.candidates:
        print_table(report.heading(name), list(COLUMNS), report.cells(name), numbers=list(COLUMNS[2:8]))
    if moved is not None:
        title = f"{len(moved)} errors of layers have moved since the earlier report"
        print_table(title, list(MOVED), moved, numbers=list(MOVED[2:]))
    for note in report.notes:
        console().print(note, markup=False)
