"""The page of experiment `linear`: heat maps of speed over bfloat16, targets, a table for every number of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from experiments.harness.rows import Row
from experiments.linear.current import current, outdated
from experiments.linear.current import kernel_state as kernel_state
from experiments.linear.run import ERROR, FLOOR, HOST, SPEED, TIME
from experiments.linear.tables import (
    BASE,
    COMPILED_ROWS,
    EXPERIMENT,
    EXPERT_ROWS,
    EXPERTS,
    PARTS,
    PEERS,
    ROWS,
    SHAPES,
    TORCHAO,
    data_of,
    setting_of,
)
from experiments.report.content import (
    PEER,
    Card,
    Drawing,
    Headline,
    Section,
    Table,
    devices_of,
    headlines_of,
    member,
    readable,
)
from experiments.report.launched import FORMER
from experiments.report.ratio_maps import Ratios, narrow_ratio_map, ratio_map
from experiments.report.results import Results, Where, best_run, by_run, failures, number
from experiments.report.targets import Limit, RunTargets, Target, counts, limits, missed, verdict_of

TITLE = "Quantized linear layers by number of tokens"
QUESTION = "How fast is one quantized linear layer beside bfloat16 and torchao, at 1 to 8192 tokens (batch x sequence)?"
ABOUT = (
    (
        "One `nn.Linear` in bfloat16 quantized by `ao_lab.quantize_`, at 1 to 8192 tokens, with the kernels that are "
        "chosen without tuning, beside bfloat16 and torchao; and mixture-of-experts layers, whose tokens are sorted by "
        "expert."
    ),
    (
        "Before timing, outputs are compared with the float32 matmul of the dequantized weight. Times need a GPU; on a "
        "CPU errors of small shapes are measured, and which kernels are chosen."
    ),
)
FEATURED = ("linear-weights-14336x4096-full", "linear-weights-14336x4096-full-nvidia-h100-80gb-hbm3")
#: Those of `Int4WeightOnlyConfig()`: groups of 128 with zero points.
DEFAULT = "int4 g128, zero points"
#: Layers of the first page, by part, and the numbers of tokens.
QUOTED = {
    DEFAULT: ("weights", "int4 with zero points"),
    "int8": ("weights", "int8"),
    "fp8 dynamic, rows": ("activations", "fp8 with inputs"),
}
QUOTED_ROWS = (1, 16, 128, 1024)
NOTHING = "Nothing has been timed yet: times need a GPU."


def findings(rows: Sequence[Row]) -> list[str]:
    """Targets and slow rows of every GPU; errors at quick scale."""
    rows, words, timed = current(rows), [], False
    for part in PARTS:
        for where, results in ordered_runs(rows, part).items():
            said = targets_words(part, where, results) if where.device != "cpu" else []
            timed, words = timed or where.device != "cpu", [*words, *said]
        words += slow_words(part, rows)
    return [*words, *([] if timed else [NOTHING]), *outputs_words(rows)]


def headlines(rows: Sequence[Row]) -> list[Headline]:
    """Times of one row and of 16 by the weight that has targets, on the last device."""
    runs = {where: one for where, one in by_run(current(rows), "weights").items() if where.data == SHAPE}
    run = best_run({where: one for where, one in runs.items() if where.device != "cpu"})
    if run is None:
        return []
    text = (
        "A layer of 14336 x 4096 with int4 g128 weights (groups of 128, symmetric) takes {one:.1f} us for one token, "
        "{speed:.2f} times as fast as bfloat16, and {few:.1f} us for 16, {few_speed:.2f} times; with zero points "
        "(`Int4WeightOnlyConfig()`) {zero:.2f} and {few_zero:.2f} times; with int8 weights {int8:.1f} us for one"
    )
    places = {
        "one": (1, "int4 g128", TIME), "speed": (1, "int4 g128", SPEED), "few": (16, "int4 g128", TIME),
        "few_speed": (16, "int4 g128", SPEED), "zero": (1, "int4 g128, zero points", SPEED),
        "few_zero": (16, "int4 g128, zero points", SPEED), "int8": (1, "int8", TIME),
    }  # fmt: skip
    found = {name: run[1].row(setting_of(count), *place) for name, (count, *place) in places.items()}
    return headlines_of(text, **found)


def cards(rows: Sequence[Row]) -> list[Card]:
    """The speed of one token by the default int4 configuration; for the figure int4 and int8 beside torchao's."""
    runs = {where: one for where, one in by_run(current(rows), "weights").items() if where.data == SHAPE}
    run = best_run({where: one for where, one in runs.items() if where.device != "cpu"})
    row = run[1].row(setting_of(1), DEFAULT, SPEED) if run else None
    if run is None or row is None:
        return []
    peers = next(
        (one for where, one in by_run(current(rows), TORCHAO).items() if where == run[0]), Results([])
    )
    bars = {
        f"linear layer {readable(SHAPE)}, {words}, 1 token": {
            "ao_lab": run[1].value(setting_of(1), name, SPEED),
            PEER: next((peers.value(setting_of(1), peer, SPEED) for peer in peer_of(name)), None),
        }
        for name, words in {DEFAULT: "int4", "int8": "int8"}.items()
    }
    time = number(run[1].value(setting_of(1), DEFAULT, TIME), 1)
    what = f"speed of a linear layer ({readable(SHAPE)}) with `Int4WeightOnlyConfig()`, one token"
    held = [RunTargets(run[0], targets_of("weights", *run), "weights", "times bfloat16")]
    target = verdict_of(held, row, f"{DEFAULT}, 1 token")
    return [Card(row, f"{row.value:.2f}x", what, f"bfloat16; {time} us a call", bars, target, run[1].rows)]


