"""Figures of tensors: quantized values and scales of one, and the error of schemes side by side on one or on a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ao_lab.install.extras import WrongInput, needed, wrong_input
from ao_lab.plot.style import Theme, canvas
from reference.formats.formats import FORMATS
from reference.formats.storage import unpack
from reference.quantize.quantize import dequantize, quantize
from reference.quantize.stored import Quantized, with_plain_scales
from reference.schemes.schemes import Scheme, scheme_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]

#: Bars of a histogram of scales, and of quantized values where a format has more of them.
BARS = 48
MOST_VALUES = 256


def tensor(
    x: Any,
    scheme: str | Scheme,
    *,
    axis: int = -1,
    ax: Sequence[Axes] | None = None,
    theme: str | None = None,
) -> Figure:
    """How a scheme uses its format on a tensor: shares of the quantized values, and a histogram of the scales.

    x: a NumPy, JAX or torch array of floats, quantized along `axis` as `quantize` does, or what `quantize` returned, or a
    `QuantizedTensor`; `scheme` is then that of the tensor. Left, bars over the values of the element format (before the scale;
    of integers with a zero point, the stored integers): values that no element has stand out as gaps, a pile at the ends as
    saturation. Right, scales as they multiply the elements, on a logarithmic axis. ax: two axes.

    ValueError and TypeError as `quantize` raises, and for a tensor without an element, or of another scheme than is named.
    """
    with wrong_input():
        q = stored(x, scheme_of(scheme), axis)
    fmt = FORMATS[q.scheme.element]
    codes = np.asarray(unpack(q.codes, fmt, q.shape) if q.packed else q.codes).ravel()
    if not codes.size:
        raise WrongInput(f"the tensor of shape {q.shape} has no element to draw")
    with canvas(ax, theme, (10.0, 3.6), 2) as (figure, (left, right), colors):
        _values(left, fmt.values[codes & ((1 << fmt.bits) - 1)].astype(np.float64), colors)
        left.set_title(f"{q.scheme.name}: {codes.size:,} elements", loc="left")
        left.set_xlabel(f"quantized value ({fmt.name}, before the scale)")
        _scales(right, scales_of(q), colors)
    return figure


def stored(x: Any, scheme: Scheme, axis: int) -> Quantized:
    """The tensor as a scheme stores it, in NumPy, its scales not tiled; ValueError where it is stored in another one."""
    x = getattr(x, "quantized", x)
    if not isinstance(x, Quantized):
        return quantize(as_numpy(x), scheme, axis=axis)
    if x.scheme != scheme:
        raise ValueError(
            f"the tensor is stored in {x.scheme.name}, and {scheme.name} was asked for; name its own scheme, or give the "
            f"dense tensor"
        )
    parts: dict[str, Any] = {
        name: None if (one := getattr(x, name)) is None else as_numpy(one)
        for name in ("codes", "scale", "outer", "zero")
    }
    return with_plain_scales(replace(x, **parts))


def as_numpy(x: Any) -> Any:
    """An array as NumPy's, from any device; 16-bit floats of torch as float32, which holds them."""
    if hasattr(x, "detach"):
        x = x.detach().to("cpu")
        return (x.float() if x.is_floating_point() and x.itemsize == 2 else x).numpy()
    return np.asarray(x)


def scales_of(q: Quantized) -> Floats:
    """What the elements of each block are multiplied by, float64: its scale, and the outer one where there is one.

    Found from two tensors of one code each, in which zero points cancel: values of a block are its scale apart per unit.
    """
    fmt = FORMATS[q.scheme.element]
    finite = np.where(np.isfinite(fmt.values), fmt.values, np.nan)
    ends = int(np.nanargmin(finite)), int(np.nanargmax(finite))
    decoded = [_first_of_blocks(_filled(q, code), q) for code in ends]
    return (decoded[1] - decoded[0]) / float(fmt.values[ends[1]] - fmt.values[ends[0]])


def _filled(q: Quantized, code: int) -> Floats:
    """The dense tensor of these scales where every element has one code."""
    dtype = np.uint16 if FORMATS[q.scheme.element].bits > 8 else np.uint8
    whole = replace(q, codes=np.full(q.shape, code, dtype), packed=False)
    return np.asarray(dequantize(whole), np.float64)


