"""The page of experiment `decode`: tokens a second, size and memory of a quantized model, beside what others published.

Targets: speedups over the fastest form of bfloat16 are held to the published ones, tokens a second to torchao's of the same
run, sizes to the published, quantization to a time and a peak of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from experiments.decode.configs import BASELINE, BFLOAT16, DEPENDENT, LIBRARY, OURS, WITH_SPEED_TARGET
from experiments.decode.real_page import real_findings, real_sections
from experiments.decode.run import KIND
from experiments.harness.revision import TORCHAO
from experiments.harness.rows import Row
from experiments.models.llama import LLAMA_3_1_8B
from experiments.report import targets
from experiments.report.content import PEER, Card, Comparison, Drawing, Headline, Section, Table
from experiments.report.phones import dots_twice
from experiments.report.results import (
    HARDWARE,
    METRICS,
    MODEL,
    Published,
    Results,
    Where,
    best_run,
    by_run,
    decoding,
    number,
    published,
)
from experiments.report.targets import RunTargets, Target, known, limits, rest, verdict_of

EXPERIMENT = "decode"
RATE, SIZE, OVER_BFLOAT16 = "tokens/s", "model size", "tokens/s over bfloat16"
QUANTIZING = ("quantize time", "quantize peak memory")
#: Columns of the two ratios of a line: over the bfloat16 that generated in turn with it, and over the fastest of the run.
BESIDE_IT, OVER_THE_FASTEST = "over bfloat16 beside it", "over the fastest bfloat16"
#: How targets are called, by their metrics.
NAMES = {
    OVER_BFLOAT16: "published speedup",
    RATE: "torchao's tokens/s",
    SIZE: "published size",
    "quantize time": "seconds to quantize",
    "quantize peak memory": "peak of quantization",
}
#: Forms of bfloat16, and metrics of other rows that hold a rate of the first.
FORMS, BFLOAT16_RATES = (BFLOAT16, LIBRARY, DEPENDENT), ("bfloat16 before", "bfloat16 after")


def published_speedup(method: str) -> float | None:
    """The published speed over that of bfloat16 in the same table."""
    base, rate = published(BFLOAT16).get(RATE), published(method).get(RATE)
    return None if base is None or rate is None else rate / base


def fastest_bfloat16(results: Results) -> tuple[str, float | None]:
    """The form of bfloat16 with the most tokens a second in a run, and how many; (bfloat16, None) where none was measured."""
    rates = {form: results.value(BASELINE, form, RATE) or 0.0 for form in FORMS}
    # The baseline was timed beside every configuration, by each process that measured some.
    rates[BFLOAT16] = max(
        [rates[BFLOAT16], *(row.value for row in results.rows if row.metric in BFLOAT16_RATES)]
    )
    best = max(rates, key=lambda form: rates[form])
    return best, rates[best] or None


def over_fastest(results: Results, setting: str, method: str) -> float | None:
    """A configuration's tokens a second over those of the fastest bfloat16."""
    rate, base = results.value(setting, method, RATE), fastest_bfloat16(results)[1]
    return None if rate is None or base is None else rate / base


def targets_of(results: Results, method: str) -> list[Target]:
    """The targets of one of our configurations."""
    ours = {metric: results.value(OURS, method, metric) for metric in (RATE, SIZE, *QUANTIZING)}
    ours[OVER_BFLOAT16] = over_fastest(results, OURS, method)
    bases = {
        OVER_BFLOAT16: published_speedup(method) if method in WITH_SPEED_TARGET else None,
        RATE: results.value(TORCHAO, method, RATE),
        SIZE: published(method).get(SIZE),
    }
    found = [
        one.target(NAMES[one.metric], ours[one.metric], bases.get(one.metric, 1.0) or 1.0)
        for one in limits(EXPERIMENT)
        if bases.get(one.metric, 1.0) is not None
    ]
    return [replace(target, day=results.day(OURS, method)) for target in found]


