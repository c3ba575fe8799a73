"""Sections of times: of a part at one shape a heat map, its targets, and a table for each number of rows."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.fp8_training.report.lines import failures
from experiments.harness.rows import Row
from experiments.linear.methods import BASE, EXPERTS, TORCHAO
from experiments.linear.outputs import ERROR
from experiments.linear.report.outputs import kernel, methods_of
from experiments.linear.tables import EXPERT_ROWS, ROWS, TIMES, setting_of
from experiments.linear.targets import targets_of
from experiments.linear.times import FLOOR, HOST, SPEED, TIME
from experiments.report.content import Drawing, Section, Table
from experiments.report.ratio_map import ratio_map
from experiments.report.results import Results, Where, number
from experiments.report.targets import Target

TITLES = {
    "weights": "Quantized weights",
    "activations": "Quantized weights and inputs",
    EXPERTS: "Quantized experts",
    TORCHAO: "Beside torchao",
}
TEXT = (
    "Microseconds of a call as CUDA graphs, of layers and inputs in turn that exceed the L2 cache; quantizing inputs is in it. "
    "Methods of a table take turns. From 1024 rows on each is timed after calls of its own, when the GPU's clock has settled.",
    "The floor is what weight, inputs and outputs take once at the rate of a copy, or the operations at the rate of an "
    "8192-cubed product of such elements, whichever is more; both rates were measured in the same process. Host: what the host "
    "spends on a call in eager mode. Kernel: `dequantize` is a dense product after the weight was dequantized.",
)
GROUPED = (
    "Rows are sorted by expert, two a token of experts drawn at random; bfloat16 is `torch._grouped_mm`. The floor reads those "
    "experts alone that have rows."
)
COMPARED = (
    "torchao's layers are compiled for each number of rows, but for int4wo, which is a kernel of its own."
)
NOTES = {TORCHAO: [COMPARED], EXPERTS: [GROUPED]}
#: Of a metric: the column, digits.
COLUMNS = {
    TIME: ("us", 1),
    f"{TIME}, 20%": ("20%", 1),
    f"{TIME}, 80%": ("80%", 1),
    SPEED: ("speed over bfloat16", 2),
    FLOOR: ("of the floor", 2),
    HOST: ("host (us)", 1),
}


def section(part: str, where: Where, results: Results) -> Section:
    """One part at one shape on one GPU."""
    text = [*TEXT, *NOTES.get(part, []), *failures(results)]
    rows = [count for count in sorted({*ROWS, *EXPERT_ROWS}) if setting_of(count) in results.settings]
    methods = list(dict.fromkeys(row.method for row in results.rows if row.metric == SPEED))
    if not methods:
        return Section(f"{TITLES[part]} ({where})", failures(results))
    drawing = speed_map(part, where, results, methods, rows)
    tables = [rows_table(results, count) for count in rows]
    targets = target_table(targets_of(part, where, results), results.rows)
    return Section(f"{TITLES[part]} ({where})", text, [drawing], [*targets, *tables])


def speed_map(part: str, where: Where, results: Results, methods: list[str], rows: list[int]) -> Drawing:
    """Speed over bfloat16, methods by rows; its own is 1."""
    methods = [name for name in methods if name != BASE.name]
    values = [[results.value(setting_of(count), name, SPEED) for count in rows] for name in methods]
    figure = ratio_map(methods, [str(count) for count in rows], values, "speed over bfloat16")
    caption = f"{TITLES[part]}, {where.data}, {where.device}: speed over bfloat16 by rows of inputs."
    return Drawing(f"linear-{part}-{where.data}-{where.ending}", caption, figure)


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
    names = ["layer", *(name for name, _ in COLUMNS.values()), "kernel", "relative error"]
    return Table(setting.removesuffix(f", {TIMES}"), names, lines, results.with_setting(setting).rows)


def target_table(targets: list[Target], rows: Sequence[Row]) -> list[Table]:
    """Targets with values; none where there are none."""
    lines = [[one.name, limit_of(one), one.measured, one.verdict] for one in targets]
    return [Table("Targets", ["layer", "target", "measured", "reached"], lines, rows)] if lines else []


def limit_of(one: Target) -> str:
    """A target as a cell."""
    sign, unit = "at least" if one.at_least else "at most", one.unit or "times bfloat16"
    return f"{sign} {one.texts[1]} {unit}"


__all__ = ["section"]
