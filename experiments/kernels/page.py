"""The page of experiment `kernels`: fractions of the copy rate, tables by shape, baselines, missed targets, calls from JAX."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from statistics import median

from experiments.harness.rows import Row
from experiments.kernels import layers
from experiments.kernels.baselines import BASELINES
from experiments.kernels.figures import NARROW, by_operation, operation, roofline
from experiments.kernels.layers import joined as joined
from experiments.kernels.operations import LARGE, SMALL
from experiments.kernels.results import BaselineResult, CaseResult, results_of, slower_words, summary
from experiments.kernels.results import kernel_state as kernel_state
from experiments.kernels.results import targets_by_run as targets_by_run
from experiments.kernels.run import CAST, KIND, MOST, PROGRAM, TORCH, WAYS
from experiments.report.content import Drawing, Headline, Section, Table
from experiments.report.results import Results, Where, by_run, number
from experiments.report.targets import BASELINE_TOLERANCE, counted, missed

TITLE = "Speed of the kernels on a GPU"
QUESTION = "How much of the GPU's memory bandwidth does each kernel use?"
ABOUT = (
    "Each kernel of `fast` on a GPU, as a fraction of the rate at which the same GPU copies as many bytes as the kernel must "
    "read, timed in turn with it. A result is compared with the reference bit for bit before it is timed.",
    "Baselines (torch, torch.compile, torchao) run in turn on the same inputs.",
)
#: Figures that the top of the page shows: the first that there is.
FEATURED = ("kernels-operations",)
#: Parts of targets in words.
PARTS = {KIND: "calls from JAX"}
#: The fraction of the copy rate that counts as high.
HIGH = 0.9

TEXT = (
    (
        "Memory-bandwidth utilisation is a kernel's rate on the bytes that have to move (every input read once and "
        "every output written once; inputs twice where a scale of the whole tensor has to come first) over the rate of "
        "a device-to-device copy of as many bytes as it reads, timed in turn with it in the same run. Before a kernel "
        "is timed, its result is compared with the reference bit for bit at both ends of the tensor, and a matmul with "
        "the exact one within the bound of its sums; a wrong result gets no time."
    ),
    "Times are medians by CUDA graph replay, over inputs that rotate so that the L2 holds none of them; launched one by one "
    "stands beside them. Repeat is how far a second timing of the same kernel in the same rounds lies from the first. Targets "
    "are stated for the cases that have one, and what misses one says so.",
)
BASELINE_TEXT = (
    "A ratio is the baseline's time over ours, timed in turn on the same inputs: above 1 ours is faster, and below "
    f"{1 - BASELINE_TOLERANCE:g}, which no repeat explains, slower. Cases with targets come first, and a run has so much time "
    "for baselines: what it did not reach is of an earlier run, between both as they were then. "
    + "; ".join(f"{baseline.name}: {baseline.what}" for baseline in BASELINES)
    + "."
)
CAPTION = (
    "Memory-bandwidth utilisation per kernel, with its target and its fastest baseline, and the rates reached under the "
    "ceiling of copies of the same run. Red: below its target of utilisation, the upright tick."
)
OPERATIONS = (
    "Memory-bandwidth utilisation (rate over that of a copy) of every kernel on large tensors, by operation. Upright ticks: "
    "targets of it; red: below its own. Targets of other quantities, such as speed over unfused kernels, are in the tables."
)


def findings(rows: Sequence[Row]) -> list[str]:
    """Targets, fractions of the copy rate by operation, products of stored weights, missed targets."""
    reached = counted(targets_by_run(rows))
    sentences = [f"{reached[:1].upper()}{reached[1:]}."] if reached else []
    for where, lines in results_of(rows).items():
        sentences.append(f"{where.device}: {summary(lines)}")
        sentences.append(fraction_sentence(lines))
        sentences += layers.sentences(lines)
        sentences += missed_sentences(rows, where, lines)
    return [sentence for sentence in sentences if sentence]


def missed_sentences(rows: Sequence[Row], where: Where, lines: Sequence[CaseResult]) -> list[str]:
    """How many targets each part of a run misses and which kernels do; what was not measured."""
    words, absent = missed_words(lines), absent_words(lines)
    parts = {run.about: len(missed(run.targets)) for run in targets_by_run(rows) if run.where == where}
    counted_parts = ", ".join(
        f"{count} of {PARTS.get(about, about)}" for about, count in parts.items() if count
    )
    named = f": {', '.join(words)}" if words else ""
    sentences = [f"Targets missed, {counted_parts}{named}." if counted_parts else ""]
    return [*sentences, f"Not measured: {', '.join(absent)}." if absent else ""]


def headlines(rows: Sequence[Row]) -> list[Headline]:
    """The median of all fractions of the copy rate on large tensors, and how many are high."""
    runs = [lines for where, lines in results_of(rows).items() if where.device != "cpu"]
    values = all_fractions(runs[-1]) if runs else []
    if not values:
        return []
    text = (
        f"Kernels on tensors of {' and '.join(LARGE)} reach {median(values):.2f} of the memory bandwidth of a copy (median of "
        f"{len(values)}), {sum(value >= HIGH for value in values)} of them at {HIGH:g} or above"
    )
    return [Headline(text, [row for row in rows_of(runs[-1]) if row.metric == "fraction"])]


def main_finding(rows: Sequence[Row]) -> str:
    """The fractions of the copy rate on large tensors, and how many cases are slower than a baseline."""
    runs = list(results_of(rows).values())
    if not runs:
        return ""
    values, words = all_fractions(runs[-1]), []
    if values:
        high = sum(value >= HIGH for value in values)
        words.append(
            f"on tensors of {' and '.join(LARGE)} {median(values):.2f} of a copy's (median of {len(values)}; "
            f"{min(values):.2f} to {max(values):.2f}), {high} at {HIGH:g} or above"
        )
    return "; ".join([*words, slower_words(runs[-1])])


def all_fractions(lines: Sequence[CaseResult]) -> list[float]:
    """Fractions of the copy rate on large tensors."""
    return [value for found in fractions(lines).values() for value in found]


def fractions(lines: Sequence[CaseResult]) -> dict[str, list[float]]:
    """Fractions of the copy rate on large tensors, by operation."""
    found: dict[str, list[float]] = {}
    for line in lines:
        if line.shape in LARGE and "fraction" in line.values:
            found.setdefault(operation(line), []).append(line.values["fraction"])
    return found


def fraction_sentence(lines: Sequence[CaseResult]) -> str:
    """The median fraction of the copy rate of each operation on large tensors, with the lowest and the highest."""
    found = fractions(lines)
    words = [f"{name} {median(v):.2f} ({min(v):.2f} to {max(v):.2f})" for name, v in found.items()]
    return f"Memory-bandwidth utilisation, median and range: {', '.join(words)}." if words else ""


def sections(rows: Sequence[Row]) -> list[Section]:
    """Sections of each run: against the floors, against the baselines, calls from JAX."""
    found = []
    runs = results_of(rows)
    for where, lines in runs.items():
        ending = "" if len(runs) == 1 else f"-{slug(where)}"
        drawings = [
            Drawing(
                f"kernels-operations{ending}", OPERATIONS, by_operation(lines), by_operation(lines, NARROW)
            ),
            Drawing(f"kernels-roofline{ending}", CAPTION, roofline(lines)),
        ]
        paragraphs = [summary(lines), *missed_paragraphs(lines), *TEXT]
        products = [line for line in lines if line.case.startswith("linear.")]
        large = [line for line in lines if line.shape != SMALL and line not in products]
        small = [line for line in lines if line.shape == SMALL]
        tables = [floor_table(large), *([small_table(small)] if small else [])]
        tables += [product_table(products)] if products else []
        found.append(Section(f"Memory-bandwidth utilisation ({where})", paragraphs, drawings, tables))
        if any(line.baselines for line in lines):
            found.append(
                Section(f"Against baselines ({where})", [BASELINE_TEXT], [], [baseline_table(lines)])
            )
    return [*found, *jax_sections(rows)]


def slug(where: Where) -> str:
    """A run as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", f"{where.device} {where.scale}".lower()).strip("-")


