"""What a user of transformers gets, in README.md: rows of ``reports/data/generate.csv``.

``python docs/generation.py`` writes them between the marks of README.md; a test compares them with the rows. The sentence says
when and at which commits they were measured.
"""

from __future__ import annotations

import sys
import textwrap
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from experiments.harness.paths import Paths  # noqa: E402
from experiments.harness.rows import Row, read  # noqa: E402
from experiments.report.content import measured_at  # noqa: E402

BEGIN, END = "<!-- generation: python docs/generation.py -->\n", "<!-- end of generation -->\n"
#: bfloat16's time at the end of a table over that at its beginning; by how much it may be away from 1.
AGAIN, UNSTEADY = "time again over the first", 0.1
SPEED, OF = "speed over bfloat16", "generate/full/llama-3.1-8b-{}-layers"
WHOLE, PART, PREFILL = OF.format(32), OF.format(8), "prefill of 2048 tokens"
BESIDE = "batch 1, compiled, beside torchao"
TEXT = """\
Nothing has to be switched on: with the shapes of Llama-3.1-8B, 32 layers, transformers' own `generate()` and the compilation
that `cache_implementation="static"` starts, int4 runs {int4} and {int4_16} times as fast as bfloat16 at batch 1 and 16,
int8 {int8} and {int8_16}, int4 after the call below {prepared} at batch 1 (bfloat16 after the same call {prepared_base}).
With eight layers, where transformers' own loop is a larger part of a step, int4 runs {small} and int8 {small8} times as
fast, torchao's in the same process {theirs} and {theirs8}; {eager}; a prompt of 2048 tokens int4 {prefill}, fp8
dynamic {prefill8} (batch 1, one {device}, {measured}, [rows](reports/generate.md)). At the end of the table of 32 layers
bfloat16 took {drift} of its first time: ratios nearer to each other than that are not told apart.
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
        "prepared_base": row_of(WHOLE, "batch 1, compiled", "bfloat16, prepared"),
        "small": row_of(PART, BESIDE, "int4 g128"),
        "small8": row_of(PART, BESIDE, "int8"),
        "theirs": row_of(PART, BESIDE, "torchao int4wo"),
        "theirs8": row_of(PART, BESIDE, "torchao int8wo"),
        "prefill": row_of(PART, PREFILL, "int4 g128"),
        "prefill8": row_of(PART, PREFILL, "fp8 dynamic, rows"),
    }
    figures = {name: f"{row.value:.2f}" for name, row in found.items()}
    figures["drift"] = f"{row_of(WHOLE, 'batch 1, compiled', 'bfloat16', AGAIN).value:.2f}"
    figures["eager"] = not_compiled()
    gpu = device().removeprefix("NVIDIA ").partition(" ")[0]
    return filled(TEXT.format(**figures, measured=measured_at(found.values()), device=gpu))


def filled(text: str) -> str:
    """One paragraph in lines of the width of README.md."""
    return textwrap.fill(" ".join(text.split()), 128, break_on_hyphens=False, break_long_words=False) + "\n"


def not_compiled() -> str:
    """Eager mode in words: no ratio where the host's own speed changed during the table by more than what ratios show."""
    setting = "batch 1, not compiled"
    again = row_of(PART, setting, "bfloat16", AGAIN).value
    if abs(again - 1) > UNSTEADY:
        return (
            "in eager mode a step takes what the host takes, whose speed changed during the measurement (bfloat16's last call "
            f"took {again:.2f} of its first), so no ratio is quoted"
        )
    int4, int8 = (row_of(PART, setting, name).value for name in ("int4 g128", "int8"))
    return f"in eager mode, where a step takes what the host takes, int4 {int4:.2f} and int8 {int8:.2f}"


def row_of(table: str, setting: str, method: str, metric: str = SPEED) -> Row:
    """A committed row; KeyError where there is none."""
    wanted = table, setting, method, metric, device()
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