def missed(results: Results, method: str) -> list[str]:
    """The targets that a configuration misses, each with value and limit."""
    return [str(target) for target in targets.missed(targets_of(results, method))]


TITLE = "Generating with a quantized Llama-3.1-8B"
QUESTION = (
    "How many tokens a second does a quantized Llama-3.1-8B generate at batch 1, in a generation loop without "
    "overhead?"
)
ABOUT = (
    (
        "Llama-3.1-8B's shapes with random weights, batch 1: 200 new tokens after a prompt of 32, in this experiment's "
        "own generation loop (compiled layer by layer, one CUDA graph a step, its own attention kernel for single "
        "tokens)."
    ),
    (
        "bfloat16, torchao's configurations and ours take turns in one process. Speedups are over the fastest way to "
        "run bfloat16."
    ),
    (
        "Weights are random, so this page says nothing about accuracy. On a CPU a tiny proxy model runs the same code "
        "as a check."
    ),
)
#: Figures that the top of the page shows: the first that there is.
FEATURED = ("decode-speed-full",)

TEXT = (
    "Exact shapes of Llama-3.1-8B with random weights, batch 1, 200 new tokens after a prompt of 32, top k 200, temperature "
    "0.8. A step is compiled layer by layer (all layers share one compilation) and captured in a CUDA graph; its time includes "
    "sampling and leaves out the prompt. Tokens a second are the median over generations, with the lowest and the highest.",
    (
        "Each quantized model is made from the bfloat16 model beside it, and both generate in turn, bfloat16 first and "
        "last: the speedup 'over bfloat16 beside it' is the ratio of these medians. bfloat16 and torchao's configurations use "
        "the compiler options that torchao recommends (coordinate descent tuning, which turns matrix-vector products "
        "into tuned reductions); ours need no tuning and use the options that this library recommends: gate, up and "
        "SiLU are fused into one kernel (the compiler fuses gate and up of bfloat16 weights too), and kernels of the "
        "compiler may start while the previous kernel ends (programmatic dependent launch). torchao recommends no "
        "dependent launches, so its runs have none. 'Library products' is bfloat16 with cuBLAS matmuls, without tuning;"
        " 'dependent launches' is bfloat16 tuned again with them: tuning varies between runs, and targets are compared "
        "with the fastest of the three."
    ),
    (
        "Attention of the new token uses this experiment's own kernel, the same in all lines; the published runs used "
        "torch's. Less time outside of matmuls raises every ratio."
    ),
    "Sizes are those of the linear layers, in decimal GB, lm_head included and the embedding not. Peak memory is the most that "
    "was reserved (as published tables have it) and allocated from the end of quantization to the end of generation, without "
    "what the bfloat16 model beside it holds. The peak of quantization is over the bfloat16 model's own bytes.",
    (
        "Before timing starts, a model answers the prompt. 'Change of logits' is the norm of the difference of its "
        "logits from bfloat16's, over their norm; 'by compiling' is that between the compiled and the eager model. "
        "Weights are random, so changes of logits show that the matmuls are right, not how good a trained model would "
        "be: see the page of `ptq`."
    ),
)
STAND_IN = (
    (
        "**A proxy model** of two tiny layers, too small for its times to mean anything. It runs the same code as the "
        "real shapes on a GPU, with all checks, and is compared with no published value."
    ),
)
BESIDE = (
    f"Published values ({MODEL}, {HARDWARE}, PyTorch's TorchAO paper and the README of its release 0.12) were measured with "
    "trained weights on other hardware and by another script: tokens a second do not compare directly, ratios to bfloat16 of "
    "the same table do, and sizes are to agree where storage is the same: the published 4-bit size has zero points in "
    "bfloat16, as ours of the same name; those of the default schemes take a byte."
)
STATUS = "status: "