def _first_of_blocks(values: Floats, q: Quantized) -> Floats:
    """One value of each block of the scales."""
    scale = q.scheme.scale
    if isinstance(scale.block, str):
        return values.ravel()[:: scale.flat_size or max(values.size, 1)]
    moved = np.moveaxis(values, q.axis, -1)
    if isinstance(scale.block, tuple):
        return moved[..., :: scale.block[0], :: scale.block[1]].ravel()
    return moved[..., :: moved.shape[-1] if scale.block == -1 else scale.block].ravel()


def _values(axis: Axes, found: Floats, theme: Theme) -> None:
    """Shares of quantized values: a bar each, or a histogram where a format has very many."""
    axis.set_ylabel("share of the elements, %")
    share = np.full(found.shape, 100 / found.size)
    places, counts = np.unique(found[np.isfinite(found)] + 0.0, return_counts=True)
    if len(places) > MOST_VALUES:
        axis.hist(
            found[np.isfinite(found)], bins=BARS, weights=share[np.isfinite(found)], color=theme.series[0]
        )
        return
    axis.vlines(
        places, 0, 100 * counts / found.size, color=theme.series[0], linewidth=4 if len(places) <= 32 else 1.2
    )
    axis.set_ylim(bottom=0)


def _scales(axis: Axes, scales: Floats, theme: Theme) -> None:
    """A histogram of scales on a logarithmic axis; one scale is a line, scales of 0 or NaN are counted in the title."""
    good = scales[np.isfinite(scales) & (scales > 0)]
    odd = len(scales) - len(good)
    axis.set_xscale("log", base=2)
    axis.set(xlabel="scale of a block (multiplies the elements)", ylabel="blocks")
    axis.set_title(f"{len(scales):,} scales" + (f", {odd:,} of them 0 or NaN" if odd else ""), loc="left")
    if not len(good):
        return
    low, high = np.log2(good.min()), np.log2(good.max())
    # Powers of two have a bar each, others BARS over their range.
    powers = bool((np.exp2(np.round(np.log2(good))) == good).all())
    edges = (
        np.arange(np.floor(low) - 0.5, high + 1) if powers else np.linspace(low - 0.01, high + 0.01, BARS + 1)
    )
    axis.hist(good, bins=(2.0**edges).tolist(), color=theme.series[1])
    axis.set_xlim(2.0 ** (edges[0] - 0.5), 2.0 ** (edges[-1] + 0.5))


#: The largest error over the smallest up to which an axis of errors has evenly spaced ticks.
SHORT = 5.0
#: Schemes that are drawn where none are named: of 8 bits, then of 4.
USUAL = ("int8_rowwise", "fp8_rowwise", "mxfp8_e4m3", "int4_g32", "nvfp4", "nf4", "int4_g128", "mxfp4")
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class SchemeError:
    """What a scheme loses on some tensors (no exception): relative RMS errors, of all and of each by name, and stored bits.

    total: the relative RMS error, sqrt(sum (x - q(x))^2 / sum x^2) over all tensors that the scheme takes; tensors: of each
    of them; refused: names of those whose shapes its blocks do not divide; bits: of storage an element, scales and zero
    points included.
    """

    scheme: str
    total: float
    tensors: dict[str, float]
    refused: tuple[str, ...]
    bits: float

    def __str__(self) -> str:
        return f"{self.scheme:32} relative RMS error {self.total:8.3g}, {self.bits:.2f} bits an element"


