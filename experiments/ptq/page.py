"""The page of experiment `ptq`: what quantization costs a trained model, and what it saves."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ao_lab.intervals import is_noise, rounded
from experiments.harness.rows import Row
from experiments.models.quantized_model import PLAIN, WEIGHTS, activations_of
from experiments.ptq.real_page import real_card, real_findings, real_sections, short_finding
from experiments.ptq.run import LAYERS, QUALITY
from experiments.ptq.speed_page import joined as joined
from experiments.ptq.task_page import task_findings, task_sections
from experiments.report import accuracies
from experiments.report.content import Card, Comparison, Drawing, Section, Table
from experiments.report.plots import Point, dots, heatmap, scatter_panels
from experiments.report.results import Results, Where, best_run, by_run, family, is_default, number

TITLE = "Post-training quantization: pretrained models, and a small proxy model in detail"
QUESTION = "How much does each scheme increase the loss of a trained model, without calibration?"
ABOUT = (
    (
        "First pretrained language models that pip packages carry, or your own (`ao-lab reproduce ptq --model DIR`): "
        "perplexity and KL divergence on texts that were not used for calibration. These packages ship weights that had"
        " been quantized before, on grids that no scheme here shares; tables say which."
    ),
    (
        "Then other models with their own metrics: sentence encoders (film reviews, retrieval, distance of vectors) and"
        " Whisper (word error rate, loss), whose weights were never quantized."
    ),
    (
        "Then a proxy model: a small byte-level Llama, trained here from scratch on the source of sympy. It compares "
        "all formats and conventions with each other, is compared with no published value, and understates the cost of "
        "a format, since its activations have few outliers."
    ),
    "Each scheme quantizes the weights of all linear layers, and in a second measurement their inputs too.",
)
#: Figures that the top of the page shows: the first that there is.
FEATURED = (
    "ptq-real-smollm2-135m-instruct-full",
    "ptq-real-smollm2-135m-instruct-quick",
    "ptq-size-full",
    "ptq-size-quick",
)
#: Bits per weight up to which findings compare schemes.
WIDTHS = (3.6, 4.6, 6.6, 8.6)

CHANGE, CHANGE_ERROR = "bits per byte, change", "bits per byte, standard error of the change"
ACCURACY_CHANGE, ACCURACY_ERROR = "accuracy, change", "accuracy, standard error of the change"
# Below this loss, in bits per byte, plots are linear: smaller ones are noise of this evaluation.
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
    (
        "A proxy model: not one of the models that papers report, but a small byte-level model of the Llama family, "
        "trained here from scratch on the source of sympy. Its results compare formats with each other, and with no "
        "published value."
    ),
    (
        "Every scheme quantizes the weights of all linear layers, lm_head included; the embedding and the norms stay "
        "float32 and count as such in the size. Where activations are quantized too, each layer's input is quantized by"
        " the scheme that the line names, with dynamic scales. Matmuls are in float32, so this is the error of the "
        "format alone."
    ),
    "Where one activation scale is over a whole tensor (tensorwise schemes, the outer scale of NVFP4), it is found for each "
    "window apart. Within a window it also sees what attention does not: the false continuations of all questions, and later "
    "text.",
    "Changes are against float32 on the same text and questions, paired by window (each from another held-out file); after the "
    "sign ± stands half of the 95% interval over windows. A change within it is noise, and stands in parentheses; among so "
    "many lines, one in twenty stands without them by chance.",
    "The error is over text, for this one trained model. Another training (another seed, another processor) is another model, "
    "and moved small changes by more than their error; an order among schemes of like size needs several seeds.",
)


def findings(rows: Sequence[Row]) -> list[str]:
    """What schemes cost real models; of the stand-in the best default scheme of each width, and how many do not differ."""
    found = best_run(by_run(rows, QUALITY))
    if found is None:
        return [*real_findings(rows), *task_findings(rows)]
    where, results = found
    sentences = [
        *real_findings(rows),
        *task_findings(rows),
        f"Proxy model ({where.run}): {baseline_text(results)}",
    ]
    for activations, name in ((False, "weights"), (True, "weights and activations")):
        sentences += [noise_sentence(results, activations, name), width_sentence(results, activations, name)]
    return [sentence for sentence in sentences if sentence]


def main_finding(rows: Sequence[Row]) -> str:
    """What the first real model loses; without one, how many schemes cost no loss that is told from noise."""
    if real := short_finding(rows):
        return real
    found = best_run(by_run(rows, QUALITY))
    return noise_sentence(found[1], False, "weights").removesuffix(".") if found else ""


def cards(rows: Sequence[Row]) -> list[Card]:
    """What int8 weights and inputs cost the first real model."""
    return real_card(rows)


def changes(results: Results, activations: bool) -> list[tuple[float, float, float, str]]:
    """(bits per weight, change, half of its 95% interval, method) of the default schemes that have all three."""
    found = []
    for setting, method in settings_of(results, activations):
        if is_default(method) and method not in PLAIN:
            bits = results.value(WEIGHTS, method, "bits per weight")
            change, half = results.value(setting, method, CHANGE), results.half(setting, method, CHANGE_ERROR)
            if bits is not None and change is not None and half is not None and math.isfinite(change):
                found.append((bits, change, half, method))
    return found


def noise_sentence(results: Results, activations: bool, name: str) -> str:
    """How many schemes change the loss by no more than half of its 95% interval, and the smallest of them."""
    known = changes(results, activations)
    within = [one for one in known if is_noise(one[1], one[2])]
    if not within:
        return ""
    bits, change, half, method = min(within)
    return (
        f"Quantized {name}: {len(within)} of {len(known)} default schemes change bits per byte by no more than their "
        f"95% intervals; the smallest of them is {method} ({bits:.2f} bits per weight, {rounded(change, half, sign=True)})."
    )


def width_sentence(results: Results, activations: bool, name: str) -> str:
    """The scheme with the smallest increase among those of each width."""
    words = []
    for low, high in zip((0.0, *WIDTHS), WIDTHS, strict=False):
        inside = [one for one in changes(results, activations) if low < one[0] <= high]
        if inside:
            bits, change, half, method = min(inside, key=lambda one: one[1])
            words.append(
                f"{method} up to {high:g} bits ({bits:.2f} bits, {rounded(change, half, sign=True)})"
            )
    return f"Smallest increase in bits per byte, {name}: {'; '.join(words)}." if words else ""


def sections(rows: Sequence[Row]) -> list[Section]:
    """Real models; of the stand-in quality and size run by run, then the layers."""
    found = [*real_sections(rows), *task_sections(rows), *accuracies.sections("ptq", rows)]
    found += [quality(where, results) for where, results in by_run(rows, QUALITY).items()]
    return found + [layers(where, results) for where, results in by_run(rows, LAYERS).items()]


def comparisons(rows: Sequence[Row]) -> list[Comparison]:
    """Published accuracies beside ours of the same model."""
    return accuracies.comparisons("ptq", rows)


def quality(where: Where, results: Results) -> Section:
    """Bits per byte, accuracy and size."""
    drawings = [size_plot(where, results), *change_plots(where, results)]
    default = [method for method in results.methods if is_default(method)]
    others = [method for method in results.methods if not is_default(method)]
    tables = [quality_table(results, default, "Default schemes and baselines")]
    if others:
        tables.append(quality_table(results, others, "Conventions of other projects"))
    return Section(
        f"Quality and size of the proxy model ({where})",
        [*where.corpus_notes, *TEXT, baseline_text(results)],
        drawings,
        tables,
    )


def baseline_text(results: Results) -> str:
    """What the unquantized model does."""
    bits, accuracy = (results.value(WEIGHTS, "float32", metric) for metric in ("bits per byte", "accuracy"))
    half = results.half(WEIGHTS, "float32", "accuracy, standard error")
    return (
        f"Unquantized, in float32, the model has {number(bits, 3)} bits per byte on held-out text and an accuracy of "
        f"{rounded(accuracy, half, unit='%')} on four-way multiple choice, where guessing has 25%."
    )


def size_plot(where: Where, results: Results) -> Drawing:
    """Size against loss, weights alone and with activations."""
    panels = {"weights": size_points(results, False), "weights and activations": size_points(results, True)}
    figure = scatter_panels(
        panels, "size of the model (MB, decimal)", "increase in bits per byte over float32", symlog=LINEAR
    )
    caption = f"Loss against size, default schemes; the axis is linear below {LINEAR} and logarithmic above."
    return Drawing(f"ptq-size-{where.ending}", caption, figure)


def size_points(results: Results, activations: bool) -> list[Point]:
    """A point per default scheme."""
    found = []
    for setting, method in settings_of(results, activations):
        size, change = results.value(setting, method, "size"), results.value(setting, method, CHANGE)
        if (
            is_default(method)
            and method not in PLAIN
            and size is not None
            and change is not None
            and math.isfinite(change)
        ):
            found.append(
                Point(size / 1e6, change, family(method), method if method in LABELLED else "", method)
            )
    return found


def settings_of(results: Results, activations: bool) -> list[tuple[str, str]]:
    """(setting, method) of all methods with float32 activations, or with quantized ones."""
    found = dict.fromkeys((row.setting, row.method) for row in results.rows)
    chosen = {
        method: setting for setting, method in found if (activations_of(setting) is not None) == activations
    }
    return [(chosen[method], method) for method in results.methods if method in chosen]


def change_plots(where: Where, results: Results) -> list[Drawing]:
    """The loss of every scheme with its 95% interval, by size."""
    drawings = []
    for default, title in ((True, "Default schemes"), (False, "Conventions of other projects")):
        methods = [
            method for method in by_size(results) if is_default(method) == default and method != "float32"
        ]
        if not methods:
            continue
        series, errors = {}, {}
        for activations, name in ((False, "weights"), (True, "weights and activations")):
            setting_of = {method: setting for setting, method in settings_of(results, activations)}
            series[name] = [results.value(setting_of.get(method, ""), method, CHANGE) for method in methods]
            errors[name] = [
                results.half(setting_of.get(method, ""), method, CHANGE_ERROR) for method in methods
            ]
        labels = [
            f"{method}  {number(results.value(WEIGHTS, method, 'bits per weight'), 2)}" for method in methods
        ]
        figure = dots(labels, series, "increase in bits per byte over float32", errors=errors, symlog=LINEAR)
        caption = f"{title}: loss with its 95% interval, by bits per weight (beside the name)."
        drawings.append(
            Drawing(f"ptq-change-{'default' if default else 'others'}-{where.ending}", caption, figure)
        )
    return drawings


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
    with_activations = {method: setting for setting, method in settings_of(results, True)}
    lines = []
    for method in methods:
        size = results.value(WEIGHTS, method, "size")
        both = with_activations.get(method, "")
        line = [method, number(size, 3, 1e-6)]
        line += [
            number(results.value(WEIGHTS, method, "bits per weight"), 2),
            *quality_cells(results, WEIGHTS, method),
        ]
        lines.append(
            [*line, (activations_of(both) or "") if both else "", *quality_cells(results, both, method)]
        )
    return Table(caption, columns, lines, results.rows)


def quality_cells(results: Results, setting: str, method: str) -> list[str]:
    """Bits per byte and accuracy, each with its change."""
    return [
        number(results.value(setting, method, "bits per byte"), 3),
        results.with_half(setting, method, CHANGE, CHANGE_ERROR),
        number(results.value(setting, method, "accuracy"), 1),
        results.with_half(setting, method, ACCURACY_CHANGE, ACCURACY_ERROR),
    ]


def layers(where: Where, results: Results) -> Section:
    """Signal to noise per layer."""
    text = (
        *where.corpus_notes,
        "Signal to noise of each linear layer's output (dB), when its input is what the float32 model gives it: errors of "
        "earlier layers do not add up here. lm_head is the last column.",
    )
    drawings, tables = [], []
    for activations, name in ((False, "weights"), (True, "weights and activations")):
        chosen = settings_of(results, activations)
        columns = layer_names(results)
        values = [[results.value(setting, method, layer) for layer in columns] for setting, method in chosen]
        short = [
            layer.removeprefix("model.layers.").replace("self_attn.", "").replace("mlp.", "")
            for layer in columns
        ]
        default = [
            index for index, (_, method) in enumerate(chosen) if is_default(method) and method not in PLAIN
        ]
        grid, names = [values[index] for index in default], [chosen[index][1] for index in default]
        if names:
            figure = heatmap(names, short, grid, "signal to noise (dB)")
            tag = "both" if activations else "weights"
            drawings.append(
                Drawing(f"ptq-layers-{tag}-{where.ending}", f"Quantized {name}, default schemes.", figure)
            )
        lines = [
            [method, *(number(v, 1) for v in line)] for (_, method), line in zip(chosen, values, strict=True)
        ]
        tables.append(
            Table(f"Signal to noise (dB), quantized {name}", ["scheme", *short], lines, results.rows)
        )
    return Section(f"Layers of the proxy model ({where})", text, drawings, tables)


def layer_names(results: Results) -> list[str]:
    """Layers in the order of execution."""
    return results.metrics
