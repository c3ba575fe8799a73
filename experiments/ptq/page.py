"""The page of experiment `ptq`: what quantization costs a trained model, and what it saves."""

from __future__ import annotations

import math
from collections.abc import Sequence

from experiments.harness.rows import Row
from experiments.models.activation_schemes import WEIGHTS, activations_of
from experiments.models.quantized_model import PLAIN
from experiments.ptq.run import LAYERS, QUALITY, TITLE
from experiments.report.pages import Drawing, Section, Table
from experiments.report.plots import Point, dots, heatmap, scatter_panels
from experiments.report.results import Results, Where, by_run, family, is_house, number

__all__ = ["TITLE", "sections"]

CHANGE, CHANGE_ERROR = "bits per byte, change", "bits per byte, standard error of the change"
ACCURACY_CHANGE, ACCURACY_ERROR = "accuracy, change", "accuracy, standard error of the change"
# Below this loss, in bits per byte, plots are linear: smaller ones are noise of this exam.
LINEAR = 0.001
LABELLED = (
    "fp8_tensorwise",
    "mxfp8_e4m3",
    "mxfp6_e2m3",
    "mxfp4",
    "nvfp4",
    "nf4",
    "int4_g32",
    "int3_g32",
    "int2_g32",
)
TEXT = (
    "A stand-in: not one of the models that papers report, but a small byte-level model of the Llama family, trained here from "
    "scratch on the source of sympy. Its numbers compare formats with each other, and with no published number.",
    "Every scheme quantizes the weights of all linear layers, lm_head included; the embedding and the norms stay float32 and "
    "count as such in the size. Where activations are quantized too, each layer's input goes through the scheme that the line "
    "names, with scales found for each input. Products are float32 throughout, so this is the format's error alone.",
    "Where one activation scale is over a whole tensor (tensorwise schemes, the outer scale of NVFP4), it is found for each "
    "window apart. Within a window it also sees what attention does not: the false continuations of all questions, and later "
    "text.",
    "Changes are against float32 on the same text and questions, paired by window (each from another held-out file), with the "
    "standard error over windows behind the sign ±. A change within two standard errors is noise, and stands in brackets; "
    "among so many lines, one in twenty stands without brackets by chance.",
    "The error is over text, for this one trained model. Another training (another seed, another processor) is another model, "
    "and moved small changes by more than their error; an order among schemes of like size needs several seeds.",
)


def sections(rows: Sequence[Row]) -> list[Section]:
    """Quality and size run by run, then the layers."""
    made = [quality(where, results) for where, results in by_run(rows, QUALITY).items()]
    return made + [layers(where, results) for where, results in by_run(rows, LAYERS).items()]


def quality(where: Where, results: Results) -> Section:
    """Bits per byte, accuracy and size."""
    drawings = [size_plot(where, results), *change_plots(where, results)]
    house = [method for method in results.methods if is_house(method)]
    others = [method for method in results.methods if not is_house(method)]
    tables = [quality_table(results, house, "House schemes and baselines")]
    if others:
        tables.append(quality_table(results, others, "Conventions of other projects"))
    return Section(
        f"Quality and size of the stand-in ({where})", [*TEXT, baseline_text(results)], drawings, tables
    )


def baseline_text(results: Results) -> str:
    """What the unquantized model does."""
    bits, accuracy = (results.value(WEIGHTS, "float32", metric) for metric in ("bits per byte", "accuracy"))
    spread = results.value(WEIGHTS, "float32", "accuracy, standard error")
    return (
        f"Unquantized, in float32, it needs {number(bits, 3)} bits per held-out byte and answers {number(accuracy, 1)}% "
        f"(± {number(spread, 1)}) of the four-way questions rightly; guessing gives 25%."
    )


def size_plot(where: Where, results: Results) -> Drawing:
    """Size against loss, weights alone and with activations."""
    panels = {
        "weights": size_points(results, False),
        "weights and activations": size_points(results, True),
    }
    figure = scatter_panels(
        panels, "size of the model (MB, decimal)", "bits per byte more than float32", symlog=LINEAR
    )
    caption = f"Loss against size, house schemes; the axis is linear below {LINEAR} and logarithmic above."
    return Drawing(f"ptq-size-{where.scale}", caption, figure)


def size_points(results: Results, activations: bool) -> list[Point]:
    """A point per house scheme."""
    made = []
    for setting, method in places(results, activations):
        size, change = results.value(setting, method, "size"), results.value(setting, method, CHANGE)
        if (
            is_house(method)
            and method not in PLAIN
            and size is not None
            and change is not None
            and math.isfinite(change)
        ):
            made.append(Point(size / 1e6, change, family(method), method if method in LABELLED else ""))
    return made


def places(results: Results, activations: bool) -> list[tuple[str, str]]:
    """(setting, method) of all methods with float32 activations, or with quantized ones."""
    found = dict.fromkeys((row.setting, row.method) for row in results.rows)
    chosen = {
        method: setting for setting, method in found if (activations_of(setting) is not None) == activations
    }
    return [(chosen[method], method) for method in results.methods if method in chosen]


