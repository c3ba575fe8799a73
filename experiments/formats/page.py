"""The page of experiment `formats`: rate against error, every scheme's signal to noise, and the tables."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.formats.run import BITS, SNR
from experiments.harness.rows import Row
from experiments.report.content import Drawing, Section, Table
from experiments.report.plots import Point, dots, scatter_panels
from experiments.report.results import Results, Where, best_run, by_run, family, is_default, number

TITLE = "Quantization error of each scheme"
QUESTION = "How large is the error of each scheme on the same tensors?"
ABOUT = (
    "Every scheme quantizes the same float32 tensors along the last axis: synthetic data, and weights and activations of a "
    "small model trained here. No model is run on the quantized values: that is the page of `ptq`.",
    "Signal to noise is 10 log10 of the sum of squares over the sum of squared errors; 6 dB are one bit. Bits per element "
    "count the stored scales and zero points.",
)
#: Figures that the top of the page shows: the first that there is.
FEATURED = ("formats-rate-full", "formats-rate-quick")

# Points that carry their name; the others would cover each other.
LABELLED = ("fp8_rowwise", "mxfp8_e4m3", "mxfp6_e2m3", "mxfp4", "nvfp4", "mxint8", "nf4", "int4_g32")
#: Schemes of the first page.
QUOTED = ("mxint8", "fp8_rowwise", "nvfp4", "nf4", "mxfp4")
TEXT = (
    "Each scheme quantizes float32 tensors along the last axis. Signal to noise is 10 log10 of the sum of squares over "
    "the sum of squared errors; 6 dB are one bit. Cosine distance is 1 - cosine. The largest error is given as a part of the "
    "largest value.",
    "Heavy-tailed data are Student's t with three degrees of freedom; outlier channels are normal data in which eight of the "
    "channels are 50 times as large. Bits per element count the stored scales and zero points, for the very tensors of the "
    "column that they stand in: a scale over a whole tensor weighs more in a small tensor.",
)


def findings(rows: Sequence[Row]) -> list[str]:
    """The order of well-known schemes on each kind of synthetic data."""
    found = best_run(by_run(rows, "synthetic"))
    if found is None:
        return []
    where, results = found
    sentences = [order_sentence(results, setting) for setting in results.settings]
    default = [method for method in results.methods if is_default(method)]
    count = f"{len(default)} default schemes and {len(results.methods) - len(default)} conventions of other projects"
    return [f"{count} were measured ({where.run}).", *filter(None, sentences)]


def main_finding(rows: Sequence[Row]) -> str:
    """Signal to noise of some schemes on normal data."""
    found = best_run(by_run(rows, "synthetic"))
    if found is None:
        return ""
    values = {one: found[1].value("normal", one, SNR) for one in QUOTED}
    words = [f"{name} {value:.1f} dB" for name, value in values.items() if value is not None]
    return f"signal to noise on normal data, more is better: {', '.join(words)}" if words else ""


def order_sentence(results: Results, setting: str) -> str:
    """Signal to noise of the well-known schemes, the best first, with their bits."""
    known = [(results.value(setting, method, SNR), method) for method in LABELLED]
    ordered = sorted(((snr, method) for snr, method in known if snr is not None), reverse=True)
    words = [
        f"{method} {snr:.1f} dB ({number(results.value(setting, method, BITS), 2)} bits)"
        for snr, method in ordered
    ]
    return f'On data of kind "{setting}": {", ".join(words)}.' if words else ""


def sections(rows: Sequence[Row]) -> list[Section]:
    """Synthetic and trained tensors, run by run."""
    found = []
    for where, results in by_run(rows, "synthetic").items():
        found.append(synthetic(where, results))
    for where, results in by_run(rows, "trained").items():
        found.append(trained(where, results))
    return found


def synthetic(where: Where, results: Results) -> Section:
    """Rate against error, and all tables."""
    data = results.settings
    default = [method for method in results.methods if is_default(method)]
    panels = {setting: points(results, setting, default) for setting in data}
    rate = Drawing(
        f"formats-rate-{where.ending}",
        "Signal to noise against bits per element of the same tensors, scales included. Default schemes; a point per block "
        "size.",
        scatter_panels(panels, BITS, "signal to noise (dB)", columns=2),
    )
    return Section(
        f"Synthetic data ({where})",
        TEXT,
        [rate, *dot_plots(where, results, data, "synthetic")],
        tables(results, data),
    )


def trained(where: Where, results: Results) -> Section:
    """The model's weights and activations, together and by kind of layer."""
    kinds = results.settings
    together = [setting for setting in kinds if setting in ("weights", "activations")]
    text = (
        *where.corpus_notes,
        (
            "Weights of all linear layers of a small proxy model, trained here on the source of sympy, and the inputs of "
            "these layers on held-out text. Weights are quantized along the input features, inputs along the features of "
            "each token."
        ),
    )
    drawings = dot_plots(where, results, together, "trained")
    by_kind = snr_table(
        results, [kind for kind in kinds if kind not in together], "Signal to noise (dB) by kind of layer"
    )
    return Section(f"Trained tensors ({where})", text, drawings, [*tables(results, together), by_kind])


