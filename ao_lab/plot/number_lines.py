"""Formats and schemes without data: the values that a format has, and the error of rounding over the size of a number."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ao_lab.install.extras import WrongInput, wrong_input
from ao_lab.plot.style import Theme, canvas, look
from reference.arrays.namespace import lookup
from reference.formats.encode import decode, encode
from reference.formats.formats import FORMATS, Format, format_of
from reference.quantize.quantize import dequantize, quantize
from reference.schemes.schemes import SCHEMES, Scheme

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]

#: Formats of up to so many values have them written at their places.
WRITTEN = 16
#: Values of wider formats would be a solid bar.
MOST_BITS = 8


def values(
    *formats: str | Format,
    scaled: bool | None = None,
    log: bool = False,
    ax: Axes | None = None,
    theme: str | None = None,
) -> Figure:
    """The finite values of formats as marks on a line each, one below the other.

    formats: names of `FORMATS`, or records, of up to 8 bits. scaled: divide by each format's largest magnitude, so that formats
    of different ranges can be compared; None: where there is more than one. log: only positive values, on a logarithmic axis,
    where floats are evenly spread and integers are not. Formats of up to 16 values have them written beside their marks.

    ValueError for no format, an unknown one, or one of more than 8 bits.
    """
    records = [narrow(one) for one in formats]
    if not records:
        raise WrongInput("values takes one format or more, such as 'float4_e2m1fn'")
    scaled = len(records) > 1 if scaled is None else scaled
    with canvas(ax, theme, (8.0, 0.9 + 0.62 * len(records))) as (figure, (axis,), colors):
        for place, record in enumerate(records):
            _line(axis, record, -float(place), scaled, log, colors.series[place % len(colors.series)], colors)
        labels = [f"{one.name}\n{len(finite(one))} values, max {one.max:g}" for one in records]
        axis.set_yticks([-float(place) for place in range(len(records))], labels)
        axis.set_ylim(-len(records) + 0.4, 0.6)
        axis.grid(False, axis="y")
        if log:
            axis.set_xscale("log", base=2)
        what = "positive values" if log else "value"
        axis.set_xlabel(
            f"{what}, as a part of the format's largest magnitude" if scaled else f"{what} (before any scale)"
        )
        axis.set_title("Values of " + (records[0].name if len(records) == 1 else "formats"), loc="left")
    return figure


#: By the name of what it draws, as `schemes` is.
formats = values


def narrow(fmt: str | Format) -> Format:
    """The record of a format of up to 8 bits; ValueError for others."""
    with wrong_input():
        record = format_of(fmt)
    if record.bits > MOST_BITS:
        raise WrongInput(
            f"{record.name} has {2**record.bits} values, too many to draw one by one; take a format of up to {MOST_BITS} bits"
        )
    return record


def finite(record: Format) -> Floats:
    """The finite values of a format, ascending, each once."""
    found = record.values.astype(np.float64)
    return np.unique(found[np.isfinite(found)] + 0.0)


def _line(axis: Axes, record: Format, y: float, scaled: bool, log: bool, color: str, theme: Theme) -> None:
    """The marks of one format, and its values where there are few."""
    found = finite(record)
    found = found[found > 0] if log else found
    places = found / np.abs(found).max() if scaled else found
    axis.hlines(y, places[0], places[-1], color=theme.muted, linewidth=0.8)
    axis.vlines(places, y - 0.17, y + 0.17, color=color, linewidth=1.4 if len(found) <= 2 * WRITTEN else 0.7)
    if len(found) > WRITTEN:
        return
    for place, value, above in labelled(places, found, log):
        axis.annotate(
            f"{value:.3g}",
            (float(place), y + (0.2 if above else -0.2)),
            ha="center",
            va="bottom" if above else "top",
            fontsize=7,
            color=theme.ink,
        )


#: Share of the line that two labels on one side of it lie apart.
APART = 0.05


def labelled(places: Floats, values: Floats, log: bool) -> Iterator[tuple[float, float, bool]]:
    """Places and values that are written, and whether above: neighbours above and below in turn; one that has room on neither
    side is left out."""
    along = np.log2(places) if log else places
    gap, ends = APART * max(float(np.ptp(along)), 1e-30), {True: -np.inf, False: -np.inf}
    above = False
    for place, value, at in zip(places, values, along, strict=True):
        free = [side for side in (not above, above) if at - ends[side] >= gap]
        if free:
            above, ends[free[0]] = free[0], float(at)
            yield float(place), float(value), above


#: Magnitudes are drawn from the largest down to 2**-OCTAVES of it, STEPS to an octave, each the mean of so many samples.
OCTAVES, STEPS, SAMPLES = 16, 4, 24
#: Columns between elements that give their block its scale, and sizes of the drawn tensor: blocks of all schemes divide them.
EVERY, ROWS = 16, 128
#: Amax of a block, evenly over an octave: powers of two round scales in another place of each.
AMAXES = 8


def error(
    *records: str | Format | Scheme,
    octaves: int = OCTAVES,
    ax: Axes | None = None,
    theme: str | None = None,
) -> Figure:
    """Relative error of rounding over the size of a number, of formats and of schemes.

    records: names or records. Of a format numbers are rounded as they are, without a scale, and their size is relative to its
    largest value. A scheme quantizes blocks whose largest element (amax) is given, scale and all, and sizes are relative to it;
    the mean is taken over an octave of amax, because scales that are powers of two round differently in each part of it.

    Drawn is the root mean square of (x - q(x)) / x over numbers of nearly that size, evenly spread in their logarithm; 1 means
    that they became 0. octaves: how far down.

    ValueError for no record, an unknown name, or octaves that are no number from 1 to 60.
    """
    named = [record_of(one) for one in records]
    if not named:
        raise WrongInput("error takes a format or a scheme or more, such as 'float8_e4m3fn' or 'mxfp4'")
    if type(octaves) is not int or not 1 <= octaves <= 60:
        raise WrongInput(f"octaves is a number from 1 to 60, got {octaves!r}")
    sizes = 2.0 ** -(np.arange(octaves * STEPS * SAMPLES)[::-1] / (STEPS * SAMPLES))
    at = sizes.reshape(-1, SAMPLES)[:, SAMPLES // 2]
    with canvas(ax, theme, (8.4, 4.2)) as (figure, (axis,), colors):
        for number, record in enumerate(named):
            found = np.sqrt((_relative(record, sizes) ** 2).reshape(len(at), SAMPLES).mean(1))
            style = look(colors, number) | {"markersize": 3.5, "markevery": (number % STEPS, STEPS)}
            axis.plot(at, np.maximum(found, 1e-12), **style, linewidth=1.3, label=record.name)
        drawn = np.concatenate([np.asarray(line.get_ydata(), float) for line in axis.get_lines()])
        axis.set(yscale="log", ylim=(max(1e-8, 0.5 * _least(drawn)), max(2.0, 1.2 * float(drawn.max()))))
        axis.set_xscale("log", base=2)
        axis.set_xlabel(
            "size of the number, as a part of the block's amax (of a format: of its largest value)"
        )
        axis.set_ylabel("relative error, RMS (1: rounded to 0)")
        axis.set_title("Error of rounding by size", loc="left")
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def record_of(one: str | Format | Scheme) -> Format | Scheme:
    """The record of a name of either kind; ValueError with the nearest names."""
    if isinstance(one, (Format, Scheme)):
        return one
    both: dict[str, Any] = {**SCHEMES, **FORMATS}
    with wrong_input():
        found: Format | Scheme = lookup(one, both, "format or scheme")
    return found


def _least(drawn: Floats) -> float:
    """The smallest value that is drawn and not 0."""
    kept = drawn[drawn > 1e-9]
    return float(kept.min()) if kept.size else 1e-3


def _relative(record: Format | Scheme, sizes: Floats) -> Floats:
    """Relative errors of numbers of these sizes (parts of the largest), RMS over an octave of amax."""
    if isinstance(record, Format):
        x = (record.max * sizes).astype(np.float32)
        return np.abs(np.asarray(decode(encode(x, record), record), np.float64) / x - 1)
    squares = [_of_blocks(record, sizes, 2.0 ** (step / AMAXES)) ** 2 for step in range(AMAXES)]
    result: Floats = np.sqrt(np.mean(squares, axis=0))
    return result


def _of_blocks(scheme: Scheme, sizes: Floats, amax: float) -> Floats:
    """Relative errors of amax * sizes in blocks that hold amax: each column of EVERY is amax itself."""
    width, unit = EVERY - 1, _columns(scheme)
    columns = unit * -(-len(sizes) // (unit // EVERY * width))
    x = np.full((columns // EVERY, EVERY), amax, np.float32)
    places = np.resize(np.arange(len(sizes)), (columns // EVERY, width))
    x[:, 1:] = amax * sizes[places]
    whole = np.broadcast_to(
        x.reshape(1, columns), (ROWS if isinstance(scheme.scale.block, tuple) else 1, columns)
    )
    back = np.asarray(dequantize(quantize(np.ascontiguousarray(whole), scheme)), np.float64)[0].reshape(
        x.shape
    )
    found = np.zeros(len(sizes))
    found[places.ravel()] = np.abs(back[:, 1:] / x[:, 1:].astype(np.float64) - 1).ravel()
    return found


def _columns(scheme: Scheme) -> int:
    """What the length of a row is a multiple of: whole blocks, and full ones of a second level over scales."""
    inner = scheme.scale.flat_size or scheme.scale.block
    outer = None if scheme.outer is None else scheme.outer.block
    if isinstance(inner, int) and isinstance(outer, int) and min(inner, outer) > 0:
        return math.lcm(512, inner * outer)
    return 512


__all__ = ["error", "values"]