def missed_paragraphs(lines: Sequence[CaseResult]) -> list[str]:
    """What misses a target, and what is slower than a baseline."""
    missed = missed_words(lines)
    slower = [
        f"{line.case} at {line.shape} ({faster_baselines(line)})" for line in lines if line.faster_baselines
    ]
    absent, count = absent_words(lines), sum(len(line.missed) for line in lines)
    paragraphs = [f"**Missed targets: {count}.** " + ", ".join(missed) + "."] if missed else []
    paragraphs += [f"**Not measured: {len(absent)}.** " + ", ".join(absent) + "."] if absent else []
    return paragraphs + (
        [f"**Slower than a baseline: {len(slower)}.** " + ", ".join(slower) + "."] if slower else []
    )


def floor_table(lines: Sequence[CaseResult]) -> Table:
    """A line per case and shape."""
    columns = [
        "kernel",
        "shape",
        "time (us)",
        "20% (us)",
        "80% (us)",
        "eager (us)",
        "repeat",
        "moved (MB)",
        "TB/s",
        "copy TB/s",
    ]
    columns += ["bandwidth utilisation", "eager", "over unfused", "target met"]
    metrics = (("time", 1), ("time, 20%", 1), ("time, 80%", 1), ("time, eager", 1), ("repeat", 3))
    table_lines = []
    for line in lines:
        moved = line.values.get("bytes moved")
        table_lines.append(
            [
                line.case,
                line.shape,
                *(number(line.values.get(metric), digits) for metric, digits in metrics),
                number(moved, 0, 1e-6),
                *(number(line.values.get(metric), 2) for metric in ("rate", "copy rate")),
                *(number(line.values.get(metric), 3) for metric in ("fraction", "fraction, eager")),
                number(line.values.get("speedup over unfused"), 2),
                line.verdict,
            ]
        )
    return Table("Time, and memory-bandwidth utilisation", columns, table_lines, rows_of(lines))


