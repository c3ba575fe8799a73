"""Comparisons whose peer has no row: what an experiment asked of another project's code, and why there is no value of it.

A peer is measured where a row of it has a value. Where rows say a status alone (it was not installed, its time was over, it
raised), or where an experiment names a peer that no row is of, the comparison never ran: the table names it with the command
that measures it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from experiments.harness.rows import Row, table_parts
from experiments.report.content import Table
from experiments.report.results import STATUS

#: Other projects' code, in a method's or a setting's name. Conventions of theirs as schemes (`torchao.nf4`) are our code.
NAMES = "torchao|torch\\.compile|torch eager|cuSPARSELt|ml_dtypes|XLA|llm-compressor|GPTQModel|auto-round|hqq library|gguf"
PEERS = re.compile(rf"(?<![\w.])({NAMES})(?![\w.])")
OK = f"{STATUS}ok"


@dataclass(frozen=True)
class Expected:
    """A peer that an experiment has to stand beside: its name in rows, what of, and the command or why there is none."""

    experiment: str
    peer: str
    of: str
    command: str


CALIBRATION = "ao-lab reproduce calibration --model smollm2-135m --scale full --peer-python PYTHON"
REAL_QAT = "ao-lab reproduce qat --model smollm2-135m --scale full"
#: What is to be there, whether or not a row says so.
EXPECTED = (
    *(
        Expected(
            "calibration",
            peer,
            "its own result on the same model, data and scheme",
            f"{CALIBRATION} --only {arm!r}",
        )
        for peer, arm in (
            ("llm-compressor", "llm-compressor GPTQ"),
            ("GPTQModel", "GPTQModel"),
            ("auto-round", "auto-round"),
            ("hqq library", "hqq library"),
        )
    ),
    Expected("qat", "torchao", "its QAT of the same scheme, equally long", f"{REAL_QAT} --only int4_g32"),
    Expected(
        "decode",
        "torchao",
        "the same model and configuration",
        "ao-lab reproduce decode --scale full --device cuda",
    ),
    Expected(
        "linear",
        "torchao",
        "the same layer",
        "ao-lab reproduce linear --scale full --device cuda --only torchao",
    ),
    Expected(
        "fp8_training",
        "torchao",
        "the same layer and recipe",
        "ao-lab reproduce fp8_training --scale full --device cuda",
    ),
    Expected(
        "qat_overhead", "torchao", "the same step", "ao-lab reproduce qat_overhead --scale full --device cuda"
    ),
    Expected(
        "sparsity",
        "cuSPARSELt",
        "the same matmul",
        "ao-lab reproduce sparsity --scale full --device cuda --only products",
    ),
    Expected("kernels", "torchao", "the same tensor", "ao-lab reproduce kernels --scale full --device cuda"),
)
COLUMNS = ("experiment", "peer", "what", "device", "without a value", "of", "why", "command")
#: What a run that measures no times says of them: a run on a GPU has them, or else its own rows say why not.
NO_TIMES = "times are of a GPU"


@dataclass
class Count:
    """How many comparisons of a table have no value, of how many, and why."""

    missing: int = 0
    whole: int = 0
    why: str = ""


def peer_of(row: Row) -> str:
    """The peer that a row is of; "" where it is ours."""
    found = PEERS.search(row.method) or PEERS.search(row.setting)
    return found.group(1) if found else ""


def missing(rows: Mapping[str, Sequence[Row]], given: Collection[str] = ()) -> Table:
    """A line for each peer, table and device with comparisons that have no value, and for each expected peer without a row.

    given: experiments whose rows are of somebody's own models alone: where there are any, no peer is expected of experiments
    that were not run.
    """
    lines = [line for name, found in rows.items() for line in lines_of(name, found)]
    lines += [
        [one.experiment, one.peer, one.of, "", "all", "", "not run", coded(one.command)]
        for one in EXPECTED
        if not given or (rows.get(one.experiment) and one.experiment not in given)
        if all(peer_of(row) != one.peer for row in rows.get(one.experiment, ()))
    ]
    return Table("Comparisons whose peer has no value", COLUMNS, lines)


def lines_of(experiment: str, rows: Sequence[Row]) -> Iterator[list[str]]:
    """The lines of one experiment: comparisons are tables' settings and methods of a peer."""
    groups: dict[tuple[str, str, str, str], Count] = {}
    for (peer, table, device, *_), found in comparisons(rows).items():
        kind, scale, _ = table_parts(table)
        count = groups.setdefault((peer, kind, scale, device), Count())
        count.whole += 1
        if not any(row.metric == OK or not row.metric.startswith(STATUS) for row in found):
            count.missing += 1
            count.why = count.why or found[-1].metric.removeprefix(STATUS)
    for (peer, kind, scale, device), count in groups.items():
        if count.missing and NO_TIMES not in count.why:
            again = f"ao-lab reproduce {experiment} --scale {scale} --device {'cpu' if device == 'cpu' else 'cuda'} --changed"
            yield [
                experiment,
                peer,
                f"{kind}, {scale}",
                device,
                str(count.missing),
                str(count.whole),
                count.why,
                coded(again),
            ]


def comparisons(rows: Sequence[Row]) -> dict[tuple[str, str, str, str, str], list[Row]]:
    """Rows of peers by peer, table, device, setting and method."""
    found: dict[tuple[str, str, str, str, str], list[Row]] = {}
    for row in rows:
        if peer := peer_of(row):
            found.setdefault((peer, row.table, row.device, row.setting, row.method), []).append(row)
    return found


def coded(text: str) -> str:
    """A command as code; words as they are."""
    return f"`{text}`" if text.startswith("ao-lab ") else text
