"""The page of experiment `decode`: tokens a second, size and memory of a quantized model, beside what others published."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.decode.configs import BASELINE, BFLOAT16, OURS
from experiments.decode.run import KIND, TITLE
from experiments.decode.targets import FORMS, RATE, fastest_bfloat16, missed, over_fastest, published_speedup
from experiments.harness.libraries import TORCHAO
from experiments.harness.rows import Row
from experiments.models.llama_shapes import LLAMA_3_1_8B
from experiments.report.pages import STALE, Drawing, Section, Table
from experiments.report.plots import Point, scatter_panels
from experiments.report.published import HARDWARE, MODEL, decoding, published
from experiments.report.results import Results, Where, by_run, number

__all__ = ["TITLE", "sections"]

TEXT = (
    "Exact shapes of Llama-3.1-8B with random weights, batch 1, 200 new tokens after a prompt of 32, top k 200, temperature "
    "0.8. A step is compiled layer by layer (all layers share one compilation) and captured in a CUDA graph; its time includes "
    "sampling and leaves out the prompt. Tokens a second are the median over generations, with the lowest and the highest.",
    "Each quantized model is a copy of the bfloat16 model beside it, and both generate in turn, bfloat16 first and last: the "
    "speedup is the ratio of medians within one configuration. Bfloat16 and torchao's configurations run with what torchao "
    "recommends for the compiler (coordinate descent, which turns products of one row into tuned reductions); ours need no "
    "tuning, and run with what this library recommends: gate, up and the silu between them are one kernel (the compiler joins "
    "gate and up of plain weights, too), and what the compiler writes may begin while the kernel in front of it ends. torchao "
    "recommends no such dependent launches, and its rows have none. 'Library products' is bfloat16 without tuning, 'dependent "
    "launches' a second tuning, from nothing and with such launches: what tuning finds differs, and bars are held against the "
    "fastest form of bfloat16.",
    "Attention of the one token is a kernel of this experiment, the same in all rows; the published runs had torch's. Less "
    "time outside the products raises every ratio.",
    "Sizes are those of the linear layers, in decimal GB, lm_head included and the embedding not. Peak memory is the most that "
    "was reserved (as published tables have it) and allocated from the end of quantization to the end of generation, without "
    "what the bfloat16 model beside it holds. The peak of quantization is over the bfloat16 model's own bytes.",
    "Before its clock starts, a model answers the prompt. 'Change of logits' is the distance of its logits from those of "
    "bfloat16, over their size; 'by compiling' is that of a compiled step from the model that is not compiled. Weights are "
    "random, so changes of logits say that the products are right, and nothing of a trained model's quality: that is "
    "the page of `ptq`.",
)
STAND_IN = (
    "**A stand-in**: a model of two tiny layers, too small for its times to mean anything. It went the way that the real "
    "shapes go on a GPU, with all checks, so these rows say what works here. They stand beside no published number.",
)
BESIDE = (
    f"Published numbers ({MODEL}, {HARDWARE}, PyTorch's TorchAO paper and the README of its release 0.12) were measured with "
    "trained weights on other hardware and by another script: tokens a second do not compare directly, ratios to bfloat16 of "
    "the same table do, and sizes are to agree where storage is the same: the published 4-bit size has zero points in "
    "bfloat16, as ours of the same name; the house's own take a byte."
)
#: Families of colours by method.
FAMILIES = {"bfloat16": "plain", "int": "integer", "float8": "FP8", "mx": "MX", "nvfp4": "NVFP4"}
STATUS = "status: "


def sections(rows: Sequence[Row]) -> list[Section]:
    """One section per run."""
    return [section(where, results) for where, results in by_run(rows, KIND).items()]


def section(where: Where, results: Results) -> Section:
    """Speed, memory and checks of one run."""
    exact = where.data == LLAMA_3_1_8B.name
    title = "Llama-3.1-8B, random weights" if exact else "A tiny stand-in"
    paragraphs = [*TEXT, *failures(results)] if exact else [*STAND_IN, *failures(results)]
    drawings = [plot(where, results)] if exact else []
    tables = [speed_table(results, exact), memory_table(results)]
    if exact:
        paragraphs = [*verdict(results), *paragraphs, BESIDE]
        tables.append(published_table())
    return Section(f"{title} ({where})", paragraphs, drawings, tables)


def lines_of(results: Results) -> list[tuple[str, str]]:
    """(setting, method) in the order in which a page lists them: the baselines, then ours and the peer's side by side."""
    order = {BASELINE: 0, OURS: 1, TORCHAO: 2}
    found = dict.fromkeys((row.setting, row.method) for row in results.rows)
    methods = list(dict.fromkeys(method for setting, method in found if setting != BASELINE))
    return sorted(
        found,
        key=lambda one: (
            one[0] != BASELINE,
            methods.index(one[1]) if one[1] in methods else 0,
            order[one[0]],
        ),
    )