class SchemeErrors(list[SchemeError]):
    """What `scheme_errors` returns; printed it is a line a scheme."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def scheme_errors(
    x: Any, schemes: Iterable[str | Scheme] = USUAL, *, progress: Progress = lambda what, done, total: None
) -> list[SchemeError]:
    """What each scheme loses on tensors of one's own, without data: relative RMS errors of the weights.

    x: an array of floats (NumPy, JAX, torch), a mapping of names to arrays, a torch model, or a folder of transformers with a
    dense model, whose linear layers are taken as `quantize_` would (heads that are tied to an embedding are left out). Blocks
    run along the last axis. progress: called with a scheme's name, how many schemes are done, and of how many.

    ValueError for an unknown scheme, no scheme, no tensor, a tensor with NaN or infinity (named), or where a scheme takes none
    of the tensors; TypeError as `quantize` raises it.
    """
    with wrong_input():
        records = [scheme_of(one) for one in schemes]
    if not records:
        raise WrongInput("scheme_errors takes one scheme or more, such as 'mxfp4'")
    found = dict(tensors_of(x))
    if not found:
        raise WrongInput(
            "there is no weight of a linear layer to draw; give arrays, or a model with nn.Linear"
        )
    check_finite(found)
    result = SchemeErrors()
    for number, record in enumerate(records):
        progress(record.name, number, len(records))
        result.append(_of_scheme(found, record))
    progress("", len(records), len(records))
    return result


def check_finite(tensors: Mapping[str, Any]) -> None:
    """ValueError that names the tensors with NaN or infinity: an error relative to them is no number."""
    odd: dict[str, int] = {}
    for name, x in tensors.items():
        dense = as_numpy(x)
        # What is no number is refused by `quantize`.
        count = 0 if dense.dtype.kind in "OSUc" else int(dense.size - np.isfinite(dense).sum())
        if count:
            odd[name] = count
    if odd:
        told = ", ".join(f"{name} ({count} of them)" for name, count in list(odd.items())[:MOST_NAMED])
        more = f" and {len(odd) - MOST_NAMED} more" if len(odd) > MOST_NAMED else ""
        raise WrongInput(
            f"errors are relative to finite values, and there is NaN or infinity in {told}{more}; leave these tensors out or "
            "replace the values"
        )


#: Tensors that an error names.
MOST_NAMED = 5


def tensors_of(x: Any) -> Iterable[tuple[str, Any]]:
    """Names and arrays, each as (..., K) with blocks along K."""
    if isinstance(x, Mapping):
        return x.items()
    if isinstance(x, (str, Path)):
        from ao_lab.checkpoint.streaming import dense_of_files, is_quantized

        folder = Path(x)
        if not (folder / "config.json").is_file():
            raise WrongInput(
                f"{folder} is no folder of a model: it has no config.json; give one that save_pretrained wrote"
            )
        with wrong_input():
            quantized = is_quantized(folder)
        if quantized:
            raise WrongInput(f"{folder} is quantized already; give the folder of the unquantized base model")
        with wrong_input():
            model = dense_of_files(folder)
        return linear_weights(model).items()
    return linear_weights(x).items() if hasattr(x, "named_modules") else (("tensor", x),)


def linear_weights(model: Any) -> dict[str, Any]:
    """Weights of a model's linear layers by name, (out, in); those that an embedding shares are left out."""
    from ao_lab.transforms.layers import TABLES, is_linear, is_transposed, quantizable_parameters

    slots = list(quantizable_parameters(model))
    tables = {id(one.parameter) for one in slots if isinstance(one.module, TABLES)}
    return {
        one.full: one.parameter.detach().T if is_transposed(one.module) else one.parameter.detach()
        for one in slots
        if is_linear(one.module) and id(one.parameter) not in tables
    }


def _of_scheme(tensors: Mapping[str, Any], scheme: Scheme) -> SchemeError:
    """The errors of one scheme; ValueError where it takes no tensor."""
    from ao_lab.checkpoint.size import weight_size

    squares: dict[str, tuple[float, float]] = {}
    refused: dict[str, str] = {}
    stored_bits, elements = 0.0, 0
    for name, x in tensors.items():
        try:
            squares[name] = _squares(x, scheme)
            stored_bits += 8 * weight_size(tuple(x.shape), scheme).bytes
            elements += int(np.prod(x.shape))
        except ValueError as error:
            refused[name] = str(error)
    if not squares:
        name, reason = next(iter(refused.items()))
        raise WrongInput(f"{scheme.name} takes none of the tensors; {name}: {reason}")
    lost, size = (sum(part) for part in zip(*squares.values(), strict=True))
    each = {name: float(np.sqrt(e / s)) if s else 0.0 for name, (e, s) in squares.items()}
    return SchemeError(
        scheme.name,
        float(np.sqrt(lost / size)) if size else 0.0,
        each,
        tuple(refused),
        stored_bits / max(elements, 1),
    )