def main_finding(rows: Sequence[Row]) -> str:
    """Speeds of layers of the shape that has targets beside bfloat16 and torchao, on the last device, of today's kernels."""
    found = {part: last_of(current(rows), part) for part in ("weights", "activations", TORCHAO)}
    words = []
    for name, (part, called) in QUOTED.items():
        speeds = [(count, found[part].value(setting_of(count), name, SPEED)) for count in QUOTED_ROWS]
        said = [f"{speed:.2f} at {count}" for count, speed in speeds if speed is not None]
        words += [f"{called} {', '.join(said)}"] if said else []
    devices = ", ".join(devices_of(found["weights"].rows))
    text = f"over bfloat16, {readable(SHAPE)} ({devices}): {'; '.join(words)} tokens" if words else ""
    ratios = {name: best_over_torchao(found[TORCHAO], name) for name in (DEFAULT, "int8")}
    beside = [f"{QUOTED[name][1]} {ratio:.2f}" for name, ratio in ratios.items() if ratio]
    return text + (f". Over torchao's layer, 1 token: {', '.join(beside)}" if beside else "")


def last_of(rows: Sequence[Row], part: str) -> Results:
    """A part's rows of the shape that has targets, on the last GPU; none where there is no such run."""
    runs = {where: one for where, one in by_run(rows, part).items() if where.data == SHAPE}
    run = best_run({where: one for where, one in runs.items() if where.device != "cpu"})
    return run[1] if run else Results([])


def best_over_torchao(results: Results, method: str) -> float | None:
    """Speed over torchao's of the same weights at one token; None where either is missing."""
    return over_torchao(results, setting_of(1), method) if peer_of(method) else None


def targets_words(part: str, where: Where, results: Results) -> list[str]:
    """How many targets are met and which are not."""
    held = [one for one in targets_of(part, where, results) if one.reached is not None]
    if not held:
        return []
    lost = missed(held)
    rest = f"; {len(lost)} missed: {grouped(lost)}" if lost else ""
    return [f"{TITLES[part]} ({where}): {counts(held, ' targets are met')}{rest}."]


def slow_words(part: str, rows: Sequence[Row]) -> list[str]:
    """Of each GPU the fewest tokens at which a method is slower than bfloat16, at any shape, by that number."""
    firsts: dict[str, dict[str, int]] = {}
    for where, results in ordered_runs(rows, part).items():
        if where.device != "cpu":
            mine = firsts.setdefault(where.device, {})
            for method, at in slow_rows(results):
                mine[method] = min(mine.get(method, at[0]), at[0])
    words = []
    for device, found in firsts.items():
        groups = [
            ", ".join(member(name) for name, first in found.items() if first == tokens)
            + f" from {tokens} token{'s' * (tokens > 1)} on"
            for tokens in sorted(set(found.values()))
        ]
        if groups:
            words.append(
                f"{TITLES[part]} ({device}), slower than bfloat16 at some shape: {'; '.join(groups)}."
            )
    return words


