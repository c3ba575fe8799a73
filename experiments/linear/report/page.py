"""The page of experiment `linear`: heat maps of speed over bfloat16, targets, a table for every number of rows."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.harness.rows import Row
from experiments.linear.methods import PARTS
from experiments.linear.outputs import ERROR
from experiments.linear.report import outputs, times
from experiments.linear.run import TITLE
from experiments.linear.tables import setting_of
from experiments.linear.targets import SHAPE, slow_rows, targets_by_run, targets_of
from experiments.linear.times import SPEED, TIME
from experiments.report.content import Headline, Section, headlines_of
from experiments.report.results import Results, Where, best_run, by_run
from experiments.report.targets import Target, counts, missed

QUESTION = "How fast is one quantized layer beside bfloat16 and torchao, at 1 to 8192 rows of inputs?"
ABOUT = (
    "One linear layer of a user's model, `nn.Linear` in bfloat16 through `ao_lab.quantize_`, over 1 to 8192 rows of inputs: "
    "what its rules choose without tuning, beside bfloat16 and torchao; and experts of a mixture, whose rows are sorted.",
    "Outputs are compared with the product in float32 of what is stored before anything is timed. Times are of a GPU at full "
    "scale; at quick scale errors and the kernels that were chosen are of small shapes on a CPU.",
)
FEATURED = ("linear-weights-14336x4096-full", "linear-weights-14336x4096-full-nvidia-h100-80gb-hbm3")
#: Weights of the first page.
QUOTED = ("int4 g128", "int8", "mxfp4")
NOTHING = "Nothing is timed yet: times are of a GPU at full scale."


def findings(rows: Sequence[Row]) -> list[str]:
    """Targets and slow rows of every GPU; errors at quick scale."""
    words, timed = [], False
    for part in PARTS:
        for where, results in by_run(rows, part).items():
            said = times_words(part, where, results) if where.device != "cpu" else []
            timed, words = timed or bool(said), [*words, *said]
    return [*words, *([] if timed else [NOTHING]), *outputs_words(rows)]


def headlines(rows: Sequence[Row]) -> list[Headline]:
    """Times of one row and of 16 by the weight that has targets, on the last device."""
    runs = {where: one for where, one in by_run(rows, "weights").items() if where.data == SHAPE}
    run = best_run({where: one for where, one in runs.items() if where.device != "cpu"})
    if run is None:
        return []
    text = (
        "A layer of 14336 x 4096 with int4 weights in groups of 128 takes {one:.1f} us for one row of inputs, {speed:.2f} "
        "times as fast as bfloat16, and {few:.1f} us for 16; with int8 weights {int8:.1f} us for one"
    )
    places = {
        "one": (1, "int4 g128", TIME), "speed": (1, "int4 g128", SPEED), "few": (16, "int4 g128", TIME),
        "int8": (1, "int8", TIME),
    }  # fmt: skip
    found = {name: run[1].row(setting_of(count), *place) for name, (count, *place) in places.items()}
    return headlines_of(text, **found)


def main_finding(rows: Sequence[Row]) -> str:
    """Where layers of the shape that has targets are slower than bfloat16, on the last device."""
    runs = {where: one for where, one in by_run(rows, "weights").items() if where.data == SHAPE}
    run = best_run({where: one for where, one in runs.items() if where.device != "cpu"})
    slow = dict(slow_rows(run[1])) if run else {}
    words = [f"{name} at {', '.join(map(str, slow[name]))}" for name in QUOTED if name in slow]
    return f"slower than bfloat16, {SHAPE}: {'; '.join(words)} rows" if words else ""


def times_words(part: str, where: Where, results: Results) -> list[str]:
    """How many targets are met and which are not; where a method is slower than bfloat16."""
    targets, name = targets_of(part, where, results), f"{part} ({where.data}, {where.device})"
    held = [one for one in targets if one.reached is not None]
    words = []
    if held:
        lost = missed(held)
        rest = f"; missed: {grouped(lost)}" if lost else ""
        words.append(f"{name}: {counts(held, ' targets are met')}{rest}.")
    slow = [f"{method} at {', '.join(f'{rows}' for rows in at)}" for method, at in slow_rows(results)]
    if slow:
        words.append(f"{name}, slower than bfloat16: {'; '.join(slow)} rows.")
    return words


def grouped(targets: Sequence[Target]) -> str:
    """Names of targets, rows of a method together."""
    found: dict[str, list[str]] = {}
    for one in targets:
        method, _, rows = one.name.rpartition(", ")
        found.setdefault(method, []).append(rows.partition(" ")[0])
    return "; ".join(f"{method} at {', '.join(rows)}" for method, rows in found.items()) + " rows"


def outputs_words(rows: Sequence[Row]) -> list[str]:
    """The largest error of the small shapes."""
    found = [row for row in rows if row.metric == ERROR and row.device == "cpu"]
    if not found:
        return []
    worst = max(found, key=lambda row: row.value)
    layers = len({row.line for row in found})
    return [
        f"{layers} layers on a CPU: outputs differ from the product of what is stored by at most {worst.value:.1e} of their "
        f"size ({worst.method})."
    ]


def sections(rows: Sequence[Row]) -> list[Section]:
    """Of all parts and runs."""
    return [
        (outputs if where.scale == "quick" or where.device == "cpu" else times).section(part, where, results)
        for part in PARTS
        for where, results in by_run(rows, part).items()
    ]


__all__ = [
    "ABOUT",
    "FEATURED",
    "QUESTION",
    "TITLE",
    "findings",
    "headlines",
    "main_finding",
    "sections",
    "targets_by_run",
]
