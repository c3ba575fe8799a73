"""What a user of transformers gets, in README.md: rows of ``reports/data/generate.csv``.

``python docs/generation.py`` writes them between the marks of README.md; a test compares them with the rows.
"""

from __future__ import annotations

import csv
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- generation: python docs/generation.py -->\n", "<!-- end of generation -->\n"
SPEED, OF = "speed over bfloat16", "generate/full/llama-3.1-8b-{}-layers"
WHOLE, PART, PREFILL = OF.format(32), OF.format(8), "prefill of 2048 tokens"
TEXT = """\
Nothing has to be switched on: with the shapes of Llama-3.1-8B, 32 layers, transformers' own `generate()` and the compilation
that `cache_implementation="static"` starts, int4 runs {int4:.2f} and {int4_16:.2f} times as fast as bfloat16 at batch 1 and 16,
int8 {int8:.2f} and {int8_16:.2f}, int4 after the call below {prepared:.2f}. Without that cache nothing is compiled and a step
is what the host takes: of eight layers int4 {eager:.2f}, int8 {eager8:.2f} at batch 1, a prompt of 2048 tokens int4
{prefill:.2f}, fp8 dynamic {prefill8:.2f} (one {device}, [rows](reports/generate.md)).
"""


def main() -> None:
    """Write the figures into README.md."""
    path = ROOT / "README.md"
    before, _, after = path.read_text(encoding="utf-8").partition(BEGIN)
    path.write_text(before + BEGIN + text() + END + after.partition(END)[2], encoding="utf-8")


def text() -> str:
    """The sentences."""
    return TEXT.format(
        int4=speed(WHOLE, "batch 1, compiled", "int4 g128"),
        int8=speed(WHOLE, "batch 1, compiled", "int8"),
        int4_16=speed(WHOLE, "batch 16, compiled", "int4 g128"),
        int8_16=speed(WHOLE, "batch 16, compiled", "int8"),
        prepared=speed(WHOLE, "batch 1, compiled", "int4 g128, prepared"),
        eager=speed(PART, "batch 1, not compiled", "int4 g128"),
        eager8=speed(PART, "batch 1, not compiled", "int8"),
        prefill=speed(PART, PREFILL, "int4 g128"),
        prefill8=speed(PART, PREFILL, "fp8 dynamic, rows"),
        device=device().removeprefix("NVIDIA ").partition(" ")[0],
    )


def speed(table: str, setting: str, method: str) -> float:
    """A committed row; KeyError where there is none."""
    wanted = table, setting, method, SPEED, device()
    for row in rows():
        if (row["table"], row["setting"], row["method"], row["metric"], row["device"]) == wanted:
            return float(row["value"])
    raise KeyError(f"no row of {wanted}")


def device() -> str:
    """The GPU of the whole model's rows: an H200, for which the targets are, where there are its."""
    found = [row["device"] for row in rows() if row["table"] == WHOLE]
    return next((one for one in found if "H200" in one), found[0])


@lru_cache(maxsize=1)
def rows() -> list[dict[str, str]]:
    """All rows of the experiment."""
    with (ROOT / "reports" / "data" / "generate.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    main()
