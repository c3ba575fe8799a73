"""The figures of training in README.md, which are rows of ``reports/data/fp8_training.csv.gz``.

``python docs/training.py`` writes them between the marks of README.md; a test compares them with the rows.
"""

from __future__ import annotations

import csv
import gzip
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- training: python docs/training.py -->\n", "<!-- end of training -->\n"
TEXT = """\
Two layers of Llama-3-8B train {compiled:.2f} times as fast by `rowwise` as compiled bfloat16, {eager:.2f} times in eager mode
(one H100). Over {seeds} paired trainings of a model of {small:.0f} million parameters (H200) the loss on held-out books lies
above bfloat16's by {gaps} percent ([rows](reports/fp8_training.md)).
"""
RECIPES = ("rowwise", "mxfp8", "mxfp4")
GAP = "gap, bits per byte, heldout"
STEP = "2 x 8192, checkpointing none"
#: Whose rows are quoted: of what was measured last with the code as it is.
SPEED, LOSS = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


def main() -> None:
    """Write the figures into README.md."""
    path = ROOT / "README.md"
    before, _, after = path.read_text(encoding="utf-8").partition(BEGIN)
    path.write_text(before + BEGIN + text() + END + after.partition(END)[2], encoding="utf-8")


def text() -> str:
    """The sentences."""
    gaps = [
        f"{value(LOSS, 'gaps', name, GAP):.2f} ± {value(LOSS, 'gaps', name, f'{GAP}, 95% interval'):.2f} (`{name}`)"
        for name in RECIPES
    ]
    base = value(SPEED, "blocks", "bfloat16", "time", f"compiled, {STEP}")
    return TEXT.format(
        compiled=base / value(SPEED, "blocks", "ours, rowwise", "time", f"compiled, {STEP}"),
        eager=base / value(SPEED, "blocks", "ours, rowwise", "time", f"eager, {STEP}"),
        seeds=int(value(LOSS, "gaps", RECIPES[0], f"{GAP}, seeds")),
        small=value(LOSS, "paired", "bfloat16", "parameters") / 1e6,
        gaps=", ".join(gaps),
    )


def value(device: str, kind: str, method: str, metric: str, setting: str | None = None) -> float:
    """A committed row of a GPU: the first of its kind of table, method and metric; KeyError where there is none."""
    for row in rows():
        found = row["device"], row["method"], row["metric"]
        if (
            row["table"].startswith(f"{kind}/full/")
            and found == (device, method, metric)
            and setting in (None, row["setting"])
        ):
            return float(row["value"])
    raise KeyError(f"no row of {kind}, {method}, {metric} on {device}")


@lru_cache(maxsize=1)
def rows() -> list[dict[str, str]]:
    """All rows of the experiment."""
    with gzip.open(
        ROOT / "reports" / "data" / "fp8_training.csv.gz", "rt", newline="", encoding="utf-8"
    ) as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    main()
