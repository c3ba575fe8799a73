"""The part of the page of `ptq` on real models: a section each, with loss against bytes and a table of each text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from ao_lab.intervals import is_noise
from ao_lab.measure.times import SPREAD
from experiments.harness.rows import Row
from experiments.models.causal_lm import BASE, FILE, IN_MEMORY
from experiments.models.quantized_model import WEIGHTS, activations_of
from experiments.models.serving import DENSE, LARGEST, LEAST, OVER, PEAK, SPEEDUP, TOKENS
from experiments.ptq.real import DENSE_LAYERS
from experiments.report.content import Card, Drawing, Section, Table
from experiments.report.in_turn import InTurn
from experiments.report.plots import Point, scatter_panels
from experiments.report.real_runs import (
    CHANGE,
    CHANGE_ERROR,
    PERPLEXITY,
    RealRun,
    about_of,
    best_runs,
    findings_of,
    quality_cells,
    real_runs,
    relative,
    threads_of,
    title_of,
    windows_of,
)
from experiments.report.results import Results, failures, family, number

IN_TURN = InTurn("tokens/s", DENSE, SPEEDUP, LEAST, LARGEST)
#: Below this change of the loss, in nats, plots are linear.
LINEAR = 0.01
#: Of a model's file, how many linear layers it has.
LAYERS = "quantized layers"
TEXT = (
    (
        "Weights of all linear layers are quantized except a head that is tied to the embedding; embedding, norms and "
        "the rest stay bfloat16 and count in the size. W: weights alone. W+A: the layers' inputs too, with dynamic "
        "scales. The model runs in bfloat16; nothing is calibrated, values are rounded to nearest."
    ),
    "Loss is the mean of -log p per token in nats, perplexity e to that, by the model's own tokenizer, in windows that do not "
    "overlap (stride = window), each predicting all of its tokens but the first, or all where the tokenizer begins a text with "
    "a token. Changes are paired by window with the dense model's; KL is the divergence of the predictions from the dense "
    "model's. After ± stands half of the 95% interval (Student's t), over windows of a text of one document and over "
    "documents where there are several. A change within it stands in parentheses.",
)
SPEEDS = (
    f"Speeds: a speedup is the median of the rounds' ratios, noisy where they are more than {SPREAD:g}x apart, or where the "
    "dense model was so much slower than beside others; speeds without one were timed alone and do not compare. Size: of the "
    "files, with the scheme's scales; `ao-lab compare` measures what `ao-lab quantize` writes, whose scales may be smaller. "
    "Peak memory: weights as they are in memory, where float32 scales may take more, and the most that tensors took "
    "beside them."
)
WIKITEXT = (
    "WikiText-2 here is the release wikitext-2-v1 (with <unk>); published perplexities are mostly of wikitext-2-raw-v1, "
    "another text."
)


def real_sections(rows: Sequence[Row]) -> list[Section]:
    """A section for each run."""
    return [section(run) for run in real_runs(rows)]


def section(run: RealRun) -> Section:
    """What the schemes cost one model."""
    tables = [table(run, name, results) for name, results in run.texts.items()]
    timed = any(run.whole.value(WEIGHTS, method, "tokens/s") is not None for method in run.lines)
    tables += [serving(run)] if timed else []
    found = drawing(run)
    text = [
        *about_of(run),
        *TEXT,
        *([SPEEDS] if timed else []),
        *([WIKITEXT] if any(map(is_wikitext, run.texts)) else []),
        *failures(run.whole),
    ]
    return Section(title_of(run), text, [found] if found else [], tables)


def is_wikitext(text: str) -> bool:
    """Whether a text's name is that of WikiText."""
    return text.startswith("wikitext")