def state(results: Results, setting: str, method: str) -> str:
    """The status of a line: ok, or what went wrong."""
    for row in results.rows:
        if (row.setting, row.method) == (setting, method) and row.metric.startswith(STATUS):
            return row.metric.removeprefix(STATUS)
    return ""


def failures(results: Results) -> list[str]:
    """What gave no numbers, and why."""
    found = {one: state(results, *one) for one in lines_of(results)}
    old = results.stale_methods
    failed = [
        f"{method} of {setting} ({word}){f' {STALE}' if method in old else ''}"
        for (setting, method), word in found.items()
        if word != "ok"
    ]
    return [f"**Without numbers: {len(failed)}.** " + "; ".join(failed) + "."] if failed else []


def verdict(results: Results) -> list[str]:
    """Which of our configurations miss a bar, and whether bfloat16 was at its best."""
    ours = [method for setting, method in lines_of(results) if setting == OURS]
    found = {method: missed(results, method) for method in ours}
    late = [f"{method} ({'; '.join(words)})" for method, words in found.items() if words]
    made = [f"**Missed bars: {len(late)} configurations.** " + ", ".join(late) + "."] if late else []
    best, rate = fastest_bfloat16(results)
    if rate is not None:
        made.append(
            f"**The fastest bfloat16 is '{best}', {rate:.1f} tokens/s**, of all its timings, those beside other configurations "
            "included: published ratios are held against it."
        )
    if len({row.source_hash for row in results.rows}) > 1:
        made.append(
            "**Not all by one version of the code**: 'over bfloat16' is within the run of a line; 'over the fastest' holds "
            "every line against the fastest bfloat16 of all."
        )
    if unknown := [form for form in FORMS if results.value(BASELINE, form, RATE) is None]:
        made.append(f"**Not measured: {', '.join(unknown)}**, which may be faster.")
    return made


def speed_table(results: Results, exact: bool) -> Table:
    """A line per configuration: speed and its spread, beside the published."""
    columns = ["weights", "by", "tokens/s", "lowest", "highest", "ms per token", "20%", "80%", "GB/s"]
    columns += ["over bfloat16", "bfloat16 before", "after", "over the fastest"]
    columns += [f"published tokens/s ({HARDWARE})", "published over bfloat16"] if exact else []
    metrics = (
        ("tokens/s", 1),
        ("tokens/s, lowest", 1),
        ("tokens/s, highest", 1),
        ("time per token", 3),
        ("time per token, 20%", 3),
        ("time per token, 80%", 3),
        ("bandwidth", 0),
        ("speedup over bfloat16", 2),
        ("bfloat16 before", 1),
        ("bfloat16 after", 1),
    )
    made = []
    for setting, method in lines_of(results):
        line = cells(results, setting, method, metrics)
        line.append(number(over_fastest(results, setting, method), 2))
        if exact:
            line += [number(published(method).get("tokens/s"), 1), number(published_speedup(method), 2)]
        made.append([method, setting, *line])
    return Table("Speed", columns, made, results.stale_methods)


