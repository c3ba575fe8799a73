"""`ao-lab plot`: figures of formats, schemes, tensors and models as files, .svg, .png or .pdf."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ao_lab.cli.completion import scheme_names
from ao_lab.cli.options import AsJson, model_folder
from ao_lab.cli.terminal import WrongInput, check_writable, print_json, track_progress, work
from ao_lab.install.extras import wrong_input

if TYPE_CHECKING:
    from matplotlib.figure import Figure

app = typer.Typer(
    help="Figures of formats, schemes, tensors and models, for light and dark pages.", no_args_is_help=True
)


class ThemeName(StrEnum):
    """Pages that a figure is for."""

    LIGHT = "light"
    DARK = "dark"


NAMED = ", or the name of one that ao-lab pretrained made"
Out = Annotated[Path, typer.Option("--out", "-o", help="The file to write: .svg, .png or .pdf.")]
Look = Annotated[ThemeName, typer.Option(help="The page that the figure is for.")]
Schemes = Annotated[
    list[str] | None,
    typer.Option(
        "--scheme",
        help="A scheme such as mxfp4 (ao-lab schemes), repeatable. Default: eight common ones.",
        autocompletion=scheme_names,
    ),
]


@app.command("values")
def plot_values(
    formats: Annotated[
        list[str], typer.Argument(help="Formats of up to 8 bits, such as float4_e2m1fn int4.")
    ],
    out: Out,
    log: Annotated[bool, typer.Option("--log", help="Positive values on a logarithmic axis.")] = False,
    theme: Look = ThemeName.LIGHT,
    as_json: AsJson = False,
) -> None:
    """The values of formats as marks on a line each."""
    from ao_lab import plot

    _write(
        out,
        lambda: plot.values(*formats, log=log, theme=theme.value),
        f"Values of {', '.join(formats)}.",
        as_json,
    )


@app.command("error")
def plot_error(
    names: Annotated[list[str], typer.Argument(help="Formats and schemes, such as float8_e4m3fn mxfp4.")],
    out: Out,
    octaves: Annotated[int, typer.Option(help="How far down from the largest, in powers of two.")] = 16,
    theme: Look = ThemeName.LIGHT,
    as_json: AsJson = False,
) -> None:
    """Relative error of rounding over the size of a number, of formats and schemes."""
    from ao_lab import plot

    what = f"Relative error of rounding by size: {', '.join(names)}."
    _write(out, lambda: plot.error(*names, octaves=octaves, theme=theme.value), what, as_json)


@app.command("tensor")
def plot_tensor(
    file: Annotated[
        Path,
        typer.Argument(
            help=f"A .npy or .safetensors file, or a folder of a dense model{NAMED}.",
            parser=model_folder,
            metavar="FILE",
        ),
    ],
    scheme: Annotated[
        str, typer.Option(help="How it is quantized: a scheme such as nvfp4 (ao-lab schemes).")
    ],
    out: Out,
    name: Annotated[str | None, typer.Option(help="The tensor's name, of files that hold several.")] = None,
    theme: Look = ThemeName.LIGHT,
    as_json: AsJson = False,
) -> None:
    """Histograms of the quantized values and of the scales of a tensor."""
    from ao_lab import plot

    with work("plot", f"{out} was not written", as_json):
        what = f"Quantized values and scales of {name or file.name} in {scheme}."
        _write(out, lambda: plot.tensor(tensor_of(file, name), scheme, theme=theme.value), what, as_json)


@app.command("schemes")
def plot_schemes(
    file: Annotated[
        Path,
        typer.Argument(
            help=f"A folder of a dense model{NAMED}, or a .npy or .safetensors file.",
            parser=model_folder,
            metavar="MODEL_DIR",
        ),
    ],
    out: Out,
    scheme: Schemes = None,
    theme: Look = ThemeName.LIGHT,
    as_json: AsJson = False,
) -> None:
    """Errors of schemes side by side on the weights of a model or a file."""
    from ao_lab import plot
    from ao_lab.plot.tensors import USUAL

    with work("plot", f"{out} was not written", as_json):
        check(out)
        with track_progress("plot", plain=as_json, transient=True) as bar:
            found = plot.scheme_errors(
                weights_of(file),
                scheme or USUAL,
                progress=lambda what, done, total: bar.at(done, what, total),
            )
        told = {one.scheme: {"error": one.total, "bits": one.bits, "tensors": one.tensors} for one in found}
        what = f"Relative error of the weights of {file.name}: {', '.join(one.scheme for one in found)}."
        _write(out, lambda: plot.schemes(None, found, theme=theme.value), what, as_json, {"schemes": told})


@app.command("comparison")
def plot_comparison(
    file: Annotated[
        Path, typer.Argument(help="comparison.json, or the folder that ao-lab compare --out wrote.")
    ],
    out: Out,
    theme: Look = ThemeName.LIGHT,
    as_json: AsJson = False,
) -> None:
    """Loss against size of configurations that ao-lab compare has measured."""
    path = file / "comparison.json" if file.is_dir() else file
    if not path.is_file():
        raise WrongInput(f"{path} is no file; ao-lab compare MODEL_DIR --out DIR writes one")

    def draw() -> Figure:
        import json

        from ao_lab.measure.comparison import Comparison

        try:
            told = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise WrongInput(
                f"{path} cannot be read: {error}; ao-lab compare --out DIR writes one"
            ) from error
        return Comparison.from_dict(told).plot(theme=theme.value)

    _write(out, draw, f"Loss against size of the configurations of {path}.", as_json)


def check(out: Path) -> None:
    """WrongInput where the figure could not be drawn or written, before anything is computed."""
    from ao_lab.install.extras import check_extra
    from ao_lab.plot.style import FILES

    check_extra("plot")
    if out.suffix not in FILES:
        raise WrongInput(f"--out {out}: the name of a figure's file ends in {', '.join(FILES)}")
    if not out.parent.is_dir():
        raise WrongInput(f"--out {out}: there is no folder {out.parent}; make it, or choose another")
    check_writable(out.parent, "the folder of --out")


def _write(
    out: Path, draw: Callable[[], Figure], description: str, as_json: bool, told: dict[str, Any] | None = None
) -> None:
    """Draw, write the file and say so."""
    from ao_lab.plot.style import save

    check(out)
    import matplotlib as mpl

    # Figures are files: no window, whatever the machine.
    mpl.use("Agg")
    figure = draw()
    save(figure, out, description)
    if as_json:
        print_json({"figure": str(out), "shows": description, **(told or {})})
    else:
        typer.echo(f"{out}: {description}")


def weights_of(path: Path) -> Any:
    """What schemes are compared on: the folder, the arrays of a file by name; WrongInput where it is neither."""
    if path.suffix == ".npy":
        return {path.stem: tensor_of(path, None)}
    if path.suffix == ".safetensors" and path.is_file():
        found = {name: x for name, x in _safetensors(path).items() if x.dim() > 1 and x.is_floating_point()}
        if not found:
            raise WrongInput(f"{path} has no tensor of floats with two dimensions or more")
        return found
    if path.is_dir():
        return path
    raise WrongInput(f"{path} is no folder of a model, and no .npy or .safetensors file")


def tensor_of(path: Path, name: str | None) -> Any:
    """A tensor of a file or a folder; WrongInput, with the nearest names, where it is not there."""
    import numpy as np

    from ao_lab.cli.listings import known

    if path.suffix == ".npy":
        if not path.is_file():
            raise WrongInput(f"{path} is no file; numpy.save writes one")
        try:
            return of_floats(np.load(path, allow_pickle=False), path)
        except (ValueError, EOFError) as error:
            raise WrongInput(f"{path} cannot be read: {error}; numpy.save writes one") from error
    if path.is_dir():
        from ao_lab.checkpoint.io.shards import look_at

        with wrong_input():
            folder = look_at(path)
        wanted = known(name or "", {one: one for one in folder.specs}, "tensor")
        with wrong_input():
            return of_floats(folder.read([wanted])[wanted], path)
    tensors = _safetensors(path)
    if name is None and len(tensors) == 1:
        return of_floats(next(iter(tensors.values())), path)
    return of_floats(known(name or "", tensors, "tensor"), path)


def of_floats(x: Any, path: Path) -> Any:
    """An array of NumPy or torch; WrongInput where its elements are no floats, which no scheme quantizes."""
    if x.is_floating_point() if hasattr(x, "is_floating_point") else x.dtype.kind in "fV":
        return x
    raise WrongInput(f"{path}: the tensor is of {x.dtype}; give one of floats")


def _safetensors(path: Path) -> dict[str, Any]:
    """The tensors of a file; WrongInput where it is none."""
    if path.suffix != ".safetensors" or not path.is_file():
        raise WrongInput(f"{path} is no .npy file, no .safetensors file and no folder of a model")
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise WrongInput(f"{path} cannot be read: {error}; write it again") from error