def table(run: RealRun, text: str, results: Results) -> Table:
    """A line per scheme: size, then quality with weights and with inputs quantized."""
    columns, with_inputs = ["scheme", "size (MB)", "bits per weight"], has_inputs(run)
    for name in ("W", "W+A") if with_inputs else ("W",):
        columns += [f"{name}: perplexity", f"{name}: loss, change", f"{name}: KL"]
    columns[6:6] = ["inputs in"] * with_inputs
    lines = []
    for method in run.lines:
        size, both = run.size(method), run.setting(method, True)
        bits = [run.whole.value(setting, method, "bits per weight") for setting in (WEIGHTS, both)]
        line = [
            named(run, method),
            megabytes(size),
            number(bits[0] if bits[0] is not None else bits[1], 2),
        ]
        line += quality_cells(results, WEIGHTS, method)
        if with_inputs:
            line += [(activations_of(both) or "") if both else "", *quality_cells(results, both, method)]
        lines.append(line)
    rows = [*results.rows, *run.whole.rows]
    return Table(f"{run.model}, {text}", columns, lines, rows)


def has_inputs(run: RealRun) -> bool:
    """Whether any scheme was measured on inputs too."""
    return any(run.setting(method, True) for method in run.lines)


def megabytes(size: float | None) -> str:
    """Decimal megabytes, of less than one with three digits behind the point."""
    return number(size, 1 if size is None or size >= 1e6 else 3, 1e-6)


def named(run: RealRun, method: str) -> str:
    """A scheme's name, with how many layers it quantizes where it leaves some dense: "int4_g128 (30 of 210 layers)"."""
    found = (run.whole.value(run.setting(method, inputs), method, DENSE_LAYERS) for inputs in (False, True))
    left, layers = next((one for one in found if one), 0.0), run.whole.value(FILE, FILE, LAYERS)
    return method if not left or layers is None else f"{method} ({layers - left:.0f} of {layers:.0f} layers)"


def serving(run: RealRun) -> Table:
    """Speed of generating, beside the dense model's in turn, and its peak memory: that of the model in memory, and what
    generating took beyond."""
    lines = []
    for setting, method in run.measured():
        speed, memory, size, peak = (
            run.whole.value(setting, method, metric) for metric in ("tokens/s", OVER, "size", PEAK)
        )
        if speed is not None:
            held = run.whole.value(setting, method, IN_MEMORY) or size
            if peak is None and memory is not None and held is not None:
                peak = held + memory
            cells = [megabytes(one) for one in (size, memory, peak)]
            dense = number(run.whole.value(setting, method, DENSE), 1)
            name = named(run, method)
            lines.append(
                [name, setting, number(speed, 1), dense, IN_TURN.told(run.whole, (setting, method)), *cells]
            )
    columns = ["scheme", "setting", "tokens/s", "dense in turn (tokens/s)", "speedup"]
    columns += ["size (MB)", "memory over the weights (MB)", "peak memory (MB)"]
    caption = f"{run.model}: transformers' generate(), batch 1, not compiled{tokens_of(run.whole)}{threads_of(run.whole)}"
    return Table(caption, columns, lines, run.whole.rows)


def tokens_of(results: Results) -> str:
    """Of how many new tokens a call was whose speed a table has, in words that follow others; rows of before do not say it."""
    found = sorted({int(row.value) for row in results.rows if row.metric == TOKENS})
    told, timed = (sum(row.metric == one for row in results.rows) for one in (TOKENS, "tokens/s"))
    before = ["8 or 32 in lines of before"] if told < timed else []
    return f"; new tokens of a call: {', '.join([*map(str, found), *before])}" if found or before else ""


def drawing(run: RealRun) -> Drawing | None:
    """Loss against bytes: a panel for each text, weights and with inputs; None where the dense model alone was measured."""
    panels = run.panels(partial(points, run, CHANGE, BASE, error=CHANGE_ERROR))
    if not panels:
        return None
    labels = "size of the model (MB, decimal)", "increase of the loss (nats)"
    wide = scatter_panels(panels, *labels, symlog=LINEAR)
    narrow = scatter_panels(panels, *labels, symlog=LINEAR, columns=1, width=3.5)
    some = any(" layers)" in named(run, method) for method in run.lines)
    caption = (
        f"{run.model}: loss against bytes, rounding to the nearest, with 95% intervals; linear below {LINEAR}, logarithmic "
        f"above.{' (n/N): n of the N layers are quantized.' * some}"
    )
    return Drawing(f"ptq-real-{run.ending}", caption, wide, narrow)


