"""What programs for a GPU print and keep: a line and a row for each number."""

from __future__ import annotations

import csv
import gc
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path

import torch

from reference import Quantized

#: Rows of this process, in order.
ROWS: list[dict[str, object]] = []


def say(part: str, what: str, value: float, unit: str, **more: object) -> None:
    """One line, one row."""
    ROWS.append({"part": part, "what": what, "value": value, "unit": unit, **more})
    words = " ".join(f"{key}={one}" for key, one in more.items())
    print(f"{part:12} {what:64} {value:12.5g} {unit} {words}".rstrip(), flush=True)


def write_rows(name: str, folder: str | Path | None = None) -> None:
    """All rows so far, in a file of a folder: $OUT, or the working directory, where it is None; made where there is none."""
    path = Path(folder or os.environ.get("OUT", ".")) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in ROWS for key in row)))
        writer.writeheader()
        writer.writerows(ROWS)


def differs() -> bool:
    """Whether a row of `bits` counts values that differ, or any says that something is not ok."""
    wrong = any(row["part"] == "bits" and row["unit"] == "differ" and row["value"] for row in ROWS)
    return wrong or any(row.get(name) is False for row in ROWS for name in ("ok", "codes", "repeatable"))


def run_parts(
    parts: Mapping[str, Callable[[], object]],
    names: Iterable[str],
    file: str,
    folder: str | Path | None = None,
) -> int:
    """Run the named parts and write all rows after each; one that fails is a row, and the others go on. 1 where one failed or
    something differs."""
    for name in names:
        try:
            parts[name]()
        except Exception as error:  # noqa: BLE001  the other parts go on
            say(name, f"FAILED: {type(error).__name__}: {str(error)[:200]}", float("nan"), "", ok=False)
        finally:
            write_rows(file, folder)
        gc.collect()
        torch.cuda.empty_cache()
    return int(differs())


def on_gpu(q: Quantized) -> Quantized:
    """The same operand on the GPU."""
    parts = {one.name: getattr(q, one.name) for one in fields(q)}
    return replace(q, **{name: part.cuda() for name, part in parts.items() if isinstance(part, torch.Tensor)})


__all__ = ["ROWS", "differs", "on_gpu", "run_parts", "say", "write_rows"]