def memory_table(results: Results) -> Table:
    """A line per configuration: size, memory, quantization, checks."""
    columns = ["weights", "by", "size (GB)", "published", "peak (GB)", "published", "allocated (GB)"]
    columns += [
        "quantize (s)",
        "its peak over bfloat16",
        "compile (s)",
        "change of logits",
        "by compiling",
        "state",
    ]
    made = []
    for setting, method in lines_of(results):
        size, peak = (
            [
                number(results.value(setting, method, metric), 3),
                number(beside(results, setting, method, metric), 2),
            ]
            for metric in ("model size", "peak memory")
        )
        metrics = (
            ("peak memory, allocated", 2),
            ("quantize time", 2),
            ("quantize peak memory", 3),
            ("compile time", 1),
            ("logits, change", 4),
            ("logits, compiled", 4),
        )
        rest = cells(results, setting, method, metrics)
        made.append([method, setting, *size, *peak, *rest, state(results, setting, method)])
    return Table("Size, memory, and checks", columns, made, results.stale_methods)


def cells(results: Results, setting: str, method: str, metrics: Sequence[tuple[str, int]]) -> list[str]:
    """Numbers of a line, each with its digits."""
    return [number(results.value(setting, method, metric), digits) for metric, digits in metrics]


def beside(results: Results, setting: str, method: str, metric: str) -> float | None:
    """The published number that a row carries."""
    for row in results.rows:
        if (row.setting, row.method, row.metric) == (setting, method, metric):
            return row.published
    return None


def published_table() -> Table:
    """Published speeds of Llama 3 at batch 1, and their ratios, on whatever they were measured."""
    found = {
        (one.model, one.hardware, one.method): one.value for one in decoding() if one.metric == "throughput"
    }
    lines = []
    for (model, hardware, method), rate in found.items():
        base = found[model, hardware, BFLOAT16]
        values = published(method, model, hardware)
        sizes = [number(values.get(metric), 2) for metric in ("model size", "peak memory")]
        lines.append([method, model, hardware, number(rate, 2), number(rate / base, 2), *sizes])
    columns = ["weights", "model", "on", "tokens/s", "over bfloat16", "size (GB)", "peak (GB)"]
    return Table("Published, for comparison", columns, lines)


def plot(where: Where, results: Results) -> Drawing:
    """Tokens a second against size: ours, torchao's of the same run, and the published."""
    panels = {
        "ours": points(results, OURS),
        "torchao, same run": points(results, TORCHAO),
        f"published, {HARDWARE}": published_points(),
    }
    figure = scatter_panels(panels, "linear weights (GB, decimal)", "tokens/s", columns=3)
    caption = "Speed against size. The published panel is another GPU: compare its slope, not its height."
    return Drawing(f"decode-speed-{where.scale}", caption, figure)


def points(results: Results, setting: str) -> list[Point]:
    """A point per configuration of one maker, and bfloat16."""
    made = []
    for who, method in lines_of(results):
        if who == setting or (who, method) == (BASELINE, BFLOAT16):
            size, rate = (results.value(who, method, metric) for metric in ("model size", "tokens/s"))
            if size is not None and rate is not None:
                made.append(Point(size, rate, family(method), method))
    return made


def published_points() -> list[Point]:
    """The published points of the table that is beside ours."""
    methods = dict.fromkeys(
        one.method for one in decoding() if (one.model, one.hardware) == (MODEL, HARDWARE)
    )
    values = {method: published(method) for method in methods}
    return [Point(v["model size"], v["tokens/s"], family(m), m) for m, v in values.items()]


def family(method: str) -> str:
    """The family of a configuration, for colours."""
    return next(name for start, name in FAMILIES.items() if method.startswith(start))