def findings(rows: Sequence[Row]) -> list[str]:
    """What the run with the real shapes found, in sentences, and how fast real models generate."""
    found, real = exact_run(rows), real_findings(rows)
    if found is None:
        return real
    where, results = found
    rate = fastest_bfloat16(results)[1]
    sentences = (
        [speedup_sentence(where, results, method, rate) for method in WITH_SPEED_TARGET] if rate else []
    )
    theirs = [
        f"{method} {number(results.value(TORCHAO, method, RATE), 0)}"
        for method in WITH_SPEED_TARGET
        if results.value(TORCHAO, method, RATE) is not None
    ]
    if theirs:
        sentences.append(f"torchao in the same run: {', '.join(theirs)} tokens/s.")
    ours = [method for setting, method in lines_of(results) if setting == OURS]
    late = [method for method in ours if missed(results, method)]
    asked = [target for method in ours for target in targets_of(results, method)]
    sentences.append(
        f"Targets are missed by {', '.join(method for method in late)}."
        if late
        else f"All {len(known(asked))} targets of our {len(ours)} configurations are met{rest(asked)}."
    )
    return [sentence for sentence in sentences if sentence]


def speedup_sentence(where: Where, results: Results, method: str, base: float) -> str:
    """Tokens a second of one configuration over bfloat16, and what was published; nothing where it was not measured."""
    rate, times = results.value(OURS, method, RATE), over_fastest(results, OURS, method)
    if rate is None or times is None:
        return ""
    theirs = published_speedup(method)
    beside = "" if theirs is None else f" (published: {theirs:.2f} times, on an {HARDWARE})"
    return (
        f"{method} generates {rate:.0f} tokens/s on an {where.device} where the fastest bfloat16 generates {base:.0f}: "
        f"{times:.2f} times as many{beside}."
    )


def headlines(rows: Sequence[Row]) -> list[Headline]:
    """Speeds over the fastest bfloat16 beside the published ones."""
    found = exact_run(rows)
    if found is None:
        return []
    results = found[1]
    speeds = {one: over_fastest(results, OURS, one) for one in WITH_SPEED_TARGET}
    shown = {one: speed for one, speed in speeds.items() if speed is not None}
    if not shown:
        return []
    words = ", ".join(f"{name} {speed:.2f}" for name, speed in shown.items())
    theirs = ", ".join(number(published_speedup(one), 2) for one in shown)
    text = (
        f"Llama-3.1-8B's shapes (random weights) at batch 1, tokens a second over those of the fastest bfloat16: {words} "
        f"(int4 in groups of 64); published for an {HARDWARE}: {theirs}"
    )
    return [Headline(text, [row for one in shown if (row := results.row(OURS, one, RATE)) is not None])]


def cards(rows: Sequence[Row]) -> list[Card]:
    """Tokens a second with int4 weights; for the figure speeds over bfloat16, ours, torchao's and published."""
    found, quoted = exact_run(rows), WITH_SPEED_TARGET[-1]
    row = found[1].row(OURS, quoted, RATE) if found else None
    if found is None or row is None:
        return []
    results = found[1]
    bars = {
        f"decoding, Llama-3.1-8B, {name}, batch 1": {
            "ao_lab": over_fastest(results, OURS, name),
            PEER: over_fastest(results, TORCHAO, name),
            f"published ({HARDWARE})": published_speedup(name),
        }
        for name in WITH_SPEED_TARGET
    }
    base, theirs = fastest_bfloat16(results)[1], results.value(TORCHAO, quoted, RATE)
    beside = f"the fastest bfloat16 {number(base, 0)} ({number(over_fastest(results, OURS, quoted), 2)}x)"
    beside += "" if theirs is None else f"; torchao {number(theirs, 0)}"
    what = f"tokens a second of Llama-3.1-8B's shapes with {quoted} weights, batch 1"
    target = verdict_of(targets_by_run(rows), row, f"{quoted}: {NAMES[RATE]}")
    return [Card(row, f"{row.value:.0f}", what, beside, bars, target, results.rows)]