def change_plots(where: Where, results: Results) -> list[Drawing]:
    """The loss of every scheme with two standard errors, by size."""
    made = []
    for house, title in ((True, "House schemes"), (False, "Conventions of other projects")):
        methods = [method for method in by_size(results) if is_house(method) == house and method != "float32"]
        if not methods:
            continue
        series, errors = {}, {}
        for activations, name in ((False, "weights"), (True, "weights and activations")):
            setting_of = {method: setting for setting, method in places(results, activations)}
            series[name] = [results.value(setting_of.get(method, ""), method, CHANGE) for method in methods]
            spreads = [results.value(setting_of.get(method, ""), method, CHANGE_ERROR) for method in methods]
            errors[name] = [None if spread is None else 2 * spread for spread in spreads]
        labels = [
            f"{method}  {number(results.value(WEIGHTS, method, 'bits per weight'), 2)}" for method in methods
        ]
        figure = dots(labels, series, "bits per byte more than float32", errors=errors, symlog=LINEAR)
        caption = f"{title}: loss with two standard errors, by bits per weight (the number beside the name)."
        made.append(Drawing(f"ptq-change-{'house' if house else 'others'}-{where.scale}", caption, figure))
    return made


def by_size(results: Results) -> list[str]:
    """Methods, the largest first."""
    return sorted(results.methods, key=lambda method: -(results.value(WEIGHTS, method, "size") or 0.0))


def quality_table(results: Results, methods: Sequence[str], caption: str) -> Table:
    """A line per method: size, weights alone, weights and activations."""
    columns = [
        "scheme",
        "size (MB)",
        "bits per weight",
        "W: bits per byte",
        "W: change",
        "W: accuracy (%)",
        "W: change",
        "activations in",
        "W+A: bits per byte",
        "W+A: change",
        "W+A: accuracy (%)",
        "W+A: change",
    ]
    with_activations = {method: setting for setting, method in places(results, True)}
    lines = []
    for method in methods:
        size = results.value(WEIGHTS, method, "size")
        both = with_activations.get(method, "")
        line = [method, number(None if size is None else size / 1e6, 3)]
        line += [
            number(results.value(WEIGHTS, method, "bits per weight"), 2),
            *quality_cells(results, WEIGHTS, method),
        ]
        lines.append(
            [*line, (activations_of(both) or "") if both else "", *quality_cells(results, both, method)]
        )
    return Table(caption, columns, lines, results.stale_methods)


def quality_cells(results: Results, setting: str, method: str) -> list[str]:
    """Bits per byte and accuracy, each with its change."""
    return [
        number(results.value(setting, method, "bits per byte"), 3),
        change_cell(results.value(setting, method, CHANGE), results.value(setting, method, CHANGE_ERROR), 4),
        number(results.value(setting, method, "accuracy"), 1),
        change_cell(
            results.value(setting, method, ACCURACY_CHANGE), results.value(setting, method, ACCURACY_ERROR), 1
        ),
    ]


def change_cell(change: float | None, error: float | None, digits: int) -> str:
    """The change and its standard error, in brackets where it is noise."""
    if change is None or error is None:
        return ""
    text = f"{number(change, digits)} ± {number(error, digits)}"
    return f"({text})" if abs(change) <= 2 * error else text


def layers(where: Where, results: Results) -> Section:
    """Signal to noise per layer."""
    text = (
        "Signal to noise of each linear layer's output (dB), when its input is what the float32 model gives it: errors of "
        "earlier layers do not add up here. lm_head is the last column.",
    )
    drawings, tables = [], []
    for activations, name in ((False, "weights"), (True, "weights and activations")):
        chosen = places(results, activations)
        columns = layer_names(results)
        values = [[results.value(setting, method, layer) for layer in columns] for setting, method in chosen]
        short = [
            layer.removeprefix("model.layers.").replace("self_attn.", "").replace("mlp.", "")
            for layer in columns
        ]
        house = [
            place for place, (_, method) in enumerate(chosen) if is_house(method) and method not in PLAIN
        ]
        grid, names = [values[place] for place in house], [chosen[place][1] for place in house]
        if names:
            figure = heatmap(names, short, grid, "signal to noise (dB)")
            tag = "both" if activations else "weights"
            drawings.append(
                Drawing(f"ptq-layers-{tag}-{where.scale}", f"Quantized {name}, house schemes.", figure)
            )
        lines = [
            [method, *(number(v, 1) for v in line)] for (_, method), line in zip(chosen, values, strict=True)
        ]
        tables.append(
            Table(f"Signal to noise (dB), quantized {name}", ["scheme", *short], lines, results.stale_methods)
        )
    return Section(f"Layers of the stand-in ({where})", text, drawings, tables)


def layer_names(results: Results) -> list[str]:
    """Layers in the order of execution."""
    return results.metrics