def points(results: Results, setting: str, methods: Sequence[str]) -> list[Point]:
    """Bits against signal to noise of those methods that have both."""
    found = []
    for method in methods:
        bits, snr = results.value(setting, method, BITS), results.value(setting, method, SNR)
        if bits is not None and snr is not None:
            found.append(Point(bits, snr, family(method), method if method in LABELLED else "", method))
    return found


def dot_plots(where: Where, results: Results, settings: Sequence[str], name: str) -> list[Drawing]:
    """Every scheme, default ones and the other projects', by the bits per element of the first setting."""
    drawings = []
    first = settings[0] if settings else ""
    for default, title in ((True, "default schemes"), (False, "conventions of other projects")):
        methods = by_bits(
            results, first, [method for method in results.methods if is_default(method) == default]
        )
        if methods:
            series = {
                setting: [results.value(setting, method, SNR) for method in methods] for setting in settings
            }
            labels = [f"{method}  {number(results.value(first, method, BITS), 2)}" for method in methods]
            figure = dots(labels, series, "signal to noise (dB)")
            caption = (
                f'Signal to noise of the {title}, by bits per element (beside the name; that of "{first}").'
            )
            drawings.append(
                Drawing(
                    f"formats-{name}-{'default' if default else 'others'}-{where.ending}", caption, figure
                )
            )
    return drawings


def tables(results: Results, settings: Sequence[str]) -> list[Table]:
    """All measures, side by side for each kind of data."""
    metrics = {
        BITS: (BITS, 3),
        SNR: ("dB", 2),
        "cosine distance": ("cosine distance", 6),
        "largest error": ("largest error", 4),
    }
    columns = ["scheme", *(f"{setting}: {label}" for setting in settings for label, _ in metrics.values())]
    lines = [
        [method]
        + [
            number(results.value(setting, method, metric), digits)
            for setting in settings
            for metric, (_, digits) in metrics.items()
        ]
        for method in results.methods
    ]
    return [
        Table(f"Every scheme on {', '.join(settings)}", columns, lines, results.with_settings(settings).rows)
    ]


def snr_table(results: Results, settings: Sequence[str], caption: str) -> Table:
    """Signal to noise alone, a column per setting."""
    lines = [
        [method, *(number(results.value(setting, method, SNR), 1) for setting in settings)]
        for method in results.methods
    ]
    return Table(caption, ["scheme", *settings], lines, results.with_settings(settings).rows)


def by_bits(results: Results, setting: str, methods: Sequence[str]) -> list[str]:
    """Methods with the fewest bits in a setting last, so that the best stand on top."""
    return sorted(methods, key=lambda method: -(results.value(setting, method, BITS) or 0.0))