def main_finding(rows: Sequence[Row]) -> str:
    """What torchao's configurations generate in the same run, beside ours."""
    found = exact_run(rows)
    rates = [
        (one, *(found[1].value(by, one, RATE) for by in (OURS, TORCHAO)))
        for one in WITH_SPEED_TARGET
        if found
    ]
    words = [f"{one} {mine:.0f} and {theirs:.0f}" for one, mine, theirs in rates if mine and theirs]
    return f"tokens a second of ours and of torchao's: {', '.join(words)}" if words else ""


def targets_by_run(rows: Sequence[Row]) -> list[RunTargets]:
    """Of our configurations in the run with the real shapes."""
    found = exact_run(rows)
    if found is None:
        return []
    where, results = found
    ours = [method for setting, method in lines_of(results) if setting == OURS]
    return [RunTargets(where, [named(one, target) for target in targets_of(results, one)]) for one in ours]


def named(method: str, target: Target) -> Target:
    """A target with its configuration in its name."""
    return replace(target, name=f"{method}: {target.name}")


def comparisons(rows: Sequence[Row]) -> list[Comparison]:
    """Every published value but perplexities, which `ptq` has, and ours where the run with the real shapes has it."""
    found = exact_run(rows)
    listed = [comparison(one, found) for one in decoding() if one.metric != PERPLEXITY]
    if found is not None:
        where, results = found
        listed += [
            speedups(method, where, results)
            for method in WITH_SPEED_TARGET
            if published_speedup(method) is not None
        ]
    return listed


#: Random weights have none.
PERPLEXITY = "wikitext_word_perplexity"


def exact_run(rows: Sequence[Row]) -> tuple[Where, Results] | None:
    """The run with the shapes of Llama-3.1-8B."""
    runs = {where: found for where, found in by_run(rows, KIND).items() if where.data == LLAMA_3_1_8B.name}
    return best_run(runs)


def comparison(one: Published, found: tuple[Where, Results] | None) -> Comparison:
    """A published value, beside ours where it is of the table that has the same model and setting."""
    metric = METRICS.get(one.metric, "")
    setting = BASELINE if one.method == BFLOAT16 else OURS
    measured = None
    if found and metric and (one.model, one.hardware) == (MODEL, HARDWARE):
        measured = found[1].value(setting, one.method, metric)
        if measured is not None and (one.method, metric) == (BFLOAT16, RATE):
            # What ratios to bfloat16 are over.
            measured = fastest_bfloat16(found[1])[1]
    return Comparison(
        one.model,
        one.method,
        metric or one.metric.replace("_", " "),
        "tokens/s" if one.unit == "tok/s" else one.unit,
        one.value,
        one.hardware,
        f"{one.paper}, {one.source}",
        measured,
        found[0].device if found and measured is not None else "",
    )


def speedups(method: str, where: Where, results: Results) -> Comparison:
    """The published speedup over bfloat16, which follows from two published rates, beside ours over the fastest bfloat16."""
    source = next(one for one in decoding() if one.method == method)
    return Comparison(
        MODEL,
        method,
        "tokens/s over bfloat16",
        "ratio",
        published_speedup(method) or 0.0,
        HARDWARE,
        f"{source.paper}, {source.source}",
        over_fastest(results, OURS, method),
        where.device,
    )


def sections(rows: Sequence[Row]) -> list[Section]:
    """One section per run: real models, then the shapes of Llama-3.1-8B and the stand-in."""
    return [*real_sections(rows), *(section(where, results) for where, results in by_run(rows, KIND).items())]


def section(where: Where, results: Results) -> Section:
    """Speed, memory and checks of one run."""
    exact = where.data == LLAMA_3_1_8B.name
    title = "Llama-3.1-8B, random weights" if exact else "A tiny proxy model"
    paragraphs = [*TEXT, *failures(results)] if exact else [*STAND_IN, *failures(results)]
    drawings = [plot(where, results)] if exact else []
    tables = [speed_table(results, exact), memory_table(results)]
    if exact:
        paragraphs = [*verdict(results), *paragraphs, BESIDE]
        tables.append(published_table())
    return Section(f"{title} ({where.run})", paragraphs, drawings, tables)


