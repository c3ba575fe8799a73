"""What a user of transformers gets, in README.md: rows of ``reports/data/generate.csv``.

``python docs/generation.py`` writes them between the marks of README.md; a test compares them with the rows. The sentence says
when and at which commits they were measured.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from experiments.harness.paths import Paths  # noqa: E402
from experiments.harness.rows import Row, read  # noqa: E402
from experiments.report.measured import measured_at  # noqa: E402

BEGIN, END = "<!-- generation: python docs/generation.py -->\n", "<!-- end of generation -->\n"
SPEED, OF = "speed over bfloat16", "generate/full/llama-3.1-8b-{}-layers"
WHOLE, PART, PREFILL = OF.format(32), OF.format(8), "prefill of 2048 tokens"
BESIDE = "batch 1, compiled, beside torchao"
TEXT = """\
Nothing has to be switched on: with the shapes of Llama-3.1-8B, 32 layers, transformers' own `generate()` and the compilation
that `cache_implementation="static"` starts, int4 runs {int4} and {int4_16} times as fast as bfloat16 at batch 1 and 16,
int8 {int8} and {int8_16}, int4 after the call below {prepared} at batch 1. Of eight layers, of which transformers' own loop is
more, int4 runs {small} and int8 {small8} times as fast, torchao's in the same process {theirs} and {theirs8}; not compiled,
where a step is what the host takes, int4 {eager} and int8 {eager8}; a prompt of 2048 tokens int4 {prefill}, fp8
dynamic {prefill8} (batch 1, one {device},
{measured}, [rows](reports/generate.md)).
"""


def main() -> None:
    """Write the figures into README.md."""
    path = ROOT / "README.md"
    before, _, after = path.read_text(encoding="utf-8").partition(BEGIN)
    path.write_text(before + BEGIN + text() + END + after.partition(END)[2], encoding="utf-8")


def text() -> str:
    """The sentences."""
    found = {
        "int4": row_of(WHOLE, "batch 1, compiled", "int4 g128"),
        "int8": row_of(WHOLE, "batch 1, compiled", "int8"),
        "int4_16": row_of(WHOLE, "batch 16, compiled", "int4 g128"),
        "int8_16": row_of(WHOLE, "batch 16, compiled", "int8"),
        "prepared": row_of(WHOLE, "batch 1, compiled", "int4 g128, prepared"),
        "small": row_of(PART, BESIDE, "int4 g128"),
        "small8": row_of(PART, BESIDE, "int8"),
        "theirs": row_of(PART, BESIDE, "torchao int4wo"),
        "theirs8": row_of(PART, BESIDE, "torchao int8wo"),
        "eager": row_of(PART, "batch 1, not compiled", "int4 g128"),
        "eager8": row_of(PART, "batch 1, not compiled", "int8"),
        "prefill": row_of(PART, PREFILL, "int4 g128"),
        "prefill8": row_of(PART, PREFILL, "fp8 dynamic, rows"),
    }
    figures = {name: f"{row.value:.2f}" for name, row in found.items()}
    gpu = device().removeprefix("NVIDIA ").partition(" ")[0]
    return TEXT.format(**figures, measured=measured_at(found.values()), device=gpu)


def row_of(table: str, setting: str, method: str) -> Row:
    """A committed row; KeyError where there is none."""
    wanted = table, setting, method, SPEED, device()
    for row in rows():
        if (row.table, row.setting, row.method, row.metric, row.device) == wanted:
            return row
    raise KeyError(f"no row of {wanted}")


def device() -> str:
    """The GPU of the whole model's rows: an H200, for which the targets are, where there are its."""
    found = [row.device for row in rows() if row.table == WHOLE]
    return next((one for one in found if "H200" in one), found[0])


@lru_cache(maxsize=1)
def rows() -> tuple[Row, ...]:
    """All rows of the experiment."""
    return tuple(read(Paths.default(ROOT / "reports").rows("generate")))


if __name__ == "__main__":
    main()