def _squares(x: Any, scheme: Scheme) -> tuple[float, float]:
    """Sums of squares of a tensor's errors and of itself, float64."""
    if hasattr(x, "detach"):
        import fast

        back = fast.dequantize(fast.quantize(x.contiguous(), scheme), x.float().dtype)
        known = x.float()
        return float((back - known).double().square().sum()), float(known.double().square().sum())
    x = np.asarray(x)
    dense = x.astype(np.float64)
    errors = np.asarray(dequantize(quantize(x, scheme)), np.float64) - dense
    return float(np.square(errors).sum()), float(np.square(dense).sum())


def schemes(
    x: Any,
    schemes: Iterable[str | Scheme] | Sequence[SchemeError] = USUAL,
    *,
    ax: Axes | None = None,
    theme: str | None = None,
    title: str | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Figure:
    """Errors of schemes side by side on a tensor, a model or a checkpoint of one's own: the best on top.

    Large markers are the error over all tensors, small ones those of each, so that a single bad layer is seen. Beside the names
    stand the stored bits an element. title: None: names the data, a folder or file by its name and an array by its shape.
    Arguments and errors as those of `scheme_errors`, whose result may be given in place of names.
    """
    given = list(schemes)
    done = [one for one in given if isinstance(one, SchemeError)]
    names = [one for one in given if not isinstance(one, SchemeError)]
    found = done if done and not names else [*done, *scheme_errors(x, names, progress=progress)]
    found = sorted(found, key=lambda one: one.total)
    with canvas(ax, theme, (8.0, 1.2 + 0.34 * len(found))) as (figure, (axis,), colors):
        for place, one in enumerate(found):
            _error(axis, one, -float(place), colors)
        count = max(len(one.tensors) + len(one.refused) for one in found)
        axis.set_yticks([-place for place in range(len(found))], [_label(one) for one in found])
        axis.set_ylim(-len(found) + 0.4, 0.9)
        # Where all errors are 0 there is nothing that a logarithmic axis could show.
        axis.set_xscale("log" if any(one.total > 0 for one in found) else "linear")
        ticker = needed("matplotlib.ticker")
        if axis.get_xscale() == "log":
            low, high = axis.get_xlim()
            # Over so short a range ticks at 1, 2 and 5 would be one or two.
            few = ticker.MaxNLocator(6) if high < SHORT * low else ticker.LogLocator(subs=(1, 2, 5))
            axis.xaxis.set_major_locator(few)
        axis.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, place: f"{value:g}"))
        axis.xaxis.set_minor_formatter(ticker.NullFormatter())
        axis.set_xlabel(
            "relative error of the weights, RMS (small marks: each tensor)"
            if count > 1
            else "relative error, RMS"
        )
        axis.set_title(title or f"Error of schemes on {_data(x, count)}", loc="left")
    return figure


def _data(x: Any, count: int) -> str:
    """What the errors are of: a file or folder by its name, an array by its shape, else so many tensors."""
    if isinstance(x, (str, Path)):
        return Path(x).resolve().name
    shape = getattr(x, "shape", None)
    return f"{count} tensors" if shape is None else f"a tensor of shape {tuple(shape)}"


def _error(axis: Axes, one: SchemeError, y: float, theme: Theme) -> None:
    """The marks of a scheme: of all tensors together, with its value, and of each."""
    each = list(one.tensors.values())
    if len(each) > 1:
        axis.scatter(each, [y] * len(each), s=14, color=theme.muted, alpha=0.6, linewidths=0)
    axis.scatter([one.total], [y], s=46, color=theme.series[0], zorder=3)
    style: dict[str, Any] = {
        "textcoords": "offset points",
        "ha": "center",
        "fontsize": 7.5,
        "color": theme.ink,
    }
    axis.annotate(f"{one.total:.3g}", (one.total, y), (0, 7), **style)


def _label(one: SchemeError) -> str:
    """Name, bits, and how many tensors where it does not take all."""
    part = f", {len(one.tensors)} of {len(one.tensors) + len(one.refused)}" if one.refused else ""
    return f"{one.scheme}\n{one.bits:.3g} bits{part}"


__all__ = ["SchemeError", "scheme_errors", "schemes", "tensor"]