def points(
    run: RealRun, metric: str, base: str, results: Results, inputs: bool, error: str = ""
) -> list[Point]:
    """Size and a metric of each scheme but the dense model's, of weights alone or with inputs; its interval by `error`."""
    found = []
    for method in run.lines:
        setting = run.setting(method, inputs)
        size, value = run.whole.value(setting, method, "size"), results.value(setting, method, metric)
        if method != base and size is not None and value is not None and math.isfinite(value):
            name = named(run, method)
            label = name.replace(" of ", "/").replace(" layers", "") if len(run.lines) < 16 else ""
            half = (results.half(setting, method, error) or 0.0) if error else 0.0
            found.append(Point(size / 1e6, value, family(method), label, name, half))
    return found


def real_findings(rows: Sequence[Row]) -> list[str]:
    """What int8, and the best scheme up to 4.6 bits, cost each model."""
    return findings_of(rows, finding)


#: What the line of the first page says, where it was measured: schemes, with their inputs or without.
TOLD = (("int8_rowwise", True), ("fp8_rowwise", True), ("int4_g32_asymmetric", False), ("nvfp4", False), ("mxfp4_rceil", False),
        ("nvfp4", True), ("mxfp4_rceil", True))  # fmt: skip


def short_finding(rows: Sequence[Row]) -> str:
    """What a few schemes cost the first model, for the first page."""
    runs = best_runs(rows)
    if not runs:
        return ""
    text, results = next(iter(runs[0].texts.items()))
    words = []
    for method, inputs in TOLD:
        change = results.value(runs[0].setting(method, inputs), method, PERPLEXITY)
        if change is not None and math.isfinite(change):
            told = relative(results, runs[0].setting(method, inputs), method) or f"{change:+.1f}%"
            words.append(f"{method}{' with inputs' * inputs} {told}")
    return (
        f"Change of the perplexity of {runs[0].model} on {text} ({runs[0].where.run}): {', '.join(words)}"
        if words
        else ""
    )


def real_card(rows: Sequence[Row]) -> list[Card]:
    """What 8 bits for weights and inputs cost the first model, beside the scheme of TOLD with 4 bits that costs least."""
    runs = best_runs(rows)
    if not runs:
        return []
    run, (text, results) = runs[0], next(iter(runs[0].texts.items()))
    (first, inputs), *others = TOLD
    setting = run.setting(first, inputs)
    row = results.row(setting, first, PERPLEXITY)
    if row is None or not math.isfinite(row.value):
        return []
    fours = [
        (change, method)
        for method, with_inputs in others
        if not with_inputs
        and (change := results.value(run.setting(method, False), method, PERPLEXITY)) is not None
    ]
    beside = "the same model in bfloat16"
    if fours:
        beside += "; the best of 4-bit weights alone: {1} {0:+.1f}%".format(*min(fours))
    where = f"{run.model} on {text} ({windows_of(results)})"
    what = f"change of the perplexity of {where} by INT8 weights and inputs, not calibrated"
    value = relative(results, setting, first) or f"{row.value:+.1f}%"
    return [Card(row, value, what, beside, rows=results.rows)]


def finding(run: RealRun) -> str:
    """The costs of one model on its first text."""
    text, results = next(iter(run.texts.items()))
    known = []
    for setting, method in run.measured():
        change, told = results.value(setting, method, CHANGE), relative(results, setting, method)
        if method != BASE and change is not None and told:
            noise = is_noise(change, results.half(setting, method, CHANGE_ERROR))
            inputs = " with inputs" if setting != WEIGHTS else ""
            known.append((change, f"{named(run, method)}{inputs} {f'({told})' if noise else told}"))
    if not known:
        return ""
    words = [told for _, told in sorted(known)[:12]]
    return (
        f"{run.model}, perplexity over the dense model's on {text} ({run.where.run}; ±: half of a 95% interval, in parentheses "
        f"where the change is within it): {', '.join(words)}."
    )
