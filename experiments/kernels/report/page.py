"""The page of experiment `kernels`: the roofline, a table per shape, the peers, and what was missed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from experiments.harness.rows import Row
from experiments.kernels.baselines.baseline import PEERS
from experiments.kernels.cases.case import SMALL
from experiments.kernels.report.jax_page import jax_sections
from experiments.kernels.report.lines import PEER_TOLERANCE, Against, Line, lines_of, summary
from experiments.kernels.report.roofline import roofline
from experiments.kernels.run import TITLE
from experiments.report.pages import STALE, Drawing, Section, Table
from experiments.report.results import Where, number

__all__ = ["TITLE", "sections"]

TEXT = (
    "A kernel's floor is every tensor that it needs read once and every tensor that it makes written once (twice read where a "
    "scale of the whole tensor has to come first). Its fraction is its rate on these bytes over the rate of a copy of as many "
    "bytes as it reads, timed in turn with it in the same run. Before it is timed, its result is compared with the "
    "reference bit for bit at both ends of the tensor, a product of stored weights with the exact one within the bound of its "
    "sums; a wrong one gets no time.",
    "Times are medians by CUDA graph replay, over inputs that rotate so that the L2 holds none of them; launched one by one "
    "stands beside them. Repeat is how far a second timing of the same kernel in the same rounds lies from the first. Bars are "
    "stated for the cases that have one, and what misses one says so.",
)
PEER_TEXT = (
    "A ratio is the peer's time over ours, timed in turn on the same inputs: above 1 ours is faster, and below "
    f"{1 - PEER_TOLERANCE:g}, which no repeat explains, slower. Bars come first, and a run has so much time for peers: what it "
    f"did not reach keeps what an earlier run found, between both as they were then, marked {STALE} in its cell. "
    + "; ".join(f"{peer.name}: {peer.what}" for peer in PEERS)
    + "."
)
CAPTION = (
    "Fraction of the copy rate per kernel, with its bar and its best peer, and the rates reached under the ceiling of copies "
    "of the same run. Red: below a bar."
)


def sections(rows: Sequence[Row]) -> list[Section]:
    """Sections of each run: against the floors, against the peers, calls from JAX."""
    made = []
    runs = lines_of(rows)
    for where, lines in runs.items():
        name = "kernels-roofline" if len(runs) == 1 else f"kernels-roofline-{slug(where)}"
        drawing = Drawing(name, CAPTION, roofline(lines))
        paragraphs = [summary(lines), *missed_paragraphs(lines), *TEXT]
        products = [line for line in lines if line.case.startswith("linear.")]
        large = [line for line in lines if line.shape != SMALL and line not in products]
        small = [line for line in lines if line.shape == SMALL]
        tables = [floor_table(large), *([small_table(small)] if small else [])]
        tables += [product_table(products)] if products else []
        made.append(Section(f"Against the floors ({where})", paragraphs, [drawing], tables))
        if any(line.against for line in lines):
            made.append(Section(f"Against peers ({where})", [PEER_TEXT], [], [peer_table(lines)]))
    return [*made, *jax_sections(rows)]


def slug(where: Where) -> str:
    """A run as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", f"{where.device} {where.scale}".lower()).strip("-")


def missed_paragraphs(lines: Sequence[Line]) -> list[str]:
    """What misses a bar, and what is slower than a peer."""
    missed = [f"{line.case} at {line.shape} ({'; '.join(line.missed)})" for line in lines if line.missed]
    slower = [f"{line.case} at {line.shape} ({faster_peers(line)})" for line in lines if line.faster_peers]
    made = [f"**Missed bars: {len(missed)}.** " + ", ".join(missed) + "."] if missed else []
    return made + ([f"**Slower than a peer: {len(slower)}.** " + ", ".join(slower) + "."] if slower else [])


def floor_table(lines: Sequence[Line]) -> Table:
    """A line per case and shape."""
    columns = [
        "kernel",
        "shape",
        "time (us)",
        "20%",
        "80%",
        "eager (us)",
        "repeat",
        "moved (MB)",
        "TB/s",
        "copy TB/s",
    ]
    columns += ["fraction", "eager", "over unfused", "bar reached"]
    metrics = (("time", 1), ("time, 20%", 1), ("time, 80%", 1), ("time, eager", 1), ("repeat", 3))
    made = []
    for line in lines:
        moved = line.values.get("bytes moved")
        made.append(
            [
                line.case,
                line.shape,
                *(number(line.values.get(metric), digits) for metric, digits in metrics),
                number(None if moved is None else moved / 1e6, 0),
                *(number(line.values.get(metric), 2) for metric in ("rate", "copy rate")),
                *(number(line.values.get(metric), 3) for metric in ("fraction", "fraction, eager")),
                number(line.values.get("speedup over unfused"), 2),
                line.verdict,
            ]
        )
    return Table("Time against the floor", columns, made, stale(lines))


def small_table(lines: Sequence[Line]) -> Table:
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
    made = [
        [
            line.case,
            line.shape,
            *(number(line.values.get(name), digits) for name, digits in metrics),
            line.verdict,
        ]
        for line in lines
    ]
    return Table("Small tensors", [*columns, "bar reached"], made, stale(lines))


def product_table(lines: Sequence[Line]) -> Table:
    """Inputs times a stored weight: reading the weight is the floor."""
    columns = [
        "kernel",
        "weight",
        "time (us)",
        "eager (us)",
        "host (us)",
        "it adds (us)",
        "moved (MB)",
        "TB/s",
        "fraction",
    ]
    columns += ["times as fast as dense bfloat16", "as dequantizing first"]
    made = []
    for line in lines:
        values = line.values
        moved, dense = values.get("bytes moved"), values.get("time over dense")
        made.append(
            [
                line.case,
                line.shape,
                *(
                    number(values.get(metric), 1)
                    for metric in ("time", "time, eager", "host time", "host time, added")
                ),
                number(None if moved is None else moved / 1e6, 0),
                *(number(values.get(metric), 2) for metric in ("rate", "fraction")),
                number(None if dense is None else 1 / dense, 2),
                number(values.get("speedup over unfused"), 2),
                line.verdict,
            ]
        )
    return Table("Products of stored weights", [*columns, "bar reached"], made, stale(lines))


def peer_table(lines: Sequence[Line]) -> Table:
    """A line per case and shape, a column per peer: the ratio, or why there is none."""
    names = [peer.name for peer in PEERS]
    made = []
    for line in lines:
        if line.against:
            found = {one.peer: compared(line, one) for one in line.against}
            best = line.best_peer
            verdict = "" if best is None else f"SLOWER than {best.peer}" if line.slower_than else "yes"
            cells = [found.get(name, "") for name in names]
            made.append([line.case, line.shape, *cells, best.peer if best else "", verdict])
    columns = ["kernel", "shape", *names, "best peer", "as fast as every peer"]
    return Table("Their time over ours", columns, made, stale(lines))


def compared(line: Line, one: Against) -> str:
    """A peer's cell: the ratio, or why there is none; marked where it is older than the code."""
    words = one.status if one.ratio is None else number(one.ratio, 2)
    return words if one.is_current else f"{words} {STALE}"


def faster_peers(line: Line) -> str:
    """The peers that are faster, with their ratios."""
    return ", ".join(f"{one.peer} {compared(line, one)}" for one in line.faster_peers)


def stale(lines: Sequence[Line]) -> frozenset[str]:
    """Cases with rows that are older than the code."""
    return frozenset(line.case for line in lines if not line.is_current)