def small_table(lines: Sequence[CaseResult]) -> Table:
    """Small tensors: launches, not bytes."""
    columns = [
        "kernel",
        "shape",
        "time, graph (us)",
        "over an elementwise kernel",
        "time, eager (us)",
        "host (us)",
    ]
    metrics = (("time", 2), ("time over elementwise", 2), ("time, eager", 1), ("host time", 1))
    table_lines = [
        [
            line.case,
            line.shape,
            *(number(line.values.get(name), digits) for name, digits in metrics),
            line.verdict,
        ]
        for line in lines
    ]
    return Table("Small tensors", [*columns, "target met"], table_lines, rows_of(lines))


def product_table(lines: Sequence[CaseResult]) -> Table:
    """Inputs times a weight in the plain layout: reading the weight is the floor."""
    columns = [
        "kernel",
        "weight",
        "time (us)",
        "eager (us)",
        "host (us)",
        "host time it adds (us)",
        "moved (MB)",
        "TB/s",
        "bandwidth utilisation",
    ]
    columns += ["times as fast as dense bfloat16", "as dequantizing first"]
    table_lines = []
    for line in lines:
        values = line.values
        moved, dense = values.get("bytes moved"), values.get("time over dense")
        table_lines.append(
            [
                line.case,
                line.shape,
                *(
                    number(values.get(metric), 1)
                    for metric in ("time", "time, eager", "host time", "host time, added")
                ),
                number(moved, 0, 1e-6),
                *(number(values.get(metric), 2) for metric in ("rate", "fraction")),
                number(None if dense is None else 1 / dense, 2),
                number(values.get("speedup over unfused"), 2),
                line.verdict,
            ]
        )
    return Table(
        "Matmuls with quantized weights in the plain layout",
        [*columns, "target met"],
        table_lines,
        rows_of(lines),
    )


