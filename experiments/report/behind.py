"""Where ao_lab is behind: each comparison with another library's code in which ours is slower, larger or less exact.

A comparison is a value of ours beside that of another library, torch's own functions among them, in one table of one run. Which
lines stand beside which is data here (`RULES`); which of them ours loses, rows say. A difference within BASELINE_TOLERANCE, or
within what the first method of the table took at its end over its beginning, is none. Speeds over an unquantized model are no
comparison with a library: tables of each experiment have them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ao_lab.measure.turns import REPEAT
from experiments.harness.registry import EXPERIMENTS
from experiments.harness.rows import Row
from experiments.report.content import QUICK, Table, device_name, readable
from experiments.report.launched import OTHER, kernel_state
from experiments.report.results import Results, Where, by_run
from experiments.report.targets import BASELINE_TOLERANCE

COLUMNS = ("experiment", "ours", "beside", "what", "of", "ours over theirs", "device", "measured")
#: A line of a table: its setting and its method.
Line = tuple[str, str]
#: What the name of a metric says of which the machine is a part.
TIMING = re.compile(r"time|speed|tokens/s|warm-up")
#: Metrics by whether less of them is better, and their names for readers.
TIME = {"time": "time"}
STEP = {
    "time": "time of a step",
    "peak memory": "peak memory",
    "kept for backward": "memory kept for backward",
}
ERRORS = {
    f"error of the {one}": f"error of the {one}" for one in ("output", "input gradient", "weight gradient")
}


@dataclass(frozen=True)
class Rule:
    """Which lines of a kind of table stand beside each other.

    peers: those of other libraries beside a line of ours, of which the best counts. less, more: metrics by name, where the
    smaller or the larger value is better, and what a page calls them. about: what the table is of, in words.
    """

    experiment: str
    kind: str
    peers: Callable[[Line], Iterable[Line]]
    less: Mapping[str, str]
    more: Mapping[str, str] = field(default_factory=dict)
    about: str = ""

    @property
    def metrics(self) -> Iterator[tuple[str, str, bool]]:
        """Each metric, what it is called, and whether less of it is better."""
        yield from ((metric, name, True) for metric, name in self.less.items())
        yield from ((metric, name, False) for metric, name in self.more.items())


def of_setting(ours: str, theirs: str) -> Callable[[Line], Iterable[Line]]:
    """The same method, where the setting says whose it is."""
    return lambda line: [(theirs, line[1])] if line[0] == ours else []


def of_names(pairs: Mapping[str, Sequence[str]]) -> Callable[[Line], Iterable[Line]]:
    """Methods by those of others beside them, of the same setting."""
    return lambda line: [(line[0], one) for one in pairs.get(line[1], ())]


def of_prefix(line: Line) -> Iterable[Line]:
    """ "torchao, rowwise" beside "ours, rowwise", compiled or not, and beside ours with fast sums."""
    setting, method = line
    if not method.startswith("ours, "):
        return []
    recipe = method.removeprefix("ours, ").removesuffix(", compiled").removesuffix(", fast sums")
    return [(setting, f"torchao, {recipe}{form}") for form in ("", ", compiled")]


LIBRARY_LAYERS = {
    "int4 g128, zero points": ["torchao int4wo"], "int8": ["torchao int8wo"], "int8 dynamic": ["torchao int8dq"],
    "fp8": ["torchao fp8wo"], "fp8 dynamic, rows": ["torchao fp8dq, rows"], "int4 g128": ["torchao int4wo"],
}  # fmt: skip
SDPA = ["SDPA, cuDNN", "SDPA, flash"]
DECODING = [*SDPA, "FlashAttention-3", "FlexAttention, compiled"]
CACHES = ("bfloat16", "fp8", "fp8_residual", "int8", "int4", "int4_tokens")
RULES = (
    Rule(
        "decode", "decode", of_setting("ours", "torchao"),
        {"peak memory": "peak memory", "model size": "size", "quantize time": "time to quantize",
         "compile time": "time to compile", "quantize peak memory": "memory to quantize", "logits, change": "change of logits"},
        {"tokens/s": "tokens a second"},
    ),
    Rule("linear", "torchao", of_names(LIBRARY_LAYERS), {**TIME, "host time": "time on the host"}),
    Rule("generate", "generate", of_names(LIBRARY_LAYERS), {"warm-up": "time of warm-up"}, {"speed over bfloat16": "speed"}),
    Rule("fp8_training", "linear", of_prefix, {**TIME, **ERRORS}, about="a layer, forward and backward"),
    Rule("fp8_training", "blocks", of_prefix, STEP),
    Rule("qat_overhead", "qat_overhead", of_prefix, STEP),
    Rule(
        "optimizers", "updates", of_names({f"ours, {bits}": [f"torchao, {bits}"] for bits in ("8 bits", "4 bits")}),
        {"rms difference": "rms difference from float32's updates", "largest update over float32's": "largest update"},
        about="gradients",
    ),
    Rule("optimizers", "speed", of_prefix, TIME, about="a step"),
    Rule("kv_cache", "speed", of_names(dict.fromkeys(CACHES, DECODING)), TIME, about="decode attention, sequences x tokens"),
    Rule(
        "prefill_attention", "speed", of_names(dict.fromkeys(("int8", "int8_block", "fp8"), SDPA)), {"time, graph": "time"},
        about="attention of a prompt",
    ),
    Rule("sparsity", "products", of_names({"2:4": ["2:4, cuSPARSELt searched", "2:4, torchao CUTLASS"]}), TIME, about="matmul"),
    Rule(
        "sparsity", "linear", of_names({"2:4, own kernels": ["2:4"], "2:4, own kernels, masks kept": ["2:4, masks kept"]}),
        {"time": "time", "peak memory": "peak memory"}, about="a layer, beside cuSPARSELt's",
    ),
    Rule(
        "loka", "epilogue speed",
        of_names({"ao_lab's matmul alone": ["torch's matmul alone"],
                  "block norm in the epilogue": ["torch's matmul, then block norm"],
                  "block norm and codes in the epilogue": ["torch's matmul, then block norm and codes"]}),
        TIME, about="FP8 matmul and norm",
    ),
    Rule(
        "loka", "norm speed",
        of_names({f"fp8, {one}_norm_quantize": ["fp8, norm and codes by torch.compile"] for one in ("layer", "rms")}), TIME,
    ),
    Rule(
        "loka", "table speed", of_names({f"{one}_rowwise": ["torch, bfloat16 table"] for one in ("int8", "fp8")}), TIME,
        about="embedding table",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """A value of ours beside another library's.

    about: what of, in words; ours, theirs: setting and method. worse: how many times theirs ours is, above 1 where ours is
    behind; noise: what a difference has to exceed, as such a ratio.
    """

    experiment: str
    where: Where
    about: str
    ours: Line
    theirs: Line
    metric: str
    values: tuple[float, float]
    worse: float
    noise: float
    day: str

    @property
    def behind(self) -> bool:
        """Whether ours is worse by more than the noise."""
        return self.worse > self.noise


def comparisons(rows: Mapping[str, Sequence[Row]]) -> list[Compared]:
    """All of them, in the order of `RULES`; kernels and loops on a CPU have rows that are comparisons themselves."""
    found = [one for rule in RULES for one in of_rule(rule, rows.get(rule.experiment, ()))]
    return [*found, *of_kernels(rows.get("kernels", ())), *of_loops(rows.get("speed", ()))]


def of_rule(rule: Rule, rows: Sequence[Row]) -> Iterator[Compared]:
    """Those of a rule, of the kernels that are chosen today; times of short runs are none."""
    mine = [row for row in rows if row.table.startswith(f"{rule.kind}/") and not old(row)]
    for where, results in by_run(mine, rule.kind).items():
        for line in results.lines:
            yield from of_line(rule, where, results, line)


def old(row: Row) -> bool:
    """Whether a row says that another kernel ran than is chosen today, as the page of its experiment tells."""
    tell = getattr(EXPERIMENTS[row.experiment].page_module(), "kernel_state", kernel_state)
    return bool(row.kernel) and tell(row) == OTHER


def of_line(rule: Rule, where: Where, results: Results, line: Line) -> Iterator[Compared]:
    """A line beside the best of its peers, by each metric."""
    peers = list(rule.peers(line))
    for metric, name, less in rule.metrics:
        ours = results.value(*line, metric)
        theirs = {peer: value for peer in peers if (value := results.value(*peer, metric)) is not None}
        timed = set(TIMING.findall(metric))
        if not theirs or ours is None or (timed and where.scale == QUICK):
            continue
        peer = (min if less else max)(theirs, key=lambda one: theirs[one])
        values = ours, theirs[peer]
        if min(values) > 0:
            worse = values[0] / values[1] if less else values[1] / values[0]
            noise = max(1 + BASELINE_TOLERANCE, drift(results, line[0]) if timed else 1.0)
            day = results.day(*line)
            yield Compared(rule.experiment, where, rule.about, line, peer, name, values, worse, noise, day)


def drift(results: Results, setting: str) -> float:
    """By how much a method's time changed between the beginning and the end of a setting's turns, as a ratio of at least 1."""
    found = [
        row.value for row in results.rows if row.setting == setting and row.metric == REPEAT and row.value > 0
    ]
    return max((math.exp(abs(math.log(one))) for one in found), default=1.0)


def of_kernels(rows: Sequence[Row]) -> Iterator[Compared]:
    """Kernels beside the fastest of torch, torch.compile and torchao on the same inputs, whose rows have the ratio of times."""
    gone = {(row.method, row.setting) for row in rows if old(row)}
    for where, results in by_run(rows, "baselines").items():
        for setting in results.settings if where.scale != QUICK else ():
            case, _, shape = setting.rpartition(", ")
            ratios = {one: results.value(setting, one, "ratio") for one in results.methods}
            known = {one: ratio for one, ratio in ratios.items() if ratio}
            if known and (case, shape) not in gone:
                peer = min(known, key=lambda one: known[one])
                yield of_ratio(
                    "kernels", where, (shape, case), (shape, peer), known[peer], results.day(setting, peer)
                )


def of_ratio(experiment: str, where: Where, ours: Line, theirs: Line, ratio: float, day: str) -> Compared:
    """A comparison whose row has the ratio itself, of their time over ours."""
    values = 1.0, ratio
    return Compared(
        experiment, where, "", ours, theirs, "time", values, 1 / ratio, 1 + BASELINE_TOLERANCE, day
    )


#: Settings of the CPU's table that name another library's code: the dense layer is torch's unquantized one.
LOOPS = ("XLA's own cast", "ml_dtypes astype", "torchao's eager to_mx")


def of_loops(rows: Sequence[Row]) -> Iterator[Compared]:
    """Loops of the CPU, likewise; short runs are all that there are."""
    for where, results in by_run(rows, "speed").items():
        for setting, method in results.lines:
            ratio = results.value(setting, method, "ratio")
            if setting in LOOPS and ratio:
                yield of_ratio(
                    "speed", where, ("", method), ("", setting), ratio, results.day(setting, method)
                )


def table_of(found: Sequence[Compared]) -> Table:
    """What is behind, the comparisons of a method by one metric in a line; what is furthest behind first in each experiment."""
    groups: dict[tuple[str, ...], list[Compared]] = {}
    for one in found:
        if one.behind:
            key = one.experiment, one.about, one.where.device, one.ours[1], one.theirs[1], one.metric
            groups.setdefault(key, []).append(one)
    order = list(dict.fromkeys(one.experiment for one in found))
    lines = sorted(groups.values(), key=lambda mine: (order.index(mine[0].experiment), -largest(mine)))
    return Table(caption(found), COLUMNS, [cells(mine) for mine in lines])


def largest(found: Iterable[Compared]) -> float:
    """By how many times the furthest is behind."""
    return max(one.worse for one in found)


def caption(found: Sequence[Compared]) -> str:
    """How many are behind, of how many."""
    behind = sum(one.behind for one in found)
    return f"Behind another library: {behind} of {len(found)} comparisons"


def cells(found: Sequence[Compared]) -> list[str]:
    """A line of the table."""
    first = found[0]
    peer = first.theirs[1] if first.theirs[0] != "torchao" else f"torchao {first.theirs[1]}"
    return [
        f"[{first.experiment}]({first.experiment}.md)",
        first.ours[1].removeprefix("ours, "),
        peer,
        first.metric,
        subjects(found),
        times(found),
        device_name(first.where.device),
        " to ".join(dict.fromkeys((min(one.day for one in found), max(one.day for one in found)))),
    ]


def subjects(found: Sequence[Compared]) -> str:
    """What comparisons are of, in words: the kind of table, the data where they have numbers, and their settings."""
    groups: dict[str, list[str]] = {}
    for one in found:
        data = readable(one.where.data) if re.search(r"\d", one.where.data) else ""
        setting = "" if one.ours[0] == "ours" else readable(one.ours[0])
        groups.setdefault(data, []).append(setting)
    told = [": ".join(filter(None, (data, ", ".join(filter(None, mine))))) for data, mine in groups.items()]
    return ": ".join(filter(None, (found[0].about, "; ".join(filter(None, told)))))


def times(found: Sequence[Compared]) -> str:
    """How many times theirs our values are, the least and the most."""
    ratios = sorted(one.values[0] / one.values[1] for one in found)
    return " to ".join(dict.fromkeys(f"{one:.3g}" for one in (ratios[0], ratios[-1])))


def counts(found: Sequence[Compared]) -> list[list[str]]:
    """A line for each experiment: its comparisons, and those in which ours is behind, level or ahead."""
    lines = []
    for name in dict.fromkeys(one.experiment for one in found):
        mine = [one for one in found if one.experiment == name]
        behind, ahead = sum(one.behind for one in mine), sum(one.worse < 1 / one.noise for one in mine)
        told = (len(mine), behind, len(mine) - behind - ahead, ahead)
        lines.append([f"[{name}]({name}.md)", *map(str, told)])
    return lines


def counted_table(found: Sequence[Compared]) -> Table:
    """`counts` as a table."""
    return Table(
        caption(found), ("experiment", "comparisons", "behind", "equal within noise", "ahead"), counts(found)
    )
