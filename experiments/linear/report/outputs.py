"""Sections of outputs: errors and kernels, a line for each method, a pair of columns for each number of rows."""

from __future__ import annotations

from experiments.fp8_training.report.lines import failures
from experiments.linear.outputs import ERROR
from experiments.report.content import Section, Table
from experiments.report.results import Results, Where

TEXT = (
    "The relative error is the norm of the difference over that of the product in float32 of the stored weight (and of the "
    "quantized inputs). Rounding outputs to bfloat16 is 1.7e-3 of it; kernel `dequantize` rounds weights to bfloat16 first."
)


def section(part: str, where: Where, results: Results) -> Section:
    """One shape."""
    methods = methods_of(results)
    tables = [table(results, methods)] if methods else []
    text = [TEXT] if methods else []
    return Section(f"Outputs: {part} ({where})", [*text, *failures(results)], (), tables)


def methods_of(results: Results) -> list[str]:
    """Those with an error, in the order of measurement."""
    return list(dict.fromkeys(row.method for row in results.rows if row.metric == ERROR))


def kernel(results: Results, setting: str, method: str) -> str:
    """What computed a method."""
    return next((row.kernel for row in results.with_setting(setting).of_method(method).rows), "")


def table(results: Results, methods: list[str]) -> Table:
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


__all__ = ["kernel", "methods_of", "section"]