def grouped(targets: Sequence[Target]) -> str:
    """Names of targets, rows of a method together."""
    found: dict[str, list[str]] = {}
    for one in targets:
        method, _, rows = one.name.rpartition(", ")
        found.setdefault(method, []).append(rows.partition(" ")[0])
    return "; ".join(f"{method} at {', '.join(rows)}" for method, rows in found.items()) + " tokens"


def outputs_words(rows: Sequence[Row]) -> list[str]:
    """The largest error of the small shapes."""
    found = [row for row in rows if row.metric == ERROR and row.device == "cpu"]
    if not found:
        return []
    worst = max(found, key=lambda row: row.value)
    layers = len({row.line for row in found})
    return [
        f"{layers} layers on a CPU: outputs differ from the matmul of the dequantized weight by at most "
        f"{worst.value:.1e} of their size ({worst.method})."
    ]


def sections(rows: Sequence[Row]) -> list[Section]:
    """Of all parts and runs; of a part those of the GPU and the shape whose times are targets first."""
    return [
        (outputs_section if is_untimed(where) else times_section)(part, where, results)
        for part in PARTS
        for where, results in ordered_runs(rows, part).items()
    ]


def ordered_runs(rows: Sequence[Row], part: str) -> dict[Where, Results]:
    """Of a part, those of the GPU and the shape whose times are targets first, outputs alone last."""

    def place(where: Where) -> tuple[bool, ...]:
        return is_untimed(where), DEVICE not in where.device, not where.data.endswith(SHAPE)

    found = by_run(rows, part)
    return {where: found[where] for where in sorted(found, key=place)}


def is_untimed(where: Where) -> bool:
    """Whether a run has outputs alone."""
    return where.scale == "quick" or where.device == "cpu"


SHAPE = data_of(SHAPES[0])
#: The device whose times are targets, and how keys of experts' targets begin.
DEVICE, OF_EXPERTS = "H200", "experts: "
#: Of torchao's, compiled, our speed over it is a target for these rows.
OVER_TORCHAO, TORCHAO_ROWS = "speed over torchao", tuple(rows for rows in COMPILED_ROWS if rows <= 64)


def rows_of(limit: Limit) -> tuple[int, ...]:
    """The numbers of rows that a limit is of, ends included, which are measured."""
    first, last = map(int, limit.parts[1].split("-"))
    measured = TORCHAO_ROWS if limit.metric == OVER_TORCHAO else ROWS
    return tuple(rows for rows in measured if first <= rows <= last)


def targets_of(part: str, where: Where, results: Results) -> list[Target]:
    """The targets of a part at a shape; none of other shapes and of stand-ins."""
    if not where.data.endswith(SHAPE) or where.scale != "full" or where.device == "cpu":
        return []
    methods = set(results.methods)
    return [
        target(one, results, method, rows)
        for one in limits(EXPERIMENT)
        for method in [one.parts[0].removeprefix(OF_EXPERTS)]
        if (part == EXPERTS) == one.key.startswith(OF_EXPERTS) and method in methods
        if (one.metric == OVER_TORCHAO) == (part == TORCHAO)
        and (one.metric != TIME or DEVICE in where.device)
        for rows in rows_of(one)
    ]


def targets_by_run(rows: Sequence[Row]) -> list[RunTargets]:
    """Of all parts on all GPUs."""
    return [
        RunTargets(where, targets_of(part, where, results), part, "times bfloat16")
        for part in PARTS
        for where, results in by_run(current(rows), part).items()
    ]


def target(limit: Limit, results: Results, method: str, rows: int) -> Target:
    """One of them."""
    setting, is_time = setting_of(rows), limit.metric == TIME
    value = (
        over_torchao(results, setting, method)
        if limit.metric == OVER_TORCHAO
        else results.value(setting, method, limit.metric)
    )
    unit = "us" if is_time else "" if limit.metric == SPEED else "times torchao"
    name = f"{method}, {rows} token{'s' * (rows > 1)}"
    digits, day = ".1f" if is_time else ".2f", results.day(setting, method)
    return limit.target(name, value, unit=unit, value_format=digits, day=day)


