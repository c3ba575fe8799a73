"""The part of the page of `decode` on real models: sizes, a table of each batch, published rates of that very model."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.decode.configs import BASELINE, OURS
from experiments.decode.real import (
    DENSE_LIBRARY,
    DENSE_OWN,
    HIGHEST,
    LOWEST,
    OVER_LIBRARY,
    OVER_OWN,
)
from experiments.harness.revision import TORCHAO
from experiments.harness.rows import Row
from experiments.models.causal_lm import BASE, FILE
from experiments.report.content import Section, Table
from experiments.report.in_turn import InTurn
from experiments.report.real_runs import RealRun, findings_of, grid_of, real_runs, threads_of, title_of
from experiments.report.results import HARDWARE, MODEL, Results, failures, number, published

PUBLISHED = "published: "
BY_LIBRARY, OWN = "tokens/s, generate()", "tokens/s, own loop"
FIRST, FIRST_OWN = "time to first token, generate()", "time to first token, own loop"
IN_GENERATE, IN_OWN = (
    InTurn(rate, dense, name, name + LOWEST, name + HIGHEST)
    for rate, dense, name in ((BY_LIBRARY, DENSE_LIBRARY, OVER_LIBRARY), (OWN, DENSE_OWN, OVER_OWN))
)
#: In which order libraries stand.
ORDER = {BASELINE: 0, OURS: 1, TORCHAO: 2}
TEXT = (
    "The folder's own weights in bfloat16, and quantized: every linear layer but a head that is tied to the embedding. Prompts "
    "are beginnings of a text, decoding is greedy. generate() is transformers' own call, not compiled; the own loop is this "
    "experiment's: the same forward over a cache of fixed length, on a GPU captured in a CUDA graph, nothing compiled. Each "
    "is called once, then timed in turn with bfloat16's, whose rate in these rounds stands beside: medians; a speedup is the "
    "median of the rounds' ratios, noisy where they are far apart, or where bfloat16 was far slower than in other "
    "rounds. Rates of generate() include the prompt, those of the own loop leave it out.",
    (
        "Peak memory: the weights as they are in memory, and the most that tensors of generating took beside them. "
        "Same tokens: how many tokens generate() and this experiment's own loop have in common; "
        "they diverge where two tokens are about as likely, since matmuls of other sizes round differently."
    ),
)


def real_sections(rows: Sequence[Row]) -> list[Section]:
    """A section for each run."""
    return [section(run) for run in real_runs(rows)]


def section(run: RealRun) -> Section:
    """How one model generates."""
    batches = sorted(run.texts, key=lambda name: int(name.rpartition(" ")[2]))
    tables = [sizes(run), *(speeds(run, name, run.texts[name]) for name in batches)]
    title = title_of(run, ", its own weights")
    return Section(title, [grid_of(run), *TEXT, *failures(run.whole)], [], tables)


def lines_of(results: Results) -> list[tuple[str, str]]:
    """Settings and methods: the dense model, ours, torchao's."""
    found = dict.fromkeys((row.setting, row.method) for row in results.rows if row.setting != FILE)
    return sorted(found, key=lambda one: ORDER.get(one[0], len(ORDER)))


def label(setting: str, method: str) -> str:
    """A configuration with its library."""
    return method if setting == BASELINE else f"{setting}: {method}"


def sizes(run: RealRun) -> Table:
    """What each configuration takes and changes."""
    columns = [
        "configuration", "size (MB)", "bits per weight", "peak memory (MB)", "seconds to quantize", "change of logits",
    ]  # fmt: skip
    lines = []
    for one in lines_of(run.whole):
        size, peak = (run.whole.value(*one, metric) for metric in ("size", "peak memory"))
        if size is not None:
            lines.append(
                [
                    label(*one),
                    number(size / 1e6, 1),
                    number(run.whole.value(*one, "bits per weight"), 2),
                    number(peak, 1, 1e-6),
                    number(run.whole.value(*one, "time to quantize"), 2),
                    number(run.whole.value(*one, "logits, change"), 3),
                ]
            )
    return Table(f"{run.model}: size and memory", columns, lines, run.whole.rows)


def speeds(run: RealRun, batch: str, results: Results) -> Table:
    """Rates and times of one batch; at batch 1 beside those that were published of this model."""
    beside = batch == "batch 1" and run.fact(PUBLISHED) == MODEL
    turns = any(row.metric == DENSE_OWN for row in results.rows)
    dense, dense_loop = (["bfloat16 in turn" + of + " (tokens/s)"] * turns for of in ("", ", own loop"))
    columns = [
        "configuration", "generate() (tokens/s)", *dense, "speedup", "own loop (tokens/s)", *dense_loop,
        "speedup of the loop", "first token, generate() (ms)", "first token, own loop (ms)", "in a graph", "same tokens (%)",
    ]  # fmt: skip
    columns += [f"published, {HARDWARE} (tokens/s)"] if beside else []
    base, lines = results.value(BASELINE, BASE, OWN), []
    for one in lines_of(results):
        rate = results.value(*one, OWN)
        if rate is None:
            continue
        first, own = (results.value(*one, metric) for metric in (FIRST, FIRST_OWN))
        line = [
            label(*one),
            number(results.value(*one, BY_LIBRARY), 1),
            *([number(results.value(*one, DENSE_LIBRARY), 1)] * turns),
            IN_GENERATE.told(results, one),
            number(rate, 1),
            *([number(results.value(*one, DENSE_OWN), 1)] * turns),
            IN_OWN.told(results, one) or alone(rate, base, one),
            number(first, 1, 1e3),
            number(own, 1, 1e3),
            "yes" if results.value(*one, "own loop in a CUDA graph") else "no",
            number(results.value(*one, "same tokens"), 0),
        ]
        lines.append([*line, number(published(one[1]).get("tokens/s"), 1)] if beside else line)
    return Table(f"{run.model}, {batch}{threads_of(results)}", columns, lines, results.rows)


def alone(rate: float, base: float | None, line: tuple[str, str]) -> str:
    """The ratio of two rates that were not timed in turn; "" of the dense model itself."""
    return "" if line[0] == BASELINE or not base else f"{rate / base:.2f}x (not in turn)"


def real_findings(rows: Sequence[Row]) -> list[str]:
    """Rates of each model at its first batch, in the own loop."""
    return findings_of(rows, finding)


def finding(run: RealRun) -> str:
    """Rates of one model over the dense model's."""
    batch = min(run.texts, key=lambda name: int(name.rpartition(" ")[2]))
    results = run.texts[batch]
    base = results.value(BASELINE, BASE, OWN)
    if not base:
        return ""
    words = []
    for one in lines_of(results):
        rate = results.value(*one, OWN)
        if one[0] != BASELINE and rate:
            times = IN_OWN.told(results, one) or f"{rate / base:.2f}x"
            dense = results.value(*one, DENSE_OWN)
            over = f" over {dense:.1f} in turn" if dense else ""
            words.append(f"{label(*one)} {times} ({rate:.1f}{over} tokens/s)")
    if not words:
        return ""
    return (
        f"{run.model}, its own weights, {batch} in this experiment's own loop ({run.where.run}): bfloat16 "
        f"{base:.1f} tokens/s; speed over bfloat16: {', '.join(words)}."
    )
