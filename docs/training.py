"""The figures of the guide to training, of ``reports/data/fp8_training.csv.gz``: `docs/generate.py` puts them into the page."""

from __future__ import annotations

import csv
import gzip
import sys
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from experiments.fp8_training.convergence import PAIRED, Gap  # noqa: E402
from experiments.fp8_training.convergence_findings import (  # noqa: E402
    disturbed,
    largest_single,
    pairs_of,
    rare_bytes,
    ratios_found,
)
from experiments.fp8_training.convergence_page import baseline_gap  # noqa: E402
from experiments.harness.paths import Paths  # noqa: E402
from experiments.harness.rows import read  # noqa: E402
from experiments.report.results import by_run  # noqa: E402

TEXT = """\
**Speed.** Two layers of Llama-3-8B train {compiled:.2f} times as fast with `rowwise` as in compiled bfloat16, and {eager:.2f}
times in eager mode (H200; `fuse=True`, and in compiled bfloat16 the compiler's own fusions). Small layers gain little or
nothing: a whole Llama of {whole_model} trains at {whole} of bfloat16's speed. Time a hundred steps of your own model in both.

**Loss.** Over {seeds} paired trainings of a Llama of {small:.0f} million parameters, the loss on held-out books is above that
of bfloat16 by {gaps} percent (95% intervals). The largest of the recipes of 6 and 8 bits is `{worst}`: {highest}, and
{elsewhere} on WikiText-2, which is unlike the training text. bfloat16 trained again on {other} differs by {base}, so
smaller differences than that mean nothing. One seed each of a longer
training, {singles}. {rare}
"""
RECIPES = ("rowwise", "mxfp8", "mxfp4")
#: Recipes of 4-bit operands, which are told from bfloat16.
FOUR_BITS = ("mxfp4", "nvfp4")
LOSS_OF = "bits per byte, heldout"
GAP, OTHER_TEXT = f"gap, {LOSS_OF}", "gap, bits per byte, wikitext2-test"
STEP = "2 x 8192, checkpointing none"
#: The size of the model whose whole trainings have speeds, in settings and in words.
SIZE, WHOLE = "120m", "120 million parameters"
#: Whose rows are quoted: of what was measured last with the code as it is.
SPEED = LOSS = "NVIDIA H200"


def text() -> str:
    """The sentences."""
    worst = max(eight_bits(), key=lambda name: value(LOSS, "gaps", name, GAP))
    other, base_gap = base_against_itself()
    base = value(SPEED, "blocks", "bfloat16", "time", f"compiled, {STEP}")
    return TEXT.format(
        compiled=base / value(SPEED, "blocks", "ours, rowwise", "time", f"compiled, {STEP}"),
        eager=base / value(SPEED, "blocks", "ours, rowwise", "time", f"eager, {STEP}"),
        seeds=int(value(LOSS, "gaps", RECIPES[0], f"{GAP}, seeds")),
        small=value(LOSS, "paired", "bfloat16", "parameters") / 1e6,
        gaps=", ".join(f"{interval(name, GAP)} (`{name}`)" for name in RECIPES),
        worst=worst,
        highest=interval(worst, GAP),
        elsewhere=interval(worst, OTHER_TEXT),
        other=f"an {other.removeprefix('NVIDIA ').partition(' ')[0]}",
        base=f"{base_gap.mean:.2f} ± {base_gap.half:.2f}",
        singles=singles(),
        rare=" ".join(rare_bytes(read(Paths.default(ROOT / "reports").rows("fp8_training")))),
        whole_model=WHOLE,
        whole=whole_speeds(),
    )


def whole_speeds() -> str:
    """Speeds over bfloat16's of whole trainings of WHOLE that nothing disturbed."""
    found = ratios_found(read(Paths.default(ROOT / "reports").rows("fp8_training")))
    words = []
    for method, pairs in found.items():
        of = sorted(ratio for row, ratio in pairs if row.setting.startswith(SIZE) and not disturbed(row))
        if of:
            words.append(
                f"{' to '.join(f'{one:.2f}' for one in dict.fromkeys((of[0], of[-1])))} (`{method}`)"
            )
    return ", ".join(words)


def interval(name: str, metric: str) -> str:
    """A recipe's gap with its 95% interval."""
    return f"{value(LOSS, 'gaps', name, metric):.2f} ± {value(LOSS, 'gaps', name, f'{metric}, 95% interval'):.2f}"


def eight_bits() -> list[str]:
    """Recipes with a gap whose operands have 8 bits, or 6."""
    found = dict.fromkeys(row["method"] for row in rows() if row["table"].startswith("gaps/full/"))
    return [name for name in found if name not in FOUR_BITS]


def base_against_itself() -> tuple[str, Gap]:
    """The other device that trained bfloat16 on the same seeds and text, and its gap."""
    run = [row for row in read(Paths.default(ROOT / "reports").rows("fp8_training")) if row.device]
    where = next(one for one in by_run(run, PAIRED) if (one.scale, one.device) == ("full", LOSS))
    found = baseline_gap(run, where, LOSS_OF)
    if found is None:
        raise KeyError(f"no other device than {LOSS} trained bfloat16 on the same seeds")
    return found


def singles() -> str:
    """The longest trainings of one seed on the same GPU, on each text."""
    found = [
        one
        for one in pairs_of(read(Paths.default(ROOT / "reports").rows("fp8_training")))
        if one[0].device == LOSS
    ]
    return largest_single(found).removeprefix("one training each of ")


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
