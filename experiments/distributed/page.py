"""The page of experiment `distributed`: cases of several ranks by what they equal, failures, and times beside bfloat16."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from experiments.distributed.cases import (
    BOUND,
    COMPARED,
    DIFFERENT,
    FAILURES,
    IDENTITY,
    LARGEST,
    NEEDS_GPUS,
    RANKS,
    REFUSED,
    SECONDS,
    SPEED,
)
from experiments.harness.rows import Row
from experiments.report.content import Headline, Section, Table, member
from experiments.report.results import Results, Where, by_run, number
from experiments.report.targets import RunTargets, Target, limit_of, limits

EXPERIMENT = "distributed"
TITLE = "Several GPUs"
QUESTION = "Do several ranks compute what one process computes, what do they send, and what holds when one of them fails?"
ABOUT = (
    "Every case is a function that all ranks run: training by FSDP2, tensor parallelism of quantized layers, experts, 2:4, "
    "checkpoints, models of transformers, caches, optimizers, calibration. It compares what they compute with what one process "
    "computes, bit for bit where nothing else is said. Ranks of a CPU send by gloo and compute in float32, ranks of GPUs "
    "send by NCCL and compute in bfloat16.",
)
FEATURED = ()
IDENTITY_TEXT = (
    "Where a product is a sum over slices, one process multiplies the slices one after another and adds them in the order of "
    "ranks. A difference of 0 under a bound of 0 means equal bits.",
)
FAILURE_TEXT = (
    "A rank is killed in the backward pass or while it saves, or never comes; the others have to end with an error, earlier "
    "checkpoints to stay whole, and the same command to end with the weights of a run to which nothing happened.",
)
SPEED_TEXT = (
    "Peers take turns, all ranks beginning together; a time is the first rank's, the median of rounds. FSDP2's steps are "
    "forward, backward, AdamW and scales; decoding is one token a line through four layers, from CUDA graphs, a time is of one "
    "layer; an exchange quantizes rows, sends them and dequantizes.",
    "At best: the speed over bfloat16 gathered that a step of codes would have if it left out the time of the bytes that it "
    "saves on NVLink (450 GB/s a direction), none of which had been hidden behind compute, and casts cost nothing.",
)
COLUMNS = [
    "case",
    "ranks",
    "expected",
    "values",
    "different",
    "largest difference",
    "bound",
    "passed",
    "s",
    "day",
    "commit",
]
TIMES = {
    "time": ("ms", 3), "time, 20%": ("20% (ms)", 3), "time, 80%": ("80% (ms)", 3), "speed over bfloat16": ("over bfloat16", 2),
    "speed over bfloat16 all-gather": ("over bfloat16 gathered", 2), "all-gather": ("gathered (MB)", 1),
    "reduce-scatter": ("reduced (MB)", 1), "sent by a rank": ("sent (MB)", 1), "weights of a rank": ("weights (MB)", 1),
}  # fmt: skip


#: Bytes a second that NVLink of an H200 carries in one direction, half of the 900 GB/s that its datasheet adds up.
NVLINK = 450e9
#: The title of what codes could gain at best, and words of methods' names that differ between codes and values gathered.
AT_BEST, CODES, VALUES = "at best", "float8 all-gather", "bfloat16 all-gather"
#: Names of groups of cases, metrics of their rows, and the method without codes.
STEP, DECODING, EXCHANGE = "FSDP2 step", "decoding", "embedding all-to-all"
OVER, GATHER, GATHERED, PLAIN = (
    "speed over bfloat16",
    "speed over bfloat16 all-gather",
    "all-gather",
    "bfloat16",
)


def status_of(results: Results, setting: str, name: str) -> str:
    """How a case ended, in words."""
    for row in results.rows:
        if (row.setting, row.method) == (setting, name) and row.metric.startswith("status: "):
            return row.metric.removeprefix("status: ")
    return ""


def cases_of(results: Results) -> list[tuple[str, str]]:
    """(expected, name) of each case, in the order in which they were run."""
    return list(dict.fromkeys((r.setting, r.method) for r in results.rows if r.metric.startswith("status: ")))


def of_outcome(results: Results, refused: bool) -> Results:
    """The cases that are to end with an error that names the way out, or all others."""
    return Results([row for row in results.rows if row.setting.endswith(REFUSED) == refused])


def counted(results: Results) -> tuple[int, int]:
    """Cases that passed, and cases that ran."""
    said = [status_of(results, *case) for case in cases_of(results)]
    ran = [word for word in said if not word.startswith("not run")]
    return sum(word == "ok" for word in ran), len(ran)


def how_many(results: Results) -> str:
    """Cases that passed of those that ran; how many did not run, and the names of those that failed."""
    passed, ran = counted(results)
    said = {name: status_of(results, expected, name) for expected, name in cases_of(results)}
    late = sum(word.startswith("not run") and not word.startswith(NEEDS_GPUS) for word in said.values())
    lost = [name for name, word in said.items() if word != "ok" and not word.startswith("not run")]
    words = f"{passed} of {ran}" + (f", {late} more not measured" if late else "")
    return words + (f"; failed: {'; '.join(lost)}" if lost else "")


def findings(rows: Sequence[Row]) -> list[str]:
    """How many cases passed on each device, which did not, and the best steps."""
    words = []
    for kind, name in (
        (IDENTITY, COUNTED[0]),
        (FAILURES, COUNTED[1]),
    ):
        for where, results in by_run(rows, kind).items():
            computed = of_outcome(results, refused=False)
            words.append(f"{name} ({where}): {how_many(computed if kind == IDENTITY else results)}.")
            if kind == IDENTITY and (refused := of_outcome(results, refused=True)).rows:
                words.append(f"Cases that are to end with {REFUSED} and do ({where}): {how_many(refused)}.")
    for where, results in gpu_speeds(rows).items():
        if missed(results):
            words.append(f"Cases that were timed ({where}): {how_many(results)}.")
        words += [f"{text} ({where})." for text in speed_texts(results)]
    return words


def gpu_speeds(rows: Sequence[Row]) -> dict[Where, Results]:
    """Times that mean something."""
    return {where: results for where, results in by_run(rows, SPEED).items() if where.device != "cpu"}


def speed_texts(results: Results) -> list[str]:
    """What gathering codes, decoding over ranks and exchanging rows gain and lose."""
    words = []
    for name, what in ((DECODING, "times bfloat16's speed a layer"), (EXCHANGE, "times bfloat16's speed")):
        for setting in results.settings:
            if setting.startswith(name):
                found = {
                    method: results.value(setting, method, OVER)
                    for method in results.with_setting(setting).methods
                }
                said = [
                    f"{member(method)} {number(value, 2)}"
                    for method, value in found.items()
                    if value is not None and method != "bfloat16"
                ]
                words.append(f"{setting[0].upper()}{setting[1:]}: {', '.join(said)} {what}")
    best = best_gather(results)
    if best is not None:
        text = (
            "FSDP2 steps with weights gathered quantized over the same recipe with bfloat16 gathered, at best"
        )
        words.append(f"{text}: {number(best.value, 2)} times ({best.method}; {best.setting})")
    return words


def best_gather(results: Results) -> Row | None:
    """Where gathering codes gains most, or loses least."""
    return max((row for row in results.rows if row.metric == GATHER), key=lambda row: row.value, default=None)


def targets_by_run(rows: Sequence[Row]) -> list[RunTargets]:
    """Speed, and bytes of gathering codes, on GPUs."""
    return [
        RunTargets(where, found, "several GPUs")
        for where, results in gpu_speeds(rows).items()
        if (found := targets(results))
    ]


def speed_targets(results: Results) -> Iterator[Target]:
    """Speed over bfloat16 of decoding and of exchanges, as far as they have been measured."""
    for limit in limits(EXPERIMENT):
        if limit.metric == OVER:
            setting, method = limit.parts
            value = results.value(setting, method, OVER)
            if value is not None:
                day = results.day(setting, method)
                yield limit.target(f"{setting}: {method}", value, value_format=".2f", day=day)


def targets(results: Results) -> list[Target]:
    """Decoding and exchanges; the largest gain of gathering codes, and bytes at its setting."""
    made = [*speed_targets(results)]
    best = best_gather(results)
    if best is None:
        return made
    sent = [results.value(best.setting, method, GATHERED) for method in (best.method, PLAIN)]
    made.append(
        limit_of(EXPERIMENT, STEP, GATHER).target(
            f"{best.method}: {GATHER}", best.value, value_format=".2f", day=best.date[:10]
        )
    )
    if sent[1] is not None:
        limit = limit_of(EXPERIMENT, STEP, GATHERED)
        shown = {"unit": "MB", "value_format": ".0f", "limit_format": ".0f", "day": best.date[:10]}
        made.append(limit.target(f"{best.method}: {GATHERED}", sent[0], sent[1], **shown))
    return made


def main_finding(rows: Sequence[Row]) -> str:
    """How many cases equal one process, how many failures were held, and what gathered weights send and gain."""
    words = [f"{one.rstrip('.')}" for one in findings(rows) if one.startswith(COUNTED)]
    return ". ".join(
        [*words, *(text for results in gpu_speeds(rows).values() for text in sent_texts(results))]
    )


#: How the sentences begin that count cases.
COUNTED = (
    "Cases in which all ranks compute what one process computes",
    "Failures after which the others ended with an error and nothing was lost",
)


def sent_texts(results: Results) -> list[str]:
    """The bytes of weights that are gathered quantized over those in bfloat16, and the speed, where it gains most."""
    best = best_gather(results)
    codes, plain = (
        results.value(best.setting, one, GATHERED) if best else None
        for one in (best.method if best else "", PLAIN)
    )
    if best is None or not codes or not plain:
        return []
    return [
        f"Weights gathered in 8 bits send {codes / plain:.2f} of bfloat16's bytes, at best {best.value:.2f} times as fast as "
        "with bfloat16 gathered"
    ]


def headlines(rows: Sequence[Row]) -> list[Headline]:
    """None: the first page has ten."""
    return []


def sections(rows: Sequence[Row]) -> list[Section]:
    """Identity, failures, speeds; run by run."""
    made = []
    for kind, title, text in (
        (IDENTITY, "What several ranks compute", IDENTITY_TEXT),
        (FAILURES, "What holds when a rank fails", FAILURE_TEXT),
    ):
        for where, results in by_run(rows, kind).items():
            made.append(Section(f"{title} ({where})", text, [], [case_table(kind, results)]))
    for where, results in gpu_speeds(rows).items():
        made.append(Section(f"Times ({where})", SPEED_TEXT, [], speed_tables(results)))
    return made


def case_table(kind: str, results: Results) -> Table:
    """A line a case."""
    lines = [case_line(results, expected, name) for expected, name in cases_of(results)]
    return Table("Cases" if kind == IDENTITY else "Failures", COLUMNS, lines, results.rows)


def case_line(results: Results, expected: str, name: str) -> list[str]:
    """Its cells; why it did not pass or was not run stands in place of yes."""
    values = [
        results.value(expected, name, metric)
        for metric in (RANKS, COMPARED, DIFFERENT, LARGEST, BOUND, SECONDS)
    ]
    ranks, compared, different, largest, bound, seconds = values
    said = status_of(results, expected, name)
    passed = "yes" if said == "ok" else "needs GPUs" if said.startswith(NEEDS_GPUS) else said
    whole = ["" if value is None else f"{value:,.0f}" for value in (compared, different)]
    exact = ["" if value is None else f"{value:.3g}" for value in (largest, bound)]
    return [
        name, "" if ranks is None else f"{ranks:.0f}", expected, *whole, *exact, passed,
        "" if seconds is None else number(seconds, 1), results.day(expected, name), commit_of(results, expected, name),
    ]  # fmt: skip


def commit_of(results: Results, setting: str, name: str) -> str:
    """The commit of a case."""
    return next((row.commit for row in results.rows if (row.setting, row.method) == (setting, name)), "")


def missed(results: Results) -> list[tuple[str, str]]:
    """Cases that did not end as they should."""
    return [case for case in cases_of(results) if status_of(results, *case) != "ok"]


def missed_table(results: Results) -> Table:
    """Cases without times, and why."""
    lines = [
        [
            name,
            status_of(results, expected, name),
            results.day(expected, name),
            commit_of(results, expected, name),
        ]
        for expected, name in missed(results)
    ]
    return Table("Not timed", ["case", "why", "day", "commit"], lines, results.rows)


def speed_tables(results: Results) -> list[Table]:
    """A table a group of cases; one of those that failed."""
    ran = [name for expected, name in cases_of(results) if status_of(results, expected, name) == "ok"]
    groups = list(dict.fromkeys(name.partition(",")[0] for name in ran))
    tables = []
    for one in groups:
        of_group = [name for name in ran if name.partition(",")[0] == one]
        lines = [(name, method) for name in of_group for method in results.with_setting(name).methods]
        used = {metric: title for metric, title in TIMES.items()
                if any(results.value(*line, metric) is not None for line in lines)}  # fmt: skip
        cells = [
            [f"{name.partition(', ')[2]}: {method}", *speed_cells(results, name, method, used)]
            for name, method in lines
        ]
        titles = ["peer", *(title for title, _ in used.values())]
        if one == STEP:
            titles.append(AT_BEST)
            for cell, line in zip(cells, lines, strict=True):
                best = at_best(results, *line)
                cell.append("" if best is None else number(best, 2))
        tables.append(Table(one, titles, cells, results.rows))
    return [*tables, missed_table(results)] if missed(results) else tables


def at_best(results: Results, setting: str, method: str) -> float | None:
    """The speed of a step over the same recipe with bfloat16 gathered if all that codes do is to leave out the time in which
    NVLink carries the bytes that they save, none of it hidden; None for other peers."""
    other = method.replace(CODES, VALUES)
    taken = results.value(setting, other, "time")
    sent = [results.value(setting, one, GATHERED) for one in (method, other)]
    if other == method or taken is None or sent[0] is None or sent[1] is None:
        return None
    saved = 1e3 * (sent[1] - sent[0]) * 1e6 / NVLINK
    return taken / (taken - saved)


def speed_cells(results: Results, name: str, method: str, used: dict[str, tuple[str, int]]) -> list[str]:
    """Values of a peer."""
    found = [(results.value(name, method, metric), digits) for metric, (_, digits) in used.items()]
    return ["" if value is None else number(value, digits) for value, digits in found]
