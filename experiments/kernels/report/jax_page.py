"""The part of the page on calls from JAX, from rows of the table ``jax``; see `jax_calls`."""

from __future__ import annotations

from collections.abc import Iterable

from experiments.harness.rows import Row
from experiments.kernels.jax_calls import CAST, KIND, MOST, PROGRAM, TORCH, WAYS
from experiments.report.content import Section, Table
from experiments.report.results import Results, by_run, number

TEXT = (
    "Quantizing a bfloat16 tensor from torch and from JAX, by the same kernel, in one process: microseconds a call, of many "
    f"that are queued, which is the larger of what the host and the GPU take. `program` is one compiled function of {PROGRAM} "
    "quantizations, an eighth of its time; XLA's cast, the same under jit, says what JAX takes for one operation of its own."
)


def jax_sections(rows: Iterable[Row]) -> list[Section]:
    """A section per run, none where no JAX was measured."""
    return [
        Section(f"Calls from JAX ({where})", [TEXT, *missed(found)], [], [jax_table(found)])
        for where, found in by_run(rows, KIND).items()
    ]


def missed(found: Results) -> list[str]:
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