def peer_of(method: str) -> list[str]:
    """torchao's of the same weights and inputs; none where it has none."""
    return [peer.name for peer, ours in PEERS.items() if ours == method]


def over_torchao(results: Results, setting: str, method: str) -> float | None:
    """torchao's time over ours of the same table; None where one is missing."""
    ours, theirs = (results.value(setting, name, TIME) for name in (method, peer_of(method)[0]))
    return None if ours is None or theirs is None else theirs / ours


def slow_rows(results: Results) -> Iterator[tuple[str, list[int]]]:
    """Of each method that is slower than bfloat16 somewhere, the numbers of rows where."""
    for method in dict.fromkeys(row.method for row in results.rows if row.method != BASE.name):
        speeds = {
            rows: results.value(setting_of(rows), method, SPEED) for rows in sorted({*ROWS, *EXPERT_ROWS})
        }
        slow = [rows for rows, speed in speeds.items() if speed is not None and speed < 1]
        if slow:
            yield method, slow


TITLES = {
    "weights": "Quantized weights",
    "activations": "Quantized weights and inputs",
    EXPERTS: "Quantized experts",
    TORCHAO: "Beside torchao",
}
TEXT = (
    (
        "Microseconds of a call, replayed as CUDA graphs over layers and inputs that together exceed the L2 cache; "
        "quantizing the inputs is included. Methods of a table take turns. From 1024 tokens on each is timed after "
        "calls of its own, when the GPU's clock has settled."
    ),
    (
        "The roofline bound is the time to move weight, inputs and outputs once at the memory bandwidth, or to do the "
        "operations at the rate of an 8192-cubed matmul of such elements, whichever is more; both rates were measured "
        "in the same process. Host: time the host spends on a call in eager mode. Kernel: `dequantize` is a dense "
        "matmul after dequantizing the weight."
    ),
    (
        "The error of the kernel alone is the norm of the difference from the float32 matmul of the same quantized values, "
        "over its norm: 1.7e-03 is the rounding of outputs to bfloat16. What quantization itself loses is not in it: the "
        "pages on formats and on post-training quantization have that."
    ),
)
GROUPED = (
    "Tokens are sorted by expert, two experts a token drawn at random; bfloat16 is `torch._grouped_mm`. The "
    "roofline bound reads only the experts that have tokens."
)
COMPARED = "torchao's layers are compiled for each number of tokens, except int4wo, which has its own kernel."
NOTES = {TORCHAO: [COMPARED], EXPERTS: [GROUPED]}
#: Of a metric: the column, digits.
COLUMNS = {
    TIME: ("us", 1),
    f"{TIME}, 20%": ("20% (us)", 1),
    f"{TIME}, 80%": ("80% (us)", 1),
    SPEED: ("speed over bfloat16", 2),
    FLOOR: ("share of the roofline bound", 2),
    HOST: ("host (us)", 1),
}


def times_section(part: str, where: Where, results: Results) -> Section:
    """One part at one shape on one GPU."""
    text = [*TEXT, *NOTES.get(part, []), *failures(results), *outdated_words(results)]
    rows = [count for count in sorted({*ROWS, *EXPERT_ROWS}) if setting_of(count) in results.settings]
    methods = list(dict.fromkeys(row.method for row in results.rows if row.metric == SPEED))
    if not methods:
        return Section(f"{TITLES[part]} ({where})", failures(results))
    fresh = Results(current(results.rows))
    drawing = speed_map(part, where, fresh, methods, rows)
    tables = [rows_table(results, count) for count in rows]
    targets = target_table(targets_of(part, where, fresh), fresh.rows)
    return Section(f"{TITLES[part]} ({where})", text, [drawing], [*targets, *tables])


def outdated_words(results: Results) -> list[str]:
    """How many lines were measured with another kernel than is chosen today, where any was."""
    lines = {
        row.line: outdated(row) for row in results.rows if row.metric == SPEED and row.method != BASE.name
    }
    old = sum(map(bool, lines.values()))
    if not old:
        return []
    return [
        f"**{old} of {len(lines)} lines were measured with another kernel than is chosen today.** The column of kernels names "
        "both; these lines are in no figure, finding or target."
    ]