def lines_of(results: Results) -> list[tuple[str, str]]:
    """(setting, method) in the order of the page: the baselines, then ours and torchao's side by side."""
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
    """What was not measured, and why."""
    found = {one: state(results, *one) for one in lines_of(results)}
    failed = [f"{method} of {setting} ({word})" for (setting, method), word in found.items() if word != "ok"]
    return [f"**Not measured: {len(failed)}.** " + "; ".join(failed) + "."] if failed else []


def verdict(results: Results) -> list[str]:
    """Which of our configurations miss a target, and whether bfloat16 was at its best."""
    ours = [method for setting, method in lines_of(results) if setting == OURS]
    found = {method: missed(results, method) for method in ours}
    late = [f"{method} ({'; '.join(words)})" for method, words in found.items() if words]
    sentences = [f"**Missed targets: {len(late)} configurations.** " + ", ".join(late) + "."] if late else []
    best, rate = fastest_bfloat16(results)
    if rate is not None:
        sentences.append(
            f"**The fastest bfloat16 is '{best}', {rate:.1f} tokens/s**, of all its timings, those beside other configurations "
            f"included: all ratios measured here are over it, but those of the column '{BESIDE_IT}'."
        )
    if len({row.commit for row in results.rows}) > 1:
        sentences.append(
            f"**Not all at one commit**: '{BESIDE_IT}' is within the run of a line; '{OVER_THE_FASTEST}' compares every line "
            "with the fastest of all runs."
        )
    if unknown := [form for form in FORMS if results.value(BASELINE, form, RATE) is None]:
        sentences.append(f"**Not measured: {', '.join(unknown)}**, which may be faster.")
    return sentences


def speed_table(results: Results, exact: bool) -> Table:
    """A line per configuration: speed and its spread, beside the published."""
    columns = [
        "weights",
        "by",
        "tokens/s",
        "lowest",
        "highest",
        "ms per token",
        "20% (ms)",
        "80% (ms)",
        "GB/s",
    ]
    columns += [BESIDE_IT, "bfloat16 before", "after", OVER_THE_FASTEST]
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
    lines = []
    for setting, method in lines_of(results):
        line = cells(results, setting, method, metrics)
        line.append(number(over_fastest(results, setting, method), 2))
        if exact:
            line += [number(published(method).get("tokens/s"), 1), number(published_speedup(method), 2)]
        lines.append([method, setting, *line])
    return Table("Speed", columns, lines, results.rows)


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
    lines = []
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
        lines.append([method, setting, *size, *peak, *rest, state(results, setting, method)])
    return Table("Size, memory, and checks", columns, lines, results.rows)


def cells(results: Results, setting: str, method: str, metrics: Sequence[tuple[str, int]]) -> list[str]:
    """Values of a line, each with its digits."""
    return [number(results.value(setting, method, metric), digits) for metric, digits in metrics]


def beside(results: Results, setting: str, method: str, metric: str) -> float | None:
    """The published value that a row carries."""
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
    """Speedups over bfloat16, a line per configuration: ours and torchao's of the same run, and the published."""
    shown = [
        method for method in dict.fromkeys(method for _, method in lines_of(results)) if method not in FORMS
    ]
    series = {
        f"ours, {where.device}": [over_fastest(results, OURS, method) for method in shown],
        f"torchao, same run, {where.device}": [over_fastest(results, TORCHAO, method) for method in shown],
        f"published (torchao), {HARDWARE}": [published_speedup(method) for method in shown],
    }
    figures = dots_twice(shown, series, "tokens/s over bfloat16, batch 1, shapes of Llama-3.1-8B", base=1.0)
    caption = (
        "Tokens a second over those of bfloat16 of the same source. The published values are of another GPU: their ratios "
        "compare, their rates do not."
    )
    return Drawing(f"decode-speed-{where.ending}", caption, *figures)
