"""Sections about time: layers, encoders and generation, with published tables beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from experiments.fp8_training.report.lines import STATUS, Columns, failures, table
from experiments.harness.rows import Row
from experiments.report.content import Drawing, Section, Table
from experiments.report.plots import dots
from experiments.report.results import Results, Where, best_run, by_run
from experiments.sparsity.report.published_tables import comparisons, published_table
from experiments.sparsity.speed import decode, encoders, linear
from experiments.sparsity.speed.sides import DENSE

TIMES: Columns = {
    "time": ("ms", 3, 1.0),
    "time, 20%": ("20%", 3, 1.0),
    "time, 80%": ("80%", 3, 1.0),
    "speed over dense": ("speed over dense", 3, 1.0),
    "images/s": ("images/s", 2, 1.0),
    "peak memory": ("peak (GB)", 3, 1.0),
}
DECODING: Columns = {
    "tokens/s": ("tokens/s", 1, 1.0),
    "speedup over bfloat16": ("speed over bfloat16", 3, 1.0),
    "model size": ("model (GB)", 3, 1.0),
    "peak memory": ("peak (GB)", 3, 1.0),
}
TITLES = {
    linear.KIND: "Linear layers in training",
    encoders.TRAINING: "A training step of SAM's ViT-L encoder",
    encoders.INFERENCE: "Images a second of SAM's ViT-h encoder",
    decode.KIND: "Generating with Llama-3.1-8B's shapes",
}
TEXTS = {
    linear.KIND: "Forward and backward of one layer, dense weight gradient. The 2:4 layer finds transposable masks and "
    "compresses its weight in both directions in every step; 'masks kept' leaves the finding out. It multiplies by our own "
    "kernels, or by cuSPARSELt, which is launched one by one alone. The published layer, whose products are cuSPARSELt's in a "
    "CUDA graph, stands beside the one of our own kernels. Layers have a bias; the 2:4 ones sum its gradient by a kernel of "
    "ours, which takes 9 and 13 us (an H100) less than torch's sum in the dense one. 'prune + compress' is one read of the "
    "weight along its rows.",
    encoders.TRAINING: "Forward and backward, random weights and images, no optimizer; the MLP layers are 2:4, with new masks "
    "in every step.",
    encoders.INFERENCE: "Forward passes, random weights and images. Published throughput is on photographs.",
    decode.KIND: "Batch 1, 200 new tokens, random weights; layers inside the blocks are 2:4.",
}
#: Ratios of speed, and the method whose they are 1.
RATIOS = {"speed over dense": DENSE, "speedup over bfloat16": "bfloat16"}
#: The published table beside each kind, and what of it.
PUBLISHED = {
    linear.KIND: ("single linear", "(m,k,n)"),
    encoders.TRAINING: ("ViT-L", ""),
    encoders.INFERENCE: ("SAM ViT-h", ""),
    decode.KIND: ("Llama-3-8B", ""),
}


def findings(rows: Sequence[Row]) -> list[str]:
    """Speeds over dense of the largest run; that nothing was timed where that is so."""
    words = []
    for kind, title in TITLES.items():
        run = best_run({where: found for where, found in by_run(rows, kind).items() if where.device != "cpu"})
        if run is not None:
            where, results = run
            base = "bfloat16" if kind == decode.KIND else DENSE
            if said := ratios(results):
                words.append(f"{title} ({where}), speed over {base}: {said}.")
    timed = any(row.metric == "time" for row in rows)
    return words or ([] if timed else ["Nothing is timed yet: times are of a GPU at full scale."])


def ratios(results: Results) -> str:
    """Ratios of all methods but those they are over, by setting where there are several."""
    said = {}
    for setting in results.settings:
        found = [
            f"{row.method} {row.value:.2f}"
            for row in results.with_setting(setting).rows
            if row.metric in RATIOS and row.method not in RATIOS.values()
        ]
        if found:
            said[setting] = ", ".join(found)
    if len(said) == 1:
        return next(iter(said.values()))
    return "; ".join(f"{setting}: {text}" for setting, text in said.items())


def sections(rows: Sequence[Row]) -> list[Section]:
    """Of all runs of all kinds."""
    found, drawn = [], set[str]()
    for kind in TITLES:
        for where, results in by_run(rows, kind).items():
            one = section(kind, where, results, rows)
            # A figure is of all shapes of a device: it stands in the first of their sections.
            found.append(replace(one, drawings=[that for that in one.drawings if that.name not in drawn]))
            drawn.update(that.name for that in one.drawings)
    return found


def section(kind: str, where: Where, results: Results, rows: Sequence[Row]) -> Section:
    """Times, what was not measured, published values and a figure of both."""
    measured = any(not row.metric.startswith(STATUS) for row in results.rows)
    columns = DECODING if kind == decode.KIND else TIMES
    tables: list[Table] = [table("Times", results, columns)] if measured else []
    drawings = [ratio_drawing(kind, where, rows)] if measured and kind != decode.KIND else []
    text = [TEXTS[kind], *failures(results)]
    return Section(f"{TITLES[kind]} ({where})", text, drawings, [*tables, published_table(*PUBLISHED[kind])])


def ratio_drawing(kind: str, where: Where, rows: Sequence[Row]) -> Drawing:
    """Published speeds over dense beside those that a device measured."""
    model = PUBLISHED[kind][0]
    rows = [row for row in rows if row.device == where.device]
    found = [one for one in comparisons(rows) if one.model.startswith(model) and one.unit == "x"]
    labels = [f"{one.method}, {one.model.partition(', ')[2]}" for one in found]
    series = {
        "published": [one.published for one in found],
        f"measured, {where.device}": [one.measured for one in found],
    }
    figure = dots(labels, series, "speed over dense", base=1.0)
    return Drawing(
        f"sparsity-{kind}-ratios-{where.ending}", "Speeds over dense, published and measured.", figure
    )


__all__ = ["findings", "sections"]