def speed_map(part: str, where: Where, results: Results, methods: list[str], rows: list[int]) -> Drawing:
    """Speed over bfloat16, methods by rows; its own is 1. results: without lines of other kernels than today's."""
    methods = [name for name in methods if name != BASE.name]
    values = [[results.value(setting_of(count), name, SPEED) for count in rows] for name in methods]
    grid = Ratios(methods, [str(count) for count in rows], values, "speed over bfloat16", "tokens")
    caption = (
        f"{TITLES[part]}, {readable(where.data)}, {where.device}: speed over bfloat16 by number of tokens; empty: not measured "
        "with the kernel that is chosen today."
    )
    if all(value is not None for line in values for value in line):
        caption = f"{caption.partition(';')[0]}."
    name = f"linear-{part}-{where.data}-{where.ending}"
    return Drawing(name, caption, ratio_map(grid), narrow_ratio_map(grid))


def rows_table(results: Results, rows: int) -> Table:
    """All methods at one number of rows."""
    setting, lines = setting_of(rows), []
    for method in methods_of(results):
        if results.value(setting, method, TIME) is not None:
            values = [
                number(results.value(setting, method, name), digits) for name, (_, digits) in COLUMNS.items()
            ]
            error = results.value(setting, method, ERROR)
            cell = "" if error is None else f"{error:.1e}"
            lines.append([method, *values, kernel(results, setting, method), cell])
    names = ["layer", *(name for name, _ in COLUMNS.values()), "kernel", KERNEL_ERROR]
    caption = f"{rows} token{'s' * (rows > 1)}"
    return Table(caption, names, lines, results.with_setting(setting).rows)


def target_table(targets: list[Target], rows: Sequence[Row]) -> list[Table]:
    """Targets with values; none where there are none."""
    lines = [[one.name, limit_of(one), one.measured, one.verdict] for one in targets]
    return [Table("Targets", ["layer", "target", "measured", "reached"], lines, rows)] if lines else []


def limit_of(one: Target) -> str:
    """A target as a cell."""
    sign, unit = "at least" if one.at_least else "at most", one.unit or "times bfloat16"
    return f"{sign} {one.texts[1]} {unit}"


#: The column of errors: what multiplies, not what quantization loses.
KERNEL_ERROR = "error of the kernel alone"
OUTPUTS_TEXT = (
    "The relative error is the norm of the difference from the float32 matmul of the dequantized weight (and of the"
    " quantized inputs), over its norm. Rounding outputs to bfloat16 alone is 1.7e-3; kernel `dequantize` rounds "
    "weights to bfloat16 first."
)


def outputs_section(part: str, where: Where, results: Results) -> Section:
    """One shape."""
    methods = methods_of(results)
    tables = [outputs_table(results, methods)] if methods else []
    text = [OUTPUTS_TEXT] if methods else []
    return Section(f"Outputs: {part} ({where})", [*text, *failures(results)], (), tables)


def methods_of(results: Results) -> list[str]:
    """Those with an error, in the order of measurement."""
    return list(dict.fromkeys(row.method for row in results.rows if row.metric == ERROR))


def kernel(results: Results, setting: str, method: str) -> str:
    """What computed a method, by the names that functions have today; both where another kernel is chosen for it today."""
    row = next(iter(results.with_setting(setting).of_method(method).rows), None)
    if row is None:
        return ""
    kind, colon, functions = row.kernel.partition(": ")
    names = (FORMER.get(name, name) for name in functions.split(" + "))
    return outdated(row) or f"{kind}{colon}{' + '.join(names)}"


def outputs_table(results: Results, methods: list[str]) -> Table:
    """Errors and kernels."""
    settings, lines = results.settings, []
    for method in methods:
        cells = [method]
        for setting in settings:
            error = results.value(setting, method, ERROR)
            cells += ["" if error is None else f"{error:.1e}", kernel(results, setting, method)]
        lines.append(cells)
    names = [name for setting in settings for name in (f"error, {setting.partition(',')[0]}", "kernel")]
    return Table("Errors of outputs, and what computed them", ["layer", *names], lines, results.rows)