def baseline_table(lines: Sequence[CaseResult]) -> Table:
    """A line per case and shape, a column per baseline: the ratio, or why there is none."""
    names = [baseline.name for baseline in BASELINES]
    table_lines = []
    for line in lines:
        if line.baselines:
            found = {one.baseline: compared(line, one) for one in line.baselines}
            best = line.best_baseline
            verdict = "" if best is None else f"SLOWER than {best.baseline}" if line.slower_than else "yes"
            cells = [found.get(name, "") for name in names]
            table_lines.append([line.case, line.shape, *cells, best.baseline if best else "", verdict])
    columns = ["kernel", "shape", *names, "fastest baseline", "as fast as every baseline"]
    rows = [row for line in lines for one in line.baselines for row in one.rows]
    return Table("Time of the baseline over ours", columns, table_lines, rows)


def compared(line: CaseResult, one: BaselineResult) -> str:
    """A baseline's cell: the ratio, or why there is none."""
    return one.status if one.ratio is None else number(one.ratio, 2)


def missed_words(lines: Sequence[CaseResult]) -> list[str]:
    """What misses a target, with the values."""
    return [f"{line.case} at {line.shape} ({'; '.join(line.missed)})" for line in lines if line.missed]


def absent_words(lines: Sequence[CaseResult]) -> list[str]:
    """What was not measured, with the reason."""
    return [
        f"{line.case} at {line.shape} ({line.reason})" for line in lines if not line.ok and not line.wrong
    ]


def faster_baselines(line: CaseResult) -> str:
    """The baselines that are faster, with their ratios."""
    return ", ".join(f"{one.baseline} {compared(line, one)}" for one in line.faster_baselines)


def rows_of(lines: Sequence[CaseResult]) -> list[Row]:
    """The rows behind some lines."""
    return [row for line in lines for row in line.rows]


# The part of the page on calls from JAX, from rows of the table ``jax``.

JAX_TEXT = (
    "Quantizing a bfloat16 tensor from torch and from JAX, by the same kernel, in one process: microseconds a call, of many "
    f"that are queued, which is the larger of what the host and the GPU take. `program` is one compiled function of {PROGRAM} "
    "quantizations, an eighth of its time; XLA's cast, the same under jit, says what JAX takes for one operation of its own."
)


def jax_sections(rows: Iterable[Row]) -> list[Section]:
    """A section per run, none where no JAX was measured."""
    return [
        Section(f"Calls from JAX ({where})", [JAX_TEXT, *slow_ways(found)], [], [jax_table(found)])
        for where, found in by_run(rows, KIND).items()
    ]


def slow_ways(found: Results) -> list[str]:
    """Which ways to call take longer than the target allows."""
    over = [
        f"{name} of {size} ({way} {ratio:.2f})"
        for size in found.settings
        for name in found.with_setting(size).methods
        for way in WAYS
        if (ratio := found.value(size, name, f"{way} over {TORCH}")) is not None and ratio > MOST
    ]
    return (
        [f"**More than {MOST:g} times torch's time: {len(over)}.** " + ", ".join(over) + "."] if over else []
    )


def jax_table(found: Results) -> Table:
    """A line per scheme and size."""
    columns = [
        "scheme",
        "x",
        *(f"{name} (us)" for name in (TORCH, *WAYS, CAST)),
        *(f"{way} over {TORCH}" for way in WAYS),
        "state",
    ]
    lines = []
    for size in found.settings:
        for name in found.with_setting(size).methods:
            times = (number(found.value(size, name, one), 1) for one in (TORCH, *WAYS, CAST))
            ratios = (number(found.value(size, name, f"{way} over {TORCH}"), 2) for way in WAYS)
            lines.append([name, size, *times, *ratios, state(found, size, name)])
    return Table("Calls from JAX beside torch's", columns, lines, found.rows)


def state(found: Results, size: str, name: str) -> str:
    """What the status row says, nothing where all went well."""
    rows = [row.metric for row in found.rows if (row.setting, row.method) == (size, name)]
    said = next((metric for metric in rows if metric.startswith("status: ")), "status: unknown")
    return said.removeprefix("status: ").removeprefix("ok")
